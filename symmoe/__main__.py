"""`python -m symmoe` is the command `symmoe`."""

import sys

from symmoe.cli import main

sys.exit(main())
