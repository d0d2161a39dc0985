"""Calls that repeat: what a call launches is recorded once, and played for later calls with other memory ("Calls on
tape" in docs/design.md).

May use errors only. Begin with `recorder` (`Tapes`).
"""
