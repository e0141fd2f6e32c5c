"""The imports of a nursery of SGLang's engines, whose processes are forked too.

SGLang spawns its scheduler and its detokenizer: each is an interpreter that imports everything, for more than ten
seconds of a processor. The servers of ``test_verify.py`` are left as they are installed.
"""

from __future__ import annotations

import multiprocessing
from importlib.metadata import version

from kvroute.integrations.sglang.versions import release

if release(version("sglang")) < (0, 5, 17):
    import older  # noqa: F401

import sglang.srt.entrypoints.engine
import sglang.srt.managers.detokenizer_manager
import sglang.srt.managers.scheduler  # noqa: F401

multiprocessing.set_start_method("fork")
multiprocessing.set_start_method = lambda *_, **__: None  # type: ignore[assignment]
