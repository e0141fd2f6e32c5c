"""``python -m kvroute``: the command line without its script."""

import sys

from kvroute.cli import main

sys.exit(main())
