"""How many examples the contract of stores draws."""

from __future__ import annotations

from budget import examples

from cache_manager.testing.contract import StorageContract

# What is shipped says how many for users; here they are drawn as all others are.
StorageContract.machine_settings = examples(25, stateful_step_count=25)
