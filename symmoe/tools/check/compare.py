"""Compares every tensor on n ranks with one rank's, and loaded tensors with the saved ones, and explains the
differences."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from symmoe.tools.check.runs import (
    ACTIVATION,
    CLIPPED,
    GRADIENT,
    LOADED,
    OPTION,
    OWN,
    SAVED,
    STAGES,
    START,
    UPDATE,
    Tensors,
    spoilt,
)

# Accepted errors, relative to a tensor's RMS; after a step others: Adam steps equally far for a tiny gradient, whose
# sign is rounding, as for a large one. And the accepted fraction of the two dtypes' distance on one rank.
_FLOORS = {"fp32": 3e-5, "fp16": 4e-3, "bf16": 3e-2}
_FLOORS_OF_STEP = {"fp32": 1e-2, "fp16": 1.0, "bf16": 1.0}
_SHARES = {"fp32": 2.0**-12, "fp16": 2.0, "bf16": 2.0}
_SMALL = 1e-3  # of a stage's largest RMS: far smaller tensors may be rounding
_OF_COPIES = (START, UPDATE, SAVED)  # stages in which replicas have equal bits
_LIKELY = {
    START: "often a seed by rank, or a load or a broadcast that left it out",
    ACTIVATION: "often dropout, or a forward that sees other ranks' tokens, or other positions",
    GRADIENT: "often a term of the loss that is no mean over tokens, as a balance loss that counts num_ranks times",
    CLIPPED: "often a norm over one rank's gradients",
    UPDATE: "often another rate or decay, master weights of another dtype, or a parameter that is frozen on one side",
    SAVED: "often a count or a statistic of a rank's own tokens: what rightly is so, Trained(own_buffers) names",
}
_LACKS = ": often it is frozen, tied or cut where it should not be, or not where it should"
_MOST_ROWS = 1 << 12  # limit of the search for a row order
_SHOWN = 8  # rows of an order
_FIT = 0.05  # an explanation's largest error, unless rounding is smaller
_NARROW = (torch.bfloat16, torch.float16, torch.float32)
_OF_A_RANK = "is the part of rank {}: a checkpoint of one rank's,"

Found = Mapping[str, Tensors]  # by stage
# Values by rank, expected values, and whether each rank has its own part.
_Parts = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], bool]


@dataclass(slots=True)
class Compared:
    """One tensor. error: None if not compared; text: the difference, "" if there is none; note: a difference that may
    be rounding."""

    dtype: str
    stage: str
    name: str
    tolerance: float
    error: float | None = None
    text: str = ""
    note: str = ""

    def excess(self) -> float:
        """error / accepted error."""
        return (self.error or 0.0) / (self.tolerance or 1e-30)


def compare(dtype: str, one: Found, other: Found, ranks: Sequence[Found]) -> Iterator[Compared]:
    """All tensors in the order of the step. one: of one rank; other: one rank in the other dtype, which shows
    rounding. If a router chooses differently for equal inputs, later tensors cannot be compared with one rank."""
    chooses_otherwise = False
    for stage in itertools.takewhile(
        lambda stage: all(stage in found for found in (one, *ranks)), STAGES
    ):
        if stage == LOADED:
            yield from _compare_loaded(dtype, ranks)
            break
        # Gradients are made from the last to the first.
        names = [*one[stage]][:: -1 if stage in (GRADIENT, CLIPPED, UPDATE) else 1]
        for name in dict.fromkeys([*names, *(name for found in ranks for name in found[stage])]):
            got = [found[stage][name] for found in ranks if name in found[stage]]
            want = one[stage].get(name)
            this = Compared(dtype, stage, name, _floor(dtype, stage, want))
            parts = None if want is None else _parts(stage, got, want, len(ranks))
            if parts is None or want is None:
                if stage == START or (stage != ACTIVATION and name in one[START]):
                    has = "is not there" if want is None else f"has shape {[*want.shape]}"
                    this.text = (
                        f"has shapes {[[*its.shape] for its in got]} on {len(got)} of the ranks, "
                        f"and {has} on one rank{_LACKS}"
                    )
            elif any(its.dtype != want.dtype for its in got):
                this.text = f"has {got[0].dtype} on rank 0, {got[-1].dtype} on the last, and {want.dtype} on one rank"
            elif stage == ACTIVATION and not want.is_floating_point():
                if (
                    parts[2]
                    and want.dim() > 1
                    and any(
                        not torch.equal(*(its.sort()[0] for its in pair))
                        for pair in zip(*parts[:2], strict=True)
                    )
                ):
                    chooses_otherwise = True
                    said = "chooses other experts, of the same inputs: what comes after it is not compared"
                    this.text, this.note = (said, "") if dtype == "fp32" else ("", said)
                else:
                    this.error = 0.0
            elif name.endswith(OWN):
                this.note = "" if _are_copies(got) else "differs by rank, and is not compared"
            elif stage == START or not chooses_otherwise:
                _compare_with_one(this, one, other, parts)
            if (
                stage in _OF_COPIES
                and parts
                and not (parts[2] or this.note or this.text or _are_copies(got))
            ):
                apart = [rank for rank, its in enumerate(got) if not _are_copies([got[0], its])]
                this.text = f"on rank {apart} another than on rank 0, by less than is allowed; {_LIKELY[stage]}"
            yield this


def _compare_with_one(this: Compared, one: Found, other: Found, parts: _Parts) -> None:
    """Sets the error and its cause."""
    got, wants, is_cut = parts
    values = one[this.stage]
    want = values[this.name]
    update_is_compared = this.stage == SAVED and this.name in one[UPDATE]
    if update_is_compared or _is_rounding(this, got, one):
        this.error = 0.0
    elif not want.is_floating_point():
        this.error = float(not all(map(torch.equal, got, wants)))
    else:
        # E.g. all exp_avg of an optimizer are of one kind.
        kind = this.name.rpartition(" of ")[0]
        alike = (its for name, its in values.items() if name.rpartition(" of ")[0] == kind)
        scale = _SMALL * max(map(_rms, alike)) * (this.tolerance > 0)
        this.error = _error(got, wants, scale)
        if this.tolerance and this.stage != START and this.name in other.get(this.stage, {}):
            rounding = _SHARES[this.dtype] * _error([other[this.stage][this.name]], [want], scale)
            this.tolerance = max(this.tolerance, rounding if rounding < math.inf else 0.0)
    if this.error > this.tolerance:
        this.text = explain(this.stage, got, wants, is_cut, min(_FIT, this.tolerance))
    if this.error == math.inf:
        this.error = None


def _is_rounding(this: Compared, got: Sequence[torch.Tensor], one: Found) -> bool:
    """Whether a gradient is only rounding on one rank and on all, e.g. of a bias that shifts all logits. An optimizer
    like Adam makes full steps of such a gradient."""
    gradients = one[CLIPPED if this.stage == UPDATE else this.stage]
    if this.stage not in (GRADIENT, CLIPPED, UPDATE) or this.name not in gradients:
        return False
    of_ranks = [] if this.stage == UPDATE else got
    size = max(map(_rms, [gradients[this.name], *of_ranks]))
    return 0.0 < size < _FLOORS[this.dtype] / 10 * max(map(_rms, gradients.values()))


def _floor(dtype: str, stage: str, want: torch.Tensor | None) -> float:
    """The accepted error. Integers and options of the optimizer must match bit for bit."""
    if want is not None and (want.dtype == OPTION or not want.is_floating_point()):
        return 0.0
    return (_FLOORS_OF_STEP if stage in (UPDATE, SAVED) else _FLOORS)[dtype]


def _are_copies(got: Sequence[torch.Tensor]) -> bool:
    """Whether all ranks have equal bits. NaNs are reported elsewhere."""
    return all(torch.equal(its.nan_to_num(), got[0].nan_to_num()) for its in got[1:])


def _compare_loaded(dtype: str, ranks: Sequence[Found]) -> Iterator[Compared]:
    """Compares each rank's loaded state with its saved state. The error is the fraction of ranks whose bits differ."""
    of_ranks = [_OF_A_RANK.format(rank) for rank in range(len(ranks))]
    for name in dict.fromkeys(name for found in ranks for name in found[SAVED]):
        changed = [rank for rank, found in enumerate(ranks) if name in found[LOADED]]
        this = Compared(dtype, LOADED, name, 0.0, len(changed) / len(ranks))
        causes = {rank: _cause_of_load(name, rank, ranks) for rank in changed}
        if changed and name.endswith(OWN) and all(its in of_ranks for its in causes.values()):
            this.error = None
            this.note = "has another rank's values, as from a checkpoint with one copy"
        elif changed:
            cause = causes[changed[0]]
            alike = [f"{rank}" for rank in changed if causes[rank] == cause]
            this.text = f"{cause} on rank {', '.join(alike)}"
        yield this


