"""Programs for people: doctor, check. The library uses none of them.

May use everything but the command line, which names them. Begin with the `command` of each.
"""
