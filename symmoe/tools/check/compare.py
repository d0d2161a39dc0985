"""Compares what n ranks have made of every tensor with what one rank has made of it, and says how they differ."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from symmoe.tools.check.runs import ACTIVATION, LOADED, STAGES, START, UPDATE, Tensors

# Errors that pass, relative to a tensor's RMS; after a step others, since Adam makes as much of a tiny gradient, whose
# sign is rounding, as of a large one. And the share of the distance of the two dtypes on one rank that passes as well.
_FLOORS = {"fp32": 3e-5, "fp16": 4e-3, "bf16": 3e-2}
_FLOORS_OF_STEP = {"fp32": 1e-2, "fp16": 1.0, "bf16": 1.0}
_SHARES = {"fp32": 2.0**-12, "fp16": 2.0, "bf16": 2.0}
_SMALL = 1e-3  # of the largest RMS of a stage: what is far smaller may be nothing but rounding
_FIT = 0.05  # an explanation fits up to this, or to what is rounding if that is less

Found = Mapping[str, Tensors]  # by stage


@dataclass(slots=True)
class Compared:
    """One tensor. error: None if there is none, as of what is not compared; text: how it differs, "" if it does not;
    note: what may be only rounding."""

    dtype: str
    stage: str
    name: str
    tolerance: float
    error: float | None = None
    text: str = ""
    note: str = ""


def compare(dtype: str, one: Found, other: Found, ranks: Sequence[Found]) -> Iterator[Compared]:
    """All tensors in the order of the step. one: of one rank; other: the same in the other dtype, which shows what is
    only rounding. Where a router chooses otherwise, inputs being the same, what follows is not compared."""
    chooses_otherwise = False
    for stage in itertools.takewhile(
        lambda stage: all(stage in found for found in (one, *ranks)), STAGES
    ):
        wants, scale = one[stage], _SMALL * max(map(_rms, one[stage].values()), default=0.0)
        names = [*wants][
            :: 1 if stage in (START, ACTIVATION) else -1
        ]  # backward goes from the last to the first
        for name in dict.fromkeys([*names, *(name for found in ranks for name in found[stage])]):
            this = Compared(
                dtype,
                stage,
                name,
                (_FLOORS_OF_STEP if stage in (UPDATE, LOADED) else _FLOORS)[dtype],
            )
            got = [found[stage][name] for found in ranks if name in found[stage]]
            parts = _parts(got, wants[name]) if got and name in wants else None
            if parts is None:
                shapes = [[*each.shape] for each in got]
                this.text = (
                    f"does not fit, or not all have it; shapes: {shapes}" if stage == START else ""
                )
            elif not wants[name].is_floating_point():
                differs = any(
                    not torch.equal(*(each.sort()[0] for each in pair))
                    for pair in zip(*parts[:2], strict=True)
                )
                if differs and stage == ACTIVATION and parts[2] and wants[name].dim() > 1:
                    chooses_otherwise = True
                    said = "chooses other experts, of the same inputs: what comes after it is not compared"
                    this.text, this.note = (said, "") if dtype == "fp32" else ("", said)
                else:
                    this.error = 0.0
            elif not chooses_otherwise or stage == START:
                error = _error(*parts[:2], scale)
                if stage != START and stage in other:
                    rounding = _SHARES[dtype] * _error([other[stage][name]], [wants[name]], scale)
                    this.tolerance = max(this.tolerance, rounding if rounding < math.inf else 0.0)
                if error > this.tolerance:
                    this.text = explain(stage, *parts, min(_FIT, this.tolerance))
                this.error = error if error < math.inf else None
            yield this


def explain(
    stage: str,
    got: Sequence[torch.Tensor],
    want: Sequence[torch.Tensor],
    is_cut: bool,
    slack: float,
) -> str:
    """How a tensor's values by rank differ from what they should be. is_cut: each has its own part."""
    ranks, value, (got, want) = (
        range(len(got)),
        "times the one-rank value",
        _without_infinities(got, want),
    )
    bad = ", ".join(f"{rank}" for rank in ranks if not got[rank].isfinite().all())
    where = [f" on rank {bad}"] * bool(bad) + [" on one rank alone"] * (
        not all(it.isfinite().all() for it in want)
    )
    if where:
        return f"{'was not loaded' if stage == LOADED else 'is not finite'}{' and'.join(where)}"
    if factors := _factors(got, want, slack):
        first = factors[0]
        if max(factors) - min(factors) > slack * abs(first):
            each = ", ".join(f"{factor:.5g} on rank {rank}" for rank, factor in enumerate(factors))
            return f"{value}, ranks have factors of their own: {each}"
        missing = {"1/num_ranks": first / len(got), "num_ranks": first * len(got)}
        why = "".join(
            f": a factor of {name} is missing"
            for name, each in missing.items()
            if abs(each - 1) <= slack
        )
        return f"{first:.4g} {value} on all ranks{why}"
    if is_cut and len({part.shape for part in want}) == 1:
        if factors := _factors(got, [torch.stack([*want]).double().mean(0)] * len(got), slack):
            times = "" if abs(factors[0] - 1) <= slack else f"{factors[0]:.4g} times "
            return f"{times}the mean over ranks, of different experts: DDP or an all-reduce takes them for copies"
        for rank, other in itertools.permutations(ranks, 2):
            if _error([got[rank]], [want[other]], 0.0) <= slack:
                return f"rank {rank} has the part of rank {other}"
    if not is_cut and (factors := _factors([torch.stack([*got]).double().sum(0)], want[:1], slack)):
        return (
            f"ranks have parts of their own; the sum is {factors[0]:.4g} {value}: nothing adds them"
        )
    return f"on rank {', '.join(f'{rank}' for rank in ranks if _error([got[rank]], [want[rank]], 0.0) > slack)}"