def _cause_of_load(name: str, rank: int, ranks: Sequence[Found]) -> str:
    """The cause of a change between saving and loading, from the new values."""
    got = ranks[rank][LOADED][name]
    was = ranks[rank][SAVED][name]

    def same(its: torch.Tensor | None) -> bool:
        return its is not None and its.dtype == got.dtype and torch.equal(its, got)

    causes = [
        ("is not there any more", not got.numel()),
        (
            f"is {got.dtype} {[*got.shape]}, and was {was.dtype} {[*was.shape]},",
            (got.dtype, got.shape) != (was.dtype, was.shape),
        ),
        ("was not loaded", got.is_floating_point() and bool(got.isnan().any())),
        ("has other bits, of numbers that are not kept for a comparison", same(was)),
        *((_OF_A_RANK.format(at), same(found[SAVED].get(name))) for at, found in enumerate(ranks)),
        (
            "is as it was before the step: a checkpoint of an older step,",
            same(ranks[rank][START].get(name)),
        ),
        ("was not loaded", same(spoilt(was))),
        *(
            (f"is what {key} was: names are exchanged", was.numel() > 1 and same(its))
            for key, its in ranks[rank][SAVED].items()
        ),
        *((f"was rounded to {narrow}", same(was.to(narrow).to(was.dtype))) for narrow in _NARROW),
    ]
    for text, is_so in causes:
        if is_so:
            return text
    order = _order([got], [found[SAVED][name] for found in ranks if name in found[SAVED]], 0.0)
    return f"has experts in another order: {order[:_SHOWN]}" if order else "has other bits"


