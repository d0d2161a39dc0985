"""Compares what n ranks have made of every tensor with what one rank has made of it, and says how they differ. What is
loaded is compared with what was there before it was saved."""

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

# Errors that pass, relative to a tensor's RMS; after a step others, since Adam makes as much of a tiny gradient, whose
# sign is rounding, as of a large one. And the share of the distance of the two dtypes on one rank that passes as well.
_FLOORS = {"fp32": 3e-5, "fp16": 4e-3, "bf16": 3e-2}
_FLOORS_OF_STEP = {"fp32": 1e-2, "fp16": 1.0, "bf16": 1.0}
_SHARES = {"fp32": 2.0**-12, "fp16": 2.0, "bf16": 2.0}
_SMALL = 1e-3  # of the largest RMS of a stage: what is far smaller may be nothing but rounding
_OF_COPIES = (START, UPDATE, SAVED)  # where ranks that have the same have the same bits
_LIKELY = {
    START: "often a seed by rank, or a load or a broadcast that left it out",
    ACTIVATION: "often dropout, or a forward that sees other ranks' tokens, or other positions",
    GRADIENT: "often a term of the loss that is no mean over tokens, as a balance loss that counts num_ranks times",
    CLIPPED: "often a norm over one rank's gradients",
    UPDATE: "often another rate or decay, master weights of another dtype, or a parameter that is frozen on one side",
    SAVED: "often a count or a statistic of a rank's own tokens: what rightly is so, Trained(own_buffers) names",
}
_FIT = 0.05  # an explanation fits up to this, or to what is rounding if that is less

Found = Mapping[str, Tensors]  # by stage
# Values by rank, what they should be, and whether each rank has its own part.
_Parts = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], bool]


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

    def excess(self) -> float:
        """The error by what passes."""
        return (self.error or 0.0) / (self.tolerance or 1e-30)


def compare(dtype: str, one: Found, other: Found, ranks: Sequence[Found]) -> Iterator[Compared]:
    """All tensors in the order of the step. one: of one rank; other: the same in the other dtype, which shows what is
    only rounding. Where a router chooses otherwise, inputs being the same, what follows is not compared with one rank."""
    chooses_otherwise = False
    for stage in itertools.takewhile(
        lambda stage: all(stage in found for found in (one, *ranks)), STAGES
    ):
        if stage == LOADED:
            yield from _compare_loaded(dtype, ranks)
            continue
        backwards = stage in (GRADIENT, CLIPPED, UPDATE)  # from the last to the first
        names = [*one[stage]][:: -1 if backwards else 1]
        for name in dict.fromkeys([*names, *(name for found in ranks for name in found[stage])]):
            this = Compared(dtype, stage, name, _floor(dtype, stage, one[stage].get(name)))
            got = [found[stage][name] for found in ranks if name in found[stage]]
            want = one[stage].get(name)
            parts = None
            if want is not None and len(got) == len(ranks):
                parts = _parts(stage, got, want)
            if parts is None or want is None:
                if stage == START or (stage != ACTIVATION and name in one[START]):
                    this.text = _why_no_parts(got, want, len(ranks))
            elif any(its.dtype != want.dtype for its in got):
                dtypes = ", ".join(f"{its.dtype}" for its in got)
                this.text = f"has dtype {dtypes} by rank, and {want.dtype} on one rank"
            elif stage == ACTIVATION and not want.is_floating_point():
                this.error = 0.0
                chosen = zip(*parts[:2], strict=True)
                is_choice = parts[2] and want.dim() > 1
                if is_choice and not all(_same_choices(*pair) for pair in chosen):
                    chooses_otherwise = True
                    this.error = None
                    said = "chooses other experts, of the same inputs: what comes after it is not compared"
                    this.text, this.note = (said, "") if dtype == "fp32" else ("", said)
            elif stage == SAVED and name.endswith(OWN):
                this.note = "" if _are_copies(got) else "differs by rank, and is not compared"
            else:
                is_same_input = stage == START or not chooses_otherwise
                # What a step makes of parameters has been compared.
                if is_same_input and not (stage == SAVED and name in one[UPDATE]):
                    _compare_with_one(this, one[stage], other.get(stage, {}), parts)
                elif stage == SAVED:
                    this.error = 0.0
                if not (this.text or parts[2] or stage not in _OF_COPIES or _are_copies(got)):
                    this.text = _why_no_copies(stage, got)
            yield this


