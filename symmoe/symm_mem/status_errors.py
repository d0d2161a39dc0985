"""Turns what kernels leave for the host, in plain integers, into typed errors."""

from __future__ import annotations

from collections.abc import Sequence

from symmoe.errors import CapacityError, ConfigMismatch, ExpertIdError, PeerAborted, PeerError, PeerTimeout, SymmoeError
from symmoe.kernels import control
from symmoe.symm_mem.configurations import Configurations
from symmoe.symm_mem.inbox import Report

# The tuples into which fields of a call (control.CALL_FIELDS) are indices.
CHOICES: dict[str, Sequence[object]] = {
    "dtype": control.DTYPES,
    "order": control.ORDERS,
    "gradients": control.GRADIENTS,
    "layout": control.LAYOUTS,
    "schedule": control.SCHEDULES,
}


def peer_error(
    report: Report, sender: int | None, rank: int, bound: str, bound_s: float, *, node: int | None
) -> PeerError:
    """The error on rank `rank` of a report from `sender`, None: its own; it names the missing rank if the report does.

    bound, bound_s: name and value of the bound after which it was missed. node: the missing rank's, or None.
    """
    if sender is not None and report.missing in (-1, rank):  # the missing rank learns who gave it up
        return PeerAborted(rank=sender, reason=report.reason)
    return PeerTimeout(
        rank=report.missing,
        phase=control.PHASES[report.phase],
        expected=report.expected,
        seen=report.seen,
        bound=bound,
        bound_s=bound_s,
        reported_by=sender,
        node=node,
        is_lost=bool(report.lost),
    )


def plan_record(report: list[int]) -> list[int]:
    """The status record of a plan with this report (control.SUM_*), as its kernel would have written it."""
    words = [0] * control.STATUS_WORDS
    words[control.STATUS_KIND], words[control.STATUS_PHASE] = control.STATUS_PLAN, control.PHASE_PLAN
    words[control.STATUS_PEER] = report[control.SUM_ERROR_RANK]
    words[control.STATUS_EXPECTED], words[control.STATUS_SEEN] = report[control.SUM_LIMIT], report[control.SUM_VALUE]
    words[control.STATUS_EPOCH], words[control.STATUS_WHERE] = report[control.SUM_ERROR], report[control.SUM_WHERE]
    return words


def plan_error(words: list[int]) -> SymmoeError:
    """The error of a status record of kind STATUS_PLAN; the same on every rank."""
    code, rank = words[control.STATUS_EPOCH], words[control.STATUS_PEER]
    limit, value = words[control.STATUS_EXPECTED], words[control.STATUS_SEEN]
    where = words[control.STATUS_WHERE]
    if code == control.PLAN_FAULT:
        return SymmoeError("the plan failed on another rank")
    if code == control.PLAN_MISMATCH:
        field = control.AGREED_FIELDS[where]
        zero, mine = _shown(where, limit), _shown(where, value)
        return ConfigMismatch(f"{field} differs: rank 0 has {zero}, rank {rank} has {mine}")
    if code == control.PLAN_BAD_ID:
        problem = f"{value} is neither -1 nor in [0, {limit})"
        return ExpertIdError(f"topk_idx on rank {rank}, flat position {where}: {problem}")
    if code == control.PLAN_OVERFLOW:
        return CapacityError(f"rank {rank} is routed {value} rows, more than capacity ({limit})")
    if code == control.PLAN_RAIL_OVERFLOW:
        return CapacityError(f"rank {rank} sends {value} tokens to one other node, more than rail_capacity ({limit})")
    raise AssertionError(f"unknown plan error {code}")


def mismatch_error(configurations: Configurations, first: int, call: int, peer: int, other_call: int) -> ConfigMismatch:
    """The error of two ranks (in the EP group), `first` and `peer`, that are in different calls (control.pack_call)."""
    zero, other = control.unpack_call(call), control.unpack_call(other_call)
    here = control.PHASES[zero["phase"]]
    if zero["phase"] != other["phase"]:
        there = control.PHASES[other["phase"]]
        return ConfigMismatch(f"ranks are in different calls: rank {first} at '{here}', rank {peer} at '{there}'")
    if zero["phase"] in (control.PHASE_PLAN, control.PHASE_NODES_PLAN):
        return configurations.mismatch(first, control.config_of(call), peer, control.config_of(other_call))
    field = next(name for name in control.CALL_FIELDS if zero[name] != other[name])
    names = {**CHOICES, "probs": ("without", "with")}.get(field)
    shown = [names[call[field]] if names else call[field] for call in (zero, other)]
    return ConfigMismatch(f"{field} differs at '{here}': rank {first} has {shown[0]}, rank {peer} has {shown[1]}")


def _shown(word: int, value: int) -> str:
    if word == control.HEAD_DTYPE:
        return str(control.DTYPES[value]) if value >= 0 else "none"
    if word == control.HEAD_OVERFLOW:
        return "'drop'" if value == control.OVERFLOW_DROP else "'raise'"
    if word == control.HEAD_QUANTIZED_WIRE:
        return repr(control.QUANTIZED_WIRES[value])
    if word == control.HEAD_PRECISION and value >= 0:
        name, options = control.PRECISIONS[value & (1 << control.PRECISION_BITS) - 1], value >> control.PRECISION_BITS
        return f"{name} with options {options:#x}" if options else name
    return "none" if value < 0 else str(value)
