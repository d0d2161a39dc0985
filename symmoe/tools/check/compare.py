"""Compares every tensor of a run on n ranks with the run on one rank (the reference), and loaded tensors with saved
ones, and explains the differences."""

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

# Accepted errors, relative to a tensor's RMS. After a step they are larger: Adam steps as far for a tiny gradient,
# whose sign is rounding, as for a large one. _SHARES: the accepted fraction of the distance between two dtypes on one
# rank.
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

Stages = Mapping[str, Tensors]  # by stage
# By rank: actual values and expected values; and whether each rank has another part of the tensor.
_Parts = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], bool]


@dataclass(slots=True)
class Comparison:
    """The comparison of one tensor.

    Attributes:
        error: relative to the tensor's RMS; None: not compared.
        text: the difference; "": none.
        note: a difference that may be rounding.
    """

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


def compare(
    dtype: str, reference: Stages, other_dtype: Stages, ranks: Sequence[Stages]
) -> Iterator[Comparison]:
    """The comparisons of all tensors in the order of the step. reference: of one rank; other_dtype: of one rank in
    another dtype, whose distance from the reference is rounding. If a router chooses differently for equal inputs,
    later tensors cannot be compared with the reference."""
    routes_differently = False
    for stage in itertools.takewhile(
        lambda stage: all(stage in stages for stages in (reference, *ranks)), STAGES
    ):
        if stage == LOADED:
            yield from _compare_loaded(dtype, ranks)
            break
        # Backward computes gradients from the last parameter to the first.
        names = [*reference[stage]][:: -1 if stage in (GRADIENT, CLIPPED, UPDATE) else 1]
        for name in dict.fromkeys([*names, *(name for stages in ranks for name in stages[stage])]):
            actual = [stages[stage][name] for stages in ranks if name in stages[stage]]
            expected = reference[stage].get(name)
            result = Comparison(dtype, stage, name, _floor(dtype, stage, expected))
            parts = None if expected is None else _parts(stage, actual, expected, len(ranks))
            if parts is None or expected is None:
                if stage == START or (stage != ACTIVATION and name in reference[START]):
                    reference_text = (
                        "is not there" if expected is None else f"has shape {[*expected.shape]}"
                    )
                    result.text = (
                        f"has shapes {[[*tensor.shape] for tensor in actual]} on {len(actual)} of the ranks, "
                        f"and {reference_text} on one rank{_LACKS}"
                    )
            elif any(tensor.dtype != expected.dtype for tensor in actual):
                result.text = (
                    f"has {actual[0].dtype} on rank 0, {actual[-1].dtype} on the last, "
                    f"and {expected.dtype} on one rank"
                )
            elif stage == ACTIVATION and not expected.is_floating_point():
                if (
                    parts[2]
                    and expected.dim() > 1
                    and any(
                        not torch.equal(*(tensor.sort()[0] for tensor in pair))
                        for pair in zip(*parts[:2], strict=True)
                    )
                ):
                    routes_differently = True
                    text = "chooses other experts, of the same inputs: what comes after it is not compared"
                    result.text, result.note = (text, "") if dtype == "fp32" else ("", text)
                else:
                    result.error = 0.0
            elif name.endswith(OWN):
                result.note = "" if _are_copies(actual) else "differs by rank, and is not compared"
            elif stage == START or not routes_differently:
                _compare_with_one(result, reference, other_dtype, parts)
            if (
                stage in _OF_COPIES
                and parts
                and not (parts[2] or result.note or result.text or _are_copies(actual))
            ):
                apart = [
                    rank
                    for rank, tensor in enumerate(actual)
                    if not _are_copies([actual[0], tensor])
                ]
                result.text = f"on rank {apart} another than on rank 0, by less than is allowed; {_LIKELY[stage]}"
            yield result


