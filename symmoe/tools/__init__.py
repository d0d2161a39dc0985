"""Programs for users: doctor, check. A reader starts with `command.py` of a program.

Programs may import every part of the library, and only the command line imports programs.
"""
