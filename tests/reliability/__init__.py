"""The reliability suites: `python -m tests.reliability SUITE`. See command.py for the suites and their figures."""