def _compare_with_one(
    result: Comparison, reference: Stages, other_dtype: Stages, parts: _Parts
) -> None:
    """Sets the error of a comparison with the reference, and the text with its cause."""
    actual, expected_by_rank, is_sharded = parts
    values = reference[result.stage]
    expected = values[result.name]
    if result.stage == SAVED and result.name in reference[UPDATE]:  # its update was compared
        result.error = 0.0
    elif not expected.is_floating_point():
        result.error = float(not all(map(torch.equal, actual, expected_by_rank)))
    else:
        # The scale is that of tensors of one kind, e.g. of all exp_avg of an optimizer.
        kind = result.name.rpartition(" of ")[0]
        alike = (tensor for name, tensor in values.items() if name.rpartition(" of ")[0] == kind)
        scale = _SMALL * max(map(_rms, alike)) * (result.tolerance > 0)
        result.error = _error(actual, expected_by_rank, scale)
        if (
            result.tolerance
            and result.stage != START
            and result.name in other_dtype.get(result.stage, {})
        ):
            rounding = _SHARES[result.dtype] * _error(
                [other_dtype[result.stage][result.name]], [expected], scale
            )
            result.tolerance = max(result.tolerance, rounding if rounding < math.inf else 0.0)
    # Only of what differs: it reads all gradients. NaN and infinity are no rounding.
    if result.tolerance < result.error < math.inf and _is_rounding(result, actual, reference):
        result.error = 0.0
    if result.error > result.tolerance:
        result.text = explain(
            result.stage, actual, expected_by_rank, is_sharded, min(_FIT, result.tolerance)
        )
    if result.error == math.inf:
        result.error = None


def _is_rounding(result: Comparison, actual: Sequence[torch.Tensor], reference: Stages) -> bool:
    """Whether a gradient is only rounding on one rank and on all, e.g. of a bias that shifts all logits. An optimizer
    like Adam makes full steps of such a gradient."""
    gradients = reference[CLIPPED if result.stage == UPDATE else result.stage]
    if result.stage not in (GRADIENT, CLIPPED, UPDATE) or result.name not in gradients:
        return False
    size = max(map(_rms, [gradients[result.name], *(() if result.stage == UPDATE else actual)]))
    return 0.0 < size < _FLOORS[result.dtype] / 10 * max(map(_rms, gradients.values()))


def _floor(dtype: str, stage: str, expected: torch.Tensor | None) -> float:
    """The accepted error. Integers and options of the optimizer must match bit for bit."""
    if expected is not None and (expected.dtype == OPTION or not expected.is_floating_point()):
        return 0.0
    return (_FLOORS_OF_STEP if stage in (UPDATE, SAVED) else _FLOORS)[dtype]


