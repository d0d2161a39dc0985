"""The flight record: this rank's last collective calls, to find out why ranks hang ("Flight records" in
docs/reliability.md). The record contains counts, indices, times and the text of the error, but no values of tokens."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from symmoe.errors import SymmoeError
from symmoe.kernels import control
from symmoe.symm_mem.reports import CHOICES
from symmoe.symm_mem.waits import Waits

FORMAT = "symmoe flight record 1"
MAX_FILES = 100  # of one rank and process in one folder
_STATUS_KINDS = ("ok", "timeout", "fault", "plan", "mismatch", "abort", "rail")
_NAMES = {
    **CHOICES,
    "dtype": [str(dtype).removeprefix("torch.") for dtype in control.DTYPES],
    "probs": (0, 1),
}


def describe(waits: Waits, error: SymmoeError, status: Sequence[int]) -> dict[str, Any]:
    """The record of an error that is about to be raised, as a dict for JSON, with the last calls and the words of the
    status record. Reads the control block on the current stream."""
    now_ns = time.monotonic_ns()
    wall_s = time.time()
    calls = waits.flight.calls
    peers = waits.peers
    local_peers = replace(peers, rank=0, views=(peers.control_block.cpu(),))
    plan_epoch = next(
        (call[1] for call in reversed(calls) if call[2] & 0xFF == control.PHASE_PLAN), None
    )
    tokens = (
        []
        if plan_epoch is None
        else local_peers.count_table(0, plan_epoch)[:, control.HEAD_NUM_TOKENS].tolist()
    )
    details = {
        name: getattr(error, name)
        for name in ("rank", "phase", "expected", "seen", "reported_by")
        if hasattr(error, name)
    }
    return {
        "format": FORMAT,
        "rank": peers.in_group(peers.rank),
        "num_ranks": peers.layout.num_rows,
        "pid": os.getpid(),
        "backend": "host" if waits.device.type == "cpu" else "nvshmem",
        "timeout_s": waits.timeout_s,
        "written_unix_s": wall_s,
        "error": {"type": type(error).__name__, "text": str(error), **details},
        "status": {
            "kind": _STATUS_KINDS[status[control.STATUS_KIND]],
            "phase": control.PHASES[status[control.STATUS_PHASE]],
            "peer": status[control.STATUS_PEER],
            "expected": status[control.STATUS_EXPECTED],
            "seen": status[control.STATUS_ACTUAL],
            "epoch": status[control.STATUS_EPOCH],
            "where": status[control.STATUS_WHERE],
        },
        "barrier_epoch": local_peers.epoch,
        # The last epoch that each rank has sent here, even if an aborting rank has written over it.
        "epoch_of_rank": ((local_peers.mailbox(0)[..., 0] & control.EPOCH_MASK) >> 1)
        .amax(0)
        .tolist(),
        "signal_of_rank": (local_peers.signals(0)[:, 0] & control.EPOCH_MASK).tolist(),
        **({"num_tokens_of_rank": tokens} if tokens else {}),
        "calls": [_describe_call(call, wall_s - now_ns / 1e9) for call in calls],
    }


def find_folder() -> str:
    """The folder for records, from SYMMOE_FLIGHT_DIR in the environment; "": none."""
    return os.environ.get("SYMMOE_FLIGHT_DIR", "")


def write(record: dict[str, Any], folder: str) -> str:
    """Writes a record that only this user can read; returns the addition to the error's text, or ""."""
    if not folder:
        return ""
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        for number in range(MAX_FILES):
            path = (
                Path(folder)
                / f"symmoe-flight-rank{record['rank']}-pid{record['pid']}-{number}.json"
            )
            with (
                suppress(FileExistsError),
                open(path, "x", opener=partial(os.open, mode=0o600)) as stream,
            ):
                json.dump(record, stream, indent=1)
                return f" (flight record: {path})"
        problem: str | None = f"there are {MAX_FILES} of this process already"
    except OSError as error:
        problem = error.strerror
    return f" (no flight record in {folder}: {problem})"


def _describe_call(entry: list[Any], wall_offset_s: float) -> dict[str, Any]:
    launch, epoch, call, peer, launched_ns, counts = entry
    fields = control.unpack_call(call)
    described: dict[str, Any] = {
        "launch": launch,
        "epoch": epoch,
        "phase": control.PHASES[fields.pop("phase")],
        "launched_unix_s": round(wall_offset_s + launched_ns / 1e9, 6),
        "launched_monotonic_s": launched_ns / 1e9,
    }
    if peer >= 0:
        described["signal_of"] = peer
    elif call & 0xFF not in (control.PHASE_PLAN, control.PHASE_NODES_PLAN) and (
        fields["hidden"] or fields["probs"] or fields["replicas"]
    ):  # a trip; with replicas, as of a plan, the other fields are the number of a configuration
        names = ("hidden", "dtype", "order", "gradients", "probs", "layout", "schedule")
        for name in (*(() if fields["replicas"] else names), "plan"):
            described[name] = _NAMES[name][fields[name]] if name in _NAMES else fields[name]
    return {**described, **(counts or {})}
