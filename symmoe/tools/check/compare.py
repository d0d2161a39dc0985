"""Compares what n ranks have made of every tensor with what one rank has made of it, and says how they differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from symmoe.tools.check.runs import ACTIVATION, LOADED, STAGES, START, Found

# Errors are relative to a tensor's RMS. What passes, and how many times what a rounding of every weight does.
_FLOORS = {"fp32": 3e-5, "fp16": 4e-3, "bf16": 3e-2}
_NOISES = 8
_SMALL = 1e-3  # of the largest RMS of a stage: what is far smaller may be nothing but rounding
_FIT = 0.05  # an explanation fits up to this, or what is rounding if that is less


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One tensor. error: None if it cannot be compared; factor: if n ranks have that times the right one; text: how it differs,
    "" if it does not."""

    dtype: str
    stage: str
    name: str
    error: float | None = None
    tolerance: float = 0.0
    factor: float | None = None
    text: str = ""


def compare(dtype: str, one: Found, noisy: Found, ranks: Sequence[Found]) -> Iterator[Compared]:
    """All tensors in the order of the step. one: of one rank; noisy: the same with weights off by a rounding. Where a
    router's choice differs, inputs being the same, it is by rounding: what follows is not compared."""
    chooses_otherwise = False
    for stage in STAGES:
        if not all(stage in found for found in (one, noisy, *ranks)):
            return  # a run has failed
        wants = one[stage]
        scale = _SMALL * max((_rms(want) for want in wants.values() if want.is_floating_point()), default=0.0)
        names = [*wants] if stage in (START, ACTIVATION) else [*reversed(wants)]  # backward goes from the last
        for name in dict.fromkeys([*names, *(name for found in ranks for name in found[stage])]):
            got = [found[stage][name] for found in ranks if name in found[stage]]
            parts = _parts(got, wants[name]) if got and name in wants else None
            if stage == START and parts is None:
                text = f"of shape {[*wants[name].shape]}" if name in wants else "not there"
                text = f"it is {text} on one rank, and on {len(ranks)} {[[*part.shape] for part in got]}"
                yield Compared(dtype=dtype, stage=stage, name=name, text=text)
            elif parts is None or (chooses_otherwise and stage != START):
                yield Compared(dtype=dtype, stage=stage, name=name)
            elif not wants[name].is_floating_point():
                chooses_otherwise |= parts[2] and any(not _same_choice(*pair) for pair in zip(*parts[:2], strict=True))
            else:
                error, tolerance = _error(*parts[:2], scale), _FLOORS[dtype]
                if stage != START and name in noisy[stage]:
                    noise = _error([noisy[stage][name]], [wants[name]], scale)
                    tolerance = max(tolerance, _NOISES * noise if math.isfinite(noise) else 0.0)
                factor, text = explain(stage, *parts, min(_FIT, tolerance)) if error > tolerance else (None, "")
                known = {"tolerance": tolerance, "factor": factor, "text": text}
                known_error = error if math.isfinite(error) else None
                yield Compared(dtype=dtype, stage=stage, name=name, error=known_error, **known)


def explain(
    stage: str, got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], is_cut: bool, slack: float
) -> tuple[float | None, str]:
    """(factor, how it differs) of a tensor's values by rank, and what they should be; is_cut: each has its own part."""
    num_ranks = len(got)
    fits = partial(_factor, slack=slack)

    def is_one(factor: float | None) -> bool:
        return factor is not None and abs(factor - 1) <= slack

    if bad := [rank for rank, part in enumerate(got) if not part.isfinite().all()]:
        return None, f"{'was not loaded' if stage == LOADED else 'is not finite'} on rank {', '.join(map(str, bad))}"
    factors = list(map(fits, got, want))
    if all(known := [factor for factor in factors if factor is not None]) and len(known) == num_ranks:
        first = known[0]
        if all(is_one(factor / first) for factor in known):
            meanings = {
                num_ranks: "a factor of 1/num_ranks is missing",
                1 / num_ranks: "a factor of num_ranks is missing",
            }
            why = next((f": {text}" for size, text in meanings.items() if is_one(first / size)), "")
            return first, f"{first:.4g} times the one-rank value on all ranks{why}"
    if len(known) == num_ranks:
        each = ", ".join(f"{factor:.5g} on rank {rank}" for rank, factor in enumerate(known))
        return None, f"times the one-rank value, ranks have factors of their own: {each}"
    wrong = [rank for rank, factor in enumerate(factors) if not is_one(factor)]
    if is_cut and len({part.shape for part in want}) == 1:
        mean = torch.stack([*want]).double().mean(0)
        if None not in (of_mean := [fits(part, mean) for part in got]):
            times = "" if is_one(of_mean[0]) else f"{of_mean[0]:.4g} times "
            return None, f"{times}the mean over ranks, of different experts: DDP or an all-reduce takes them for copies"
        for rank in wrong:
            for other in range(num_ranks):
                if other != rank and is_one(fits(got[rank], want[other])):
                    return None, f"rank {rank} has the part of rank {other}"
    if not is_cut and (factor := fits(torch.stack([*got]).double().sum(0), want[0])) is not None:
        return (
            None,
            f"ranks have parts of their own; the sum is {factor:.4g} times the one-rank value: nothing adds them",
        )
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


def _same_choice(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.equal(ours.sort(-1)[0], theirs.sort(-1)[0])


def _error(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], scale: float) -> float:
    """RMS of the difference on the worst rank, relative to that of the whole and a scale."""
    worst = max(_rms(ours.double() - theirs.double()) for ours, theirs in zip(got, want, strict=True))
    size = math.sqrt(sum(_rms(part) ** 2 for part in want) / len(want)) + scale
    return math.inf if math.isnan(worst) else worst / size if worst else 0.0


def _rms(tensor: torch.Tensor) -> float:
    return tensor.double().square().mean().sqrt().item() if tensor.numel() else 0.0


def _factor(got: torch.Tensor, want: torch.Tensor, slack: float) -> float | None:
    """The factor by which `got` is `want`, if it is."""
    ours, theirs = got.double(), want.double()
    if got.shape != want.shape or not theirs.any():
        return None if ours.any() else 1.0
    factor: float = ((ours * theirs).sum() / theirs.square().sum()).item()
    return factor if _rms(ours - factor * theirs) <= slack * _rms(ours) else None
