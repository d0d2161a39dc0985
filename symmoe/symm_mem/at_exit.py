"""What a process with a process group has to wait for at its end, on behalf of torch.

A thread of gloo says that a collective has ended, and drops its tensors after that, for which it wants Python's lock.
If the interpreter has begun to end in between, Python (before 3.14) ends the thread in the middle of a destructor. That
aborts the process: "terminate called without an active exception", seen with torch 2.13 on busy machines.
"""

from __future__ import annotations

import atexit
import functools
import os
import time

_THREAD = "pt_gloo_runloop"
_LONGEST_S = 5.0  # enough for a thread that has something to drop
_NUM_LOOKS = 3  # in a single look the thread may be waiting for the lock


@functools.cache
def wait_for_gloo_at_exit() -> None:
    """Lets gloo's threads finish before the interpreter ends, however often this is called. Waits for no peer."""
    atexit.register(_wait_for_gloo)


def _wait_for_gloo() -> None:
    deadline, num_looks = time.monotonic() + _LONGEST_S, 0
    while num_looks < _NUM_LOOKS and time.monotonic() < deadline:
        num_looks = num_looks + 1 if _is_gloo_asleep() else 0
        time.sleep(1e-3)  # releases the lock


def _is_gloo_asleep() -> bool:
    """Whether none of gloo's threads runs or could run."""
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/stat", encoding="utf-8") as file:
                _, _, rest = file.read().partition("(")
        except OSError:
            continue  # the thread has ended
        name, _, state = rest.rpartition(") ")
        if name == _THREAD and not state.startswith("S"):
            return False
    return True