def _are_copies(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all tensors are equal bit for bit. NaNs count as equal: `explain` reports them."""
    return all(torch.equal(tensor.nan_to_num(), tensors[0].nan_to_num()) for tensor in tensors[1:])


def _compare_loaded(dtype: str, ranks: Sequence[Stages]) -> Iterator[Comparison]:
    """Compares each rank's loaded state with its saved state. The error is the fraction of ranks whose bits differ."""
    other_ranks = [_OF_A_RANK.format(rank) for rank in range(len(ranks))]
    for name in dict.fromkeys(name for stages in ranks for name in stages[SAVED]):
        changed = [rank for rank, stages in enumerate(ranks) if name in stages[LOADED]]
        result = Comparison(dtype, LOADED, name, 0.0, len(changed) / len(ranks))
        causes = {rank: _cause_of_load(name, rank, ranks) for rank in changed}
        if (
            changed
            and name.endswith(OWN)
            and all(cause in other_ranks for cause in causes.values())
        ):
            result.error = None
            result.note = "has another rank's values, as from a checkpoint with one copy"
        elif changed:
            cause = causes[changed[0]]
            alike = [f"{rank}" for rank in changed if causes[rank] == cause]
            result.text = f"{cause} on rank {', '.join(alike)}"
        yield result


def _cause_of_load(name: str, rank: int, ranks: Sequence[Stages]) -> str:
    """The cause of a change between saving and loading, from the new values."""
    loaded = ranks[rank][LOADED][name]
    saved = ranks[rank][SAVED][name]

    def equals(tensor: torch.Tensor | None) -> bool:
        return tensor is not None and tensor.dtype == loaded.dtype and torch.equal(tensor, loaded)

    causes = [
        ("is not there any more", not loaded.numel()),
        (
            f"is {loaded.dtype} {[*loaded.shape]}, and was {saved.dtype} {[*saved.shape]},",
            (loaded.dtype, loaded.shape) != (saved.dtype, saved.shape),
        ),
        ("was not loaded", loaded.is_floating_point() and bool(loaded.isnan().any())),
        ("has other bits, of numbers that are not kept for a comparison", equals(saved)),
        *(
            (_OF_A_RANK.format(other), equals(stages[SAVED].get(name)))
            for other, stages in enumerate(ranks)
        ),
        (
            "is as it was before the step: a checkpoint of an older step,",
            equals(ranks[rank][START].get(name)),
        ),
        ("was not loaded", equals(spoilt(saved))),
        *(
            (f"is what {key} was: names are exchanged", saved.numel() > 1 and equals(tensor))
            for key, tensor in ranks[rank][SAVED].items()
        ),
        *(
            (f"was rounded to {narrow}", equals(saved.to(narrow).to(saved.dtype)))
            for narrow in _NARROW
        ),
    ]
    for text, is_so in causes:
        if is_so:
            return text
    order = _order(
        [loaded], [stages[SAVED][name] for stages in ranks if name in stages[SAVED]], 0.0
    )
    return f"has experts in another order: {order[:_SHOWN]}" if order else "has other bits"


def explain(
    stage: str,
    actual: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    is_sharded: bool,
    slack: float,
) -> str:
    """The text of the difference between actual and expected values, both by rank. is_sharded: each rank has another
    part of the tensor."""
    ranks, value, (actual, expected) = (
        range(len(actual)),
        "times the one-rank value",
        _without_infinities(actual, expected),
    )
    not_finite = [f"rank {rank}" for rank in ranks if not actual[rank].isfinite().all()]
    not_finite += ["one rank alone"] * (not all(tensor.isfinite().all() for tensor in expected))
    if not_finite:
        return f"is not finite on {' and on '.join(not_finite)}"
    if stage in (GRADIENT, CLIPPED) and not is_sharded and not _are_copies(actual):
        total = _factors([torch.stack([*actual]).double().sum(0)], expected[:1], slack)
        if total and abs(total[0] / len(actual) - 1) <= slack:
            return "ranks have parts of their own; their mean is the one-rank value: nothing averages them"
        if total and abs(total[0] - 1) <= slack:
            return f"ranks have parts of their own; the sum is {total[0]:.4g} {value}: nothing adds them"
    if factors := _factors(actual, expected, slack):
        first = factors[0]
        if max(factors) - min(factors) > slack * abs(first):
            text = ", ".join(f"{factor:.5g} on rank {rank}" for rank, factor in enumerate(factors))
            return f"{value}, ranks have factors of their own: {text}"
        missing = {
            len(actual): "a factor of 1/num_ranks is missing",
            1 / len(actual): "a factor of num_ranks is missing",
            0.0: "nothing computes it, or it is left out",
        }
        why = [text for factor, text in missing.items() if abs(first - factor) <= slack * factor]
        return f"{': '.join([f'{first:.4g} {value} on all ranks', *why])}"
    if is_sharded and len({part.shape for part in expected}) == 1:
        if factors := _factors(
            actual, [torch.stack([*expected]).double().mean(0)] * len(actual), slack
        ):
            times = "" if abs(factors[0] - 1) <= slack else f"{factors[0]:.4g} times "
            return f"{times}the mean over ranks, of different experts: DDP or an all-reduce takes them for copies"
        for rank, peer in itertools.permutations(ranks, 2):
            if _error([actual[rank]], [expected[peer]], 0.0) <= slack:
                return f"rank {rank} has the part of rank {peer}"
        if order := _order(actual, expected, slack):
            rows = "sequences" if stage == ACTIVATION else "experts"
            return f"{rows} are in another order: {order[:_SHOWN]}"
    if not is_sharded and _are_copies(actual):
        return f"the same on all ranks, and another on one rank: {_LIKELY[stage]}"
    differ = [str(rank) for rank in ranks if _error([actual[rank]], [expected[rank]], 0.0) > slack]
    return f"on rank {', '.join(differ)}: {_LIKELY[stage]}"


def _order(
    actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], slack: float
) -> list[int]:
    """The indices of the rows of `actual` (e.g. experts) in `expected`, over all ranks; [] without a match."""
    if (
        expected[0].dim() < 2
        or sum(map(len, expected)) > _MOST_ROWS
        or not expected[0].is_floating_point()
    ):
        return []
    rows, reference = (torch.cat([*tensors]).flatten(1).double() for tensors in (actual, expected))
    nearest = torch.cdist(rows, reference).argmin(1)
    return nearest.tolist() if _rms(rows - reference[nearest]) <= slack * _rms(reference) else []


