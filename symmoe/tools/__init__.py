"""Programs for users: doctor, check. The library imports none of them.

May import all but the command line, which imports them. Start with each `command`.
"""
