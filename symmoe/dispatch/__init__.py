"""Dispatch: the plan (which row of which rank a slot becomes) and the trip of tokens to their experts.

May use the heap and precision's wire format. Begin with `plan`, then `trip`.
"""

from symmoe.dispatch.plan import DispatchHandle, Plan

__all__ = ["DispatchHandle", "Plan"]