def _parts(
    stage: str, actual: Sequence[torch.Tensor], expected: torch.Tensor, num_ranks: int
) -> _Parts | None:
    """Actual and expected values by rank. None: shapes do not fit, or a rank has no tensor. In forward, a scalar is a
    mean over a rank's tokens, and ranks may have every n-th row, of [S, B, H]."""
    is_activation = stage == ACTIVATION
    if not actual or (len(actual) < num_ranks and not is_activation):
        return None
    if is_activation and expected.dim() == 0 and all(part.dim() == 0 for part in actual):
        return [torch.stack([*actual]).double().mean()], [expected], False
    if all(part.shape == expected.shape for part in actual):
        return actual, [expected] * len(actual), False
    for dim in range(expected.dim() if all(part.dim() == expected.dim() for part in actual) else 0):
        sizes = [part.shape[dim] for part in actual]
        chunks = expected.split(sizes, dim) if sum(sizes) == expected.shape[dim] else ()
        if [part.shape for part in actual] == [part.shape for part in chunks]:
            in_turn = [expected[rank :: len(actual)] for rank in range(len(actual))]
            takes_turns = (
                is_activation
                and len(set(sizes)) == 1
                and dim == 0
                and _error(actual, in_turn, 0.0) < _error(actual, chunks, 0.0)
            )
            return actual, in_turn if takes_turns else chunks, True
    return None


def _error(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], scale: float) -> float:
    """The RMS of the difference on the worst rank, relative to the RMS over all ranks and a scale."""
    differences = [
        first.double() - second.double()
        for first, second in zip(*_without_infinities(actual, expected), strict=True)
    ]
    if not all(tensor.isfinite().all() for tensor in differences):
        return math.inf
    size = math.sqrt(sum(_rms(part) ** 2 for part in expected) / len(expected)) + scale + 1e-30
    return max(map(_rms, differences)) / size


def _without_infinities(
    actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> list[list[torch.Tensor]]:
    """Actual and expected values with 0 where both have the same infinity, e.g. masked scores."""
    same = [
        first.isinf() & (first == second) for first, second in zip(actual, expected, strict=True)
    ]
    return [
        [part.masked_fill(mask, 0.0) for part, mask in zip(parts, same, strict=True)]
        for parts in (actual, expected)
    ]


def _rms(tensor: torch.Tensor) -> float:
    """The RMS of a tensor's finite values; 0.0 for integers."""
    if not (tensor.is_floating_point() and tensor.numel()):
        return 0.0
    return tensor.double().nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt().item()


def _factors(
    actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], slack: float
) -> list[float]:
    """By rank, the factor from `expected` to `actual`; [] if a rank has no such factor."""
    factors = list[float]()
    for first, second in zip(actual, (part.double() for part in expected), strict=True):
        square = second.square().sum().item()
        factors.append((first * second).sum().item() / square if square else 1.0)
        if _rms(first - factors[-1] * second) > slack * _rms(first):
            return []
    return factors