def _parts(
    got: Sequence[torch.Tensor], want: torch.Tensor
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], bool] | None:
    """(values by rank, what they should be, whether each rank has its own part). Scalars are means of ranks' tokens."""
    if want.dim() == 0 and all(part.dim() == 0 for part in got):
        return [torch.stack([*got]).double().mean()], [want], False
    if all(part.shape == want.shape for part in got):
        return got, [want] * len(got), False
    for dim in range(want.dim() if all(part.dim() == want.dim() for part in got) else 0):
        sizes = [part.shape[dim] for part in got]
        wants = want.split(sizes, dim) if sum(sizes) == want.shape[dim] else ()
        if [part.shape for part in got] == [part.shape for part in wants]:
            in_turn = [
                want[rank :: len(got)] for rank in range(len(got))
            ]  # rows of [S, B, H]; or experts
            takes_turns = (
                len(set(sizes)) == 1
                and dim == 0
                and _error(got, in_turn, 0.0) < _error(got, wants, 0.0)
            )
            return got, in_turn if takes_turns else wants, True
    return None


def _error(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], scale: float) -> float:
    """RMS of the difference on the worst rank, relative to that of the whole and a scale."""
    pairs = zip(*_without_infinities(got, want), strict=True)
    differences = [ours.double() - theirs.double() for ours, theirs in pairs]
    if not all(each.isfinite().all() for each in differences):
        return math.inf
    size = math.sqrt(sum(_rms(part) ** 2 for part in want) / len(want)) + scale + 1e-30
    return max(map(_rms, differences)) / size


def _without_infinities(
    got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]
) -> list[list[torch.Tensor]]:
    """Both with 0 where both are infinite, as masked scores are."""
    same = [ours.isinf() & (ours == theirs) for ours, theirs in zip(got, want, strict=True)]
    return [
        [part.masked_fill(mask, 0.0) for part, mask in zip(parts, same, strict=True)]
        for parts in (got, want)
    ]


def _rms(tensor: torch.Tensor) -> float:
    """Of the finite numbers."""
    finite = tensor.double().nan_to_num(0.0, 0.0, 0.0)
    return (
        finite.square().mean().sqrt().item()
        if tensor.is_floating_point() and tensor.numel()
        else 0.0
    )


def _factors(
    got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], slack: float
) -> list[float]:
    """By rank the factors by which `got` is `want`; [] if it is not so on all."""
    factors = list[float]()
    for ours, theirs in zip(got, (part.double() for part in want), strict=True):
        square = theirs.square().sum().item()
        factors.append((ours * theirs).sum().item() / square if square else 1.0)
        if _rms(ours - factors[-1] * theirs) > slack * _rms(ours):
            return []
    return factors
