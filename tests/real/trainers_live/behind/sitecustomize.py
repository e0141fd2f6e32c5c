"""In each process of an engine: the trainers' packages are found behind those of vLLM, which come first."""

import os
import sys
import typing

import typing_extensions

sys.path.append(os.environ["KVROUTE_TRAINERS"])
typing.TypedDict = typing_extensions.TypedDict  # SkyRL asks for Python 3.12, whose own one pydantic takes
