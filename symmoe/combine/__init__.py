"""Combine: a token's rows return from the ranks of its experts, and are summed.

May use the plan. `trip` is the only module, for every schedule.
"""
