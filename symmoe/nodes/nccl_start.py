"""Connects the ranks of a rail by NCCL within a bound: NCCL has none, and does not tell the others when one fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from symmoe.errors import BackendUnavailable

_ID, _FAILED = "id", "failed"  # keys
_POLL_S = 0.05
_HINT = "; NCCL_SOCKET_IFNAME and NCCL_IB_HCA name its devices"


def connect_together(
    make_id: Callable[[], bytes] | None,
    connect: Callable[[bytes, threading.Event], None],
    store: Any,
    *,
    node: int,
    timeout_s: float,
) -> None:
    """Returns when connect(id, is_given_up) has, in a thread of its own. Collective over the rail.

    A thread that is given up ends when NCCL lets it; it then has to undo what it has done.

    Args:
        make_id: of one of the ranks, makes the id by which they find each other; None on the others.
        store: of torch, for this rail and this attempt.
        node: this rank's, for the others' error.
        timeout_s: bound.

    Raises:
        BackendUnavailable: one of both functions has failed, here or on another rank, or it takes longer.
    """
    problems: list[BaseException] = []
    is_given_up = threading.Event()

    def run() -> None:
        try:
            if make_id is not None:
                store.set(_ID, make_id().hex())
            # Not store.wait: other threads could not use the store meanwhile.
            while not store.check([_ID]):
                if is_given_up.wait(_POLL_S):
                    return
            connect(bytes.fromhex(store.get(_ID).decode()), is_given_up)
        except BaseException as error:  # noqa: BLE001 - of another thread
            problems.append(error)

    thread = threading.Thread(target=run, name="symmoe-nccl", daemon=True)
    deadline = time.monotonic() + timeout_s
    thread.start()
    try:
        while True:
            thread.join(_POLL_S)
            if problems:
                text = f"NCCL does not connect node {node} with the others: {problems[0]}{_HINT}"
                store.set(_FAILED, text)
                raise BackendUnavailable(text) from problems[0]
            if not thread.is_alive():
                return
            if store.check([_FAILED]):
                raise BackendUnavailable(store.get(_FAILED).decode())
            if time.monotonic() > deadline:
                raise BackendUnavailable(f"NCCL has not connected the nodes within {timeout_s:g} s{_HINT}")
    finally:
        is_given_up.set()
