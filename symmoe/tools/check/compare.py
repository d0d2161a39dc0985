"""Compares what n ranks have made of every tensor with what one rank has made of it, and says how they differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from symmoe.tools.check.runs import ACTIVATION, LOADED, STAGES, START, UPDATE, Tensors

_FLOORS = {"fp32": 3e-5, "fp16": 4e-3, "bf16": 3e-2}  # errors that pass, relative to a tensor's RMS
# What passes as well: such a share of the distance of the two dtypes on one rank.
_SHARES = {"fp32": 2.0**-12, "fp16": 2.0, "bf16": 2.0}
_SMALL = 1e-3  # of the largest RMS of a stage: what is far smaller may be nothing but rounding
_FIT = 0.05  # an explanation fits up to this, or to what is rounding if that is less

Found = Mapping[str, Tensors]  # by stage


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One tensor. error: None if there is none, as of what is not compared; factor: of a plain one, by which ranks' are
    wrong; text: how it differs, "" if it does not; note: what may be only rounding."""

    dtype: str
    stage: str
    name: str
    error: float | None = None
    tolerance: float = 0.0
    factor: float | None = None
    text: str = ""
    note: str = ""


def compare(dtype: str, one: Found, other: Found, ranks: Sequence[Found]) -> Iterator[Compared]:
    """All tensors in the order of the step. one: of one rank; other: the same in the other dtype, which shows what is
    only rounding. Where a router chooses otherwise, inputs being the same, what follows is not compared."""
    chooses_otherwise = False
    for stage in STAGES:
        if not all(stage in found for found in (one, *ranks)):
            return  # a run has failed
        wants, scale = one[stage], _SMALL * max(map(_rms, one[stage].values()), default=0.0)
        names = [*wants][:: 1 if stage in (START, ACTIVATION) else -1]  # backward goes from the last to the first
        for name in dict.fromkeys([*names, *(name for found in ranks for name in found[stage])]):
            got = [found[stage][name] for found in ranks if name in found[stage]]
            parts = _parts(got, wants[name]) if got and name in wants else None
            error, tolerance, factor, text, note = None, _FLOORS[dtype], None, "", ""
            if parts is None:
                if stage == START:
                    text = f"does not fit, or not all have it; shapes: {[[*each.shape] for each in got]}"
            elif not wants[name].is_floating_point():
                error, pairs = 0.0, zip(*parts[:2], strict=True)
                is_choice = stage == ACTIVATION and parts[2] and wants[name].dim() > 1
                if is_choice and any((ours.sort()[0] != theirs.sort()[0]).any() for ours, theirs in pairs):
                    chooses_otherwise, error = True, None
                    said = "chooses other experts, of the same inputs: what comes after it is not compared"
                    text, note = (said, "") if dtype == "fp32" else ("", said)
            elif not chooses_otherwise or stage == START:
                error = _error(*parts[:2], scale)
                if stage != START and stage in other:
                    rounding = _error([other[stage][name]], [wants[name]], scale)
                    tolerance = max(tolerance, _SHARES[dtype] * rounding if math.isfinite(rounding) else 0.0)
                if stage in (UPDATE, LOADED):  # Adam makes the same of a tiny gradient as of a large one: signs differ
                    tolerance = max(tolerance, 2 * math.sqrt(_FLOORS[dtype]))
                if error > tolerance:
                    factor, text = explain(stage, *parts, min(_FIT, tolerance))
                error = error if math.isfinite(error) else None
            known = {"error": error, "tolerance": tolerance, "factor": factor, "text": text, "note": note}
            yield Compared(dtype=dtype, stage=stage, name=name, **known)


def explain(
    stage: str, got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], is_cut: bool, slack: float
) -> tuple[float | None, str]:
    """(factor, how it differs) of a tensor's values by rank, and what they should be; is_cut: each has its own part."""

    def is_one(factor: float | None) -> bool:
        return factor is not None and abs(factor - 1) <= slack

    num_ranks, same = len(got), "times the one-rank value"
    if bad := [rank for rank, part in enumerate(got) if not part.isfinite().all()]:
        return None, f"{'was not loaded' if stage == LOADED else 'is not finite'} on rank {', '.join(map(str, bad))}"
    factors = [_factor(ours, theirs, slack) for ours, theirs in zip(got, want, strict=True)]
    if None not in factors:
        first = factors[0] or 0.0
        if all(abs((factor or 0.0) - first) <= slack * abs(first) for factor in factors):
            missing = {"1/num_ranks": first / num_ranks, "num_ranks": first * num_ranks}
            why = "".join(f": a factor of {name} is missing" for name, factor in missing.items() if is_one(factor))
            return first, f"{first:.4g} {same} on all ranks{why}"
        each = ", ".join(f"{factor:.5g} on rank {rank}" for rank, factor in enumerate(factors))
        return None, f"{same}, ranks have factors of their own: {each}"
    wrong = [rank for rank, factor in enumerate(factors) if not is_one(factor)]
    if is_cut and len({part.shape for part in want}) == 1:
        of_mean = [_factor(part, torch.stack([*want]).double().mean(0), slack) for part in got]
        if None not in of_mean:
            times = "" if is_one(of_mean[0]) else f"{of_mean[0]:.4g} times "
            return None, f"{times}the mean over ranks, of different experts: DDP or an all-reduce takes them for copies"
        for rank in wrong:
            for other, theirs in enumerate(want):
                if other != rank and is_one(_factor(got[rank], theirs, slack)):
                    return None, f"rank {rank} has the part of rank {other}"
    if not is_cut and (factor := _factor(torch.stack([*got]).double().sum(0), want[0], slack)) is not None:
        return None, f"ranks have parts of their own; the sum is {factor:.4g} {same}: nothing adds them"
    return None, f"on rank {', '.join(map(str, wrong))}"


def _parts(
    got: Sequence[torch.Tensor], want: torch.Tensor
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], bool] | None:
    """(values by rank, what they should be, whether each rank has its own part). Scalars are means of ranks' tokens."""
    if want.dim() == 0 and all(part.dim() == 0 for part in got):
        return [torch.stack([*got]).double().mean()], [want], False
    if all(part.shape == want.shape for part in got):
        return got, [want] * len(got), False
    for dim in range(want.dim()):
        sizes = [part.shape[dim] for part in got if part.dim() == want.dim()]
        if len(sizes) == len(got) and sum(sizes) == want.shape[dim]:
            wants = want.split(sizes, dim)
            if all(ours.shape == theirs.shape for ours, theirs in zip(got, wants, strict=True)):
                return got, wants, True
    return None


def _error(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], scale: float) -> float:
    """RMS of the difference on the worst rank, relative to that of the whole and a scale."""
    worst = max(_rms(ours.double() - theirs.double()) for ours, theirs in zip(got, want, strict=True))
    size = math.sqrt(sum(_rms(part) ** 2 for part in want) / len(want)) + scale
    return math.inf if math.isnan(worst) else worst / size if worst else 0.0


def _rms(tensor: torch.Tensor) -> float:
    return tensor.double().square().mean().sqrt().item() if tensor.is_floating_point() and tensor.numel() else 0.0


def _factor(got: torch.Tensor, want: torch.Tensor, slack: float) -> float | None:
    """The factor by which `got` is `want`, if it is."""
    ours, theirs = got.double(), want.double()
    if got.shape != want.shape or not theirs.any():
        return None if ours.any() else 1.0
    factor: float = ((ours * theirs).sum() / theirs.square().sum()).item()
    return factor if _rms(ours - factor * theirs) <= slack * _rms(ours) else None
