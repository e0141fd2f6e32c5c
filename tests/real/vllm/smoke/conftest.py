"""Modules beside the tests are found, as those of the folder above are."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
collect_ignore = ["cpu_choices.py", "cpu_states.py"]  # of older releases alone
