"""Programs: the launches of a kind of call are recorded once, and run for every call with its own memory
(docs/design/programs.md).

May use errors, address_range and torch_internals only. Begin with `programs` (`Programs`).
"""
