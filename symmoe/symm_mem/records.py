"""Turns what kernels leave for the host, in plain integers, into typed errors."""

from __future__ import annotations

from symmoe.errors import CapacityError, ConfigMismatch, ExpertIdError, PeerTimeout, SymmoeError
from symmoe.kernels import control


def timeout_error(words: list[int], timeout_s: float) -> PeerTimeout:
    """The error of a status record of kind STATUS_TIMEOUT."""
    return PeerTimeout(
        rank=words[control.STATUS_PEER],
        phase=control.PHASES[words[control.STATUS_PHASE]],
        expected=words[control.STATUS_EXPECTED],
        seen=words[control.STATUS_SEEN],
        timeout_s=timeout_s,
    )


def plan_error(words: list[int]) -> SymmoeError:
    """The error of a status record of kind STATUS_PLAN."""
    return reported_error(
        words[control.STATUS_EPOCH],
        words[control.STATUS_PEER],
        words[control.STATUS_EXPECTED],
        words[control.STATUS_SEEN],
        words[control.STATUS_WHERE],
    )


def mismatch_error(words: list[int]) -> ConfigMismatch:
    """The error of a status record of kind STATUS_MISMATCH."""
    peer = words[control.STATUS_PEER]
    zero = control.unpack_call(words[control.STATUS_EXPECTED])
    other = control.unpack_call(words[control.STATUS_SEEN])
    here = control.PHASES[zero["phase"]]
    if zero["phase"] != other["phase"]:
        there = control.PHASES[other["phase"]]
        return ConfigMismatch(f"ranks are in different calls: rank 0 at '{here}', rank {peer} at '{there}'")
    field = next(name for name in control.CALL_FIELDS if zero[name] != other[name])
    names = {
        "dtype": control.DTYPES,
        "order": control.ORDERS,
        "probs": ("without", "with"),
        "layout": control.LAYOUTS,
        "schedule": control.SCHEDULES,
    }.get(field)
    shown = [names[call[field]] if names else call[field] for call in (zero, other)]
    return ConfigMismatch(f"{field} differs at '{here}': rank 0 has {shown[0]}, rank {peer} has {shown[1]}")


def reported_error(code: int, rank: int, limit: int, value: int, where: int) -> SymmoeError:
    """The error of a plan, from the first words of `lay_out`'s report; the same on every rank."""
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
    raise AssertionError(f"unknown plan error {code}")


def _shown(word: int, value: int) -> str:
    if word == control.HEAD_DTYPE:
        return str(control.DTYPES[value]) if value >= 0 else "none"
    if word == control.HEAD_OVERFLOW:
        return "'drop'" if value == control.OVERFLOW_DROP else "'raise'"
    return "none" if value < 0 else str(value)
