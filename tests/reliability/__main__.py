"""`python -m tests.reliability SUITE`, from the root of the checkout."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/, as pytest has it

from reliability.command import main

if __name__ == "__main__":
    sys.exit(main())
