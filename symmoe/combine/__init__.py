"""The way home: a token's rows come back from the ranks of its experts, and are summed.

May use the plan. `trip` is the only module, for every schedule.
"""