def explain(
    stage: str,
    got: Sequence[torch.Tensor],
    want: Sequence[torch.Tensor],
    is_cut: bool,
    slack: float,
) -> str:
    """The difference of a tensor's values by rank from the expected values. is_cut: each has its own part."""
    ranks, value, (got, want) = (
        range(len(got)),
        "times the one-rank value",
        _without_infinities(got, want),
    )
    bad = [f"rank {rank}" for rank in ranks if not got[rank].isfinite().all()]
    bad += ["one rank alone"] * (not all(it.isfinite().all() for it in want))
    if bad:
        return f"is not finite on {' and on '.join(bad)}"
    if stage in (GRADIENT, CLIPPED) and not is_cut and not _are_copies(got):
        total = _factors([torch.stack([*got]).double().sum(0)], want[:1], slack)
        if total and abs(total[0] / len(got) - 1) <= slack:
            return "ranks have parts of their own; their mean is the one-rank value: nothing averages them"
        if total and abs(total[0] - 1) <= slack:
            return f"ranks have parts of their own; the sum is {total[0]:.4g} {value}: nothing adds them"
    if factors := _factors(got, want, slack):
        first = factors[0]
        if max(factors) - min(factors) > slack * abs(first):
            each = ", ".join(f"{factor:.5g} on rank {rank}" for rank, factor in enumerate(factors))
            return f"{value}, ranks have factors of their own: {each}"
        missing = {
            len(got): "a factor of 1/num_ranks is missing",
            1 / len(got): "a factor of num_ranks is missing",
            0.0: "nothing computes it, or it is left out",
        }
        why = [text for factor, text in missing.items() if abs(first - factor) <= slack * factor]
        return f"{': '.join([f'{first:.4g} {value} on all ranks', *why])}"
    if is_cut and len({part.shape for part in want}) == 1:
        if factors := _factors(got, [torch.stack([*want]).double().mean(0)] * len(got), slack):
            times = "" if abs(factors[0] - 1) <= slack else f"{factors[0]:.4g} times "
            return f"{times}the mean over ranks, of different experts: DDP or an all-reduce takes them for copies"
        for rank, other in itertools.permutations(ranks, 2):
            if _error([got[rank]], [want[other]], 0.0) <= slack:
                return f"rank {rank} has the part of rank {other}"
        if order := _order(got, want, slack):
            rows = "sequences" if stage == ACTIVATION else "experts"
            return f"{rows} are in another order: {order[:_SHOWN]}"
    if not is_cut and _are_copies(got):
        return f"the same on all ranks, and another on one rank: {_LIKELY[stage]}"
    differ = [str(rank) for rank in ranks if _error([got[rank]], [want[rank]], 0.0) > slack]
    return f"on rank {', '.join(differ)}: {_LIKELY[stage]}"


