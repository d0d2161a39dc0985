"""Programs for users: doctor, check. The library imports none of them.

May import everything except the command line, which imports them. Start with each one's `command`.
"""
