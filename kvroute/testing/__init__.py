"""Contracts that implementations of kvroute's ports subclass."""
