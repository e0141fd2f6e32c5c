"""Prefill, decode and the HTTP front as commands. Needs aiohttp and prometheus-client: import its modules."""
