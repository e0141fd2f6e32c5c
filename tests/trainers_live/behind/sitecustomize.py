"""In each process of an engine: the trainers' packages are found behind those of vLLM, which come first."""

import os
import sys

sys.path.append(os.environ["KVROUTE_TRAINERS"])