def _compare_with_one(this: Compared, one: Tensors, other: Tensors, parts: _Parts) -> None:
    """Sets the error and how it came."""
    got, wants, _ = parts
    want = one[this.name]
    if not want.is_floating_point():
        this.error = float(not all(map(torch.equal, got, wants)))
    else:
        scale = 0.0 if want.dtype == OPTION else _SMALL * _largest_rms(this.stage, this.name, one)
        this.error = _error(got, wants, scale)
        if this.tolerance and this.stage != START and this.name in other:
            rounding = _SHARES[this.dtype] * _error([other[this.name]], [want], scale)
            this.tolerance = max(this.tolerance, rounding if rounding < math.inf else 0.0)
    if this.error > this.tolerance:
        this.text = explain(this.stage, got, wants, parts[2], min(_FIT, this.tolerance))
    if this.error == math.inf:
        this.error = None


def _floor(dtype: str, stage: str, want: torch.Tensor | None) -> float:
    """What passes. Whole numbers and options of the optimizer are the same to the last bit."""
    if want is not None and (want.dtype == OPTION or not want.is_floating_point()):
        return 0.0
    return (_FLOORS_OF_STEP if stage in (UPDATE, SAVED) else _FLOORS)[dtype]


def _largest_rms(stage: str, name: str, one: Tensors) -> float:
    """Of tensors of its kind, which are those of its stage; of an optimizer, all exp_avg, or the like."""
    kind = name.rpartition(" of ")[0]
    return max(_rms(its) for key, its in one.items() if key.rpartition(" of ")[0] == kind)


def _why_no_parts(got: Sequence[torch.Tensor], want: torch.Tensor | None, num_ranks: int) -> str:
    if want is None:
        return "is not there on one rank: it is tied there, frozen, or the model is another"
    if len(got) < num_ranks:
        return f"is not there on {num_ranks - len(got)} of the {num_ranks} ranks: it is frozen or untied there"
    return f"does not fit; shapes: {[[*each.shape] for each in got]} by rank, {[*want.shape]} on one rank"


