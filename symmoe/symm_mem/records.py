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


def plan_error(code: int, rank: int, limit: int, value: int, where: int) -> SymmoeError:
    """The error of a plan, from the first words of `lay_out`'s report; the same on every rank."""
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