def _order(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], slack: float) -> list[int]:
    """The indices in the whole of the rows (e.g. experts) of `got`; [] without a match."""
    if want[0].dim() < 2 or sum(map(len, want)) > _MOST_ROWS or not want[0].is_floating_point():
        return []
    rows, whole = (torch.cat([*its]).flatten(1).double() for its in (got, want))
    nearest = torch.cdist(rows, whole).argmin(1)
    return nearest.tolist() if _rms(rows - whole[nearest]) <= slack * _rms(whole) else []


def _parts(
    stage: str, got: Sequence[torch.Tensor], want: torch.Tensor, num_ranks: int
) -> _Parts | None:
    """None if shapes do not fit, or a rank has no tensor. In forward, scalars are means of ranks' tokens, and ranks may
    have every n-th row, of [S, B, H]."""
    is_activation = stage == ACTIVATION
    if not got or (len(got) < num_ranks and not is_activation):
        return None
    if is_activation and want.dim() == 0 and all(part.dim() == 0 for part in got):
        return [torch.stack([*got]).double().mean()], [want], False
    if all(part.shape == want.shape for part in got):
        return got, [want] * len(got), False
    for dim in range(want.dim() if all(part.dim() == want.dim() for part in got) else 0):
        sizes = [part.shape[dim] for part in got]
        wants = want.split(sizes, dim) if sum(sizes) == want.shape[dim] else ()
        if [part.shape for part in got] == [part.shape for part in wants]:
            in_turn = [want[rank :: len(got)] for rank in range(len(got))]
            takes_turns = (
                is_activation
                and len(set(sizes)) == 1
                and dim == 0
                and _error(got, in_turn, 0.0) < _error(got, wants, 0.0)
            )
            return got, in_turn if takes_turns else wants, True
    return None


def _error(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], scale: float) -> float:
    """RMS of the difference on the worst rank, relative to the whole's RMS and a scale."""
    differences = [
        ours.double() - theirs.double()
        for ours, theirs in zip(*_without_infinities(got, want), strict=True)
    ]
    if not all(each.isfinite().all() for each in differences):
        return math.inf
    size = math.sqrt(sum(_rms(part) ** 2 for part in want) / len(want)) + scale + 1e-30
    return max(map(_rms, differences)) / size


def _without_infinities(
    got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]
) -> list[list[torch.Tensor]]:
    """Both, with 0 where both are infinite, e.g. masked scores."""
    same = [ours.isinf() & (ours == theirs) for ours, theirs in zip(got, want, strict=True)]
    return [
        [part.masked_fill(mask, 0.0) for part, mask in zip(parts, same, strict=True)]
        for parts in (got, want)
    ]


def _rms(tensor: torch.Tensor) -> float:
    """RMS of finite values."""
    if not (tensor.is_floating_point() and tensor.numel()):
        return 0.0
    return tensor.double().nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt().item()


def _factors(
    got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], slack: float
) -> list[float]:
    """By rank, the factor from `want` to `got`; [] unless it exists on every rank."""
    factors = list[float]()
    for ours, theirs in zip(got, (part.double() for part in want), strict=True):
        square = theirs.square().sum().item()
        factors.append((ours * theirs).sum().item() / square if square else 1.0)
        if _rms(ours - factors[-1] * theirs) > slack * _rms(ours):
            return []
    return factors
