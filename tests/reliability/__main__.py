"""`python -m tests.reliability SUITE`, from the root of the checkout."""

import sys

from reliability.command import main

if __name__ == "__main__":
    sys.exit(main())