def _same_choices(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.equal(got.sort()[0], want.sort()[0])


def _are_copies(got: Sequence[torch.Tensor]) -> bool:
    """Whether all ranks have the same bits. NaNs are told elsewhere."""
    return all(torch.equal(its.nan_to_num(), got[0].nan_to_num()) for its in got[1:])


def _why_no_copies(stage: str, got: Sequence[torch.Tensor]) -> str:
    others = ", ".join(f"{rank}" for rank, its in enumerate(got) if not _are_copies([got[0], its]))
    said = f"copies of ranks differ, by less than is allowed: on rank {others} from rank 0"
    return f"{said}; {_LIKELY[stage]}"


def _compare_loaded(dtype: str, ranks: Sequence[Found]) -> Iterator[Compared]:
    """Each rank's state with what it was before it was saved. The error is the share of ranks where bits differ."""
    for name in dict.fromkeys(name for found in ranks for name in found[SAVED]):
        changed = [rank for rank, found in enumerate(ranks) if name in found[LOADED]]
        this = Compared(dtype, LOADED, name, 0.0, len(changed) / len(ranks))
        values = [found[SAVED].get(name) for found in ranks]
        if name.endswith(OWN) and all(
            any(its is not None and torch.equal(ranks[rank][LOADED][name], its) for its in values)
            for rank in changed
        ):
            this.error = None if changed else 0.0
            this.note = "has another rank's values, as from a checkpoint with one copy" * bool(
                changed
            )
        elif changed:
            this.text = _why_loaded(name, changed, ranks)
        yield this


def _why_loaded(name: str, changed: Sequence[int], ranks: Sequence[Found]) -> str:
    """The first cause that fits the first rank, and all ranks that it fits."""
    causes = {rank: _cause_of_load(name, rank, ranks) for rank in changed}
    cause = causes[changed[0]]
    its = ", ".join(f"{rank}" for rank in changed if causes[rank] == cause)
    return f"{cause} on rank {its}"


def _cause_of_load(name: str, rank: int, ranks: Sequence[Found]) -> str:
    found = ranks[rank]
    got = found[LOADED][name]
    was = found[SAVED][name]
    if got.shape != was.shape:
        return (
            "is not there any more"
            if got.dim() == 1 and not len(got)
            else f"has shape {[*got.shape]}"
        )
    if got.dtype != was.dtype:
        return f"is {got.dtype}, and was {was.dtype}: a checkpoint or a load of another dtype,"
    if _is_equal(got, was):
        return "has other bits, of numbers that are not kept for a comparison"
    for other, its in enumerate(ranks):
        if other != rank and _is_equal(got, its[SAVED].get(name)):
            return f"is the part of rank {other}: a checkpoint of one rank's experts,"
    if _is_equal(got, found[START].get(name)):
        return "is as it was before the step: a checkpoint of an older step,"
    if (got.is_floating_point() and got.isnan().any()) or _is_equal(got, spoilt(was)):
        return "was not loaded"
    for other_name, its in found[SAVED].items():
        if its.numel() > 1 and _is_equal(got, its):
            return f"is what {other_name} was: names are exchanged"
    for narrow in (torch.bfloat16, torch.float16, torch.float32):
        if _is_equal(got, was.to(narrow).to(was.dtype)):
            return f"was rounded to {narrow}"
    whole = [its[SAVED][name] for its in ranks if name in its[SAVED]]
    order = _order([got], whole, 0.0)
    if order:
        return f"has experts in another order: {order}"
    return "has other bits"


def _is_equal(got: torch.Tensor, its: torch.Tensor | None) -> bool:
    return its is not None and got.dtype == its.dtype and torch.equal(got, its)


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
        return f"is not finite{' and'.join(where)}"
    if stage != START and not is_cut and not _are_copies(got):
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
        missing = {"1/num_ranks": first / len(got), "num_ranks": first * len(got)}
        why = "".join(
            f": a factor of {name} is missing"
            for name, each in missing.items()
            if abs(each - 1) <= slack
        )
        if not first:
            why = ": nothing computes it, or it is left out"
        return f"{first:.4g} {value} on all ranks{why}"
    if is_cut and len({part.shape for part in want}) == 1:
        if factors := _factors(got, [torch.stack([*want]).double().mean(0)] * len(got), slack):
            times = "" if abs(factors[0] - 1) <= slack else f"{factors[0]:.4g} times "
            return f"{times}the mean over ranks, of different experts: DDP or an all-reduce takes them for copies"
        for rank, other in itertools.permutations(ranks, 2):
            if _error([got[rank]], [want[other]], 0.0) <= slack:
                return f"rank {rank} has the part of rank {other}"
        if order := _order(got, want, slack):
            return f"experts are in another order: {order}"
    differ = [rank for rank in ranks if _error([got[rank]], [want[rank]], 0.0) > slack]
    where = f"on rank {', '.join(map(str, differ))}"
    if not is_cut and _are_copies(got):
        where = "the same on all ranks, and another on one rank"
    return f"{where}: {_LIKELY[stage]}"


def _order(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], slack: float) -> list[int]:
    """Which rows of the whole are those of `got`, as experts are; [] if they are none."""
    if want[0].dim() < 2 or not want[0].is_floating_point():
        return []
    rows, whole = (torch.cat([*its]) for its in (got, want))
    rows, whole = (its.flatten(1).double() for its in (rows, whole))
    nearest = torch.cdist(rows, whole).argmin(1)
    return nearest.tolist() if _rms(rows - whole[nearest]) <= slack * _rms(whole) else []


def _parts(stage: str, got: Sequence[torch.Tensor], want: torch.Tensor) -> _Parts | None:
    """None if they do not fit. In forward, scalars are means of ranks' tokens, and ranks may have every n-th row, of
    [S, B, H]."""
    is_activation = stage == ACTIVATION
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
