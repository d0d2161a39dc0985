"""Random routings, the same on every machine: a list of numbered cases that any number of ranks can run. Run one again
with `SYMMOE_CASE=17 pytest tests/dispatch/test_oracle.py` (several: `SYMMOE_CASE=17,63`)."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

STRATA = (
    "uniform",
    "zipf",
    "one_expert",  # every token on one expert
    "one_rank",  # every token on experts of one rank
    "no_tokens_on_one_rank",
    "no_tokens_at_all",
    "one_token",
    "masked",  # ids of -1, some tokens with nothing else
    "all_masked",
    "uneven",  # T differs widely from rank to rank
    "duplicates",  # an id stands in a token more than once
    "idle_experts",
    "blocks",  # T around multiples of 32, where the plan kernels cut tokens into blocks
    "nonfinite",  # rows of NaN and Inf
)
CAPACITIES = ("exact", "exact", "ample", "tight", "drop", "drop", "raise")
CASES_PER_STRATUM = 15
HIDDEN_SIZES = (1, 3, 7, 8, 16, 24, 33, 40, 64)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Routing:
    """One routing for a given number of ranks."""

    topk_idx: list[np.ndarray]  # per rank int64 [T, K]
    num_experts: int
    capacity: int | None  # this and what follows: as make_plan takes them
    overflow: str
    max_tokens: int | None

    @property
    def arguments(self) -> dict:
        """Keyword arguments of make_plan."""
        return {
            name: getattr(self, name)
            for name in ("num_experts", "capacity", "overflow", "max_tokens")
        }


@dataclass(frozen=True)
class Case:
    """A routing for any number of ranks, and the shape and dtype of the rows it carries."""

    number: int
    stratum: str
    top_k: int
    experts_per_rank: int
    hidden: int
    dtype: torch.dtype
    capacity: str

    def __str__(self) -> str:
        return (
            f"case {self.number} ({self.stratum}, K={self.top_k}, e={self.experts_per_rank}, H={self.hidden}, "
            f"{self.dtype}, capacity {self.capacity})"
        )

    def generator(self, *salt: int) -> np.random.Generator:
        """Random numbers that depend on the case and `salt` alone."""
        return np.random.default_rng([20261121, self.number, *salt])

    def routing(self, num_ranks: int) -> Routing:
        """The routing on `num_ranks` ranks."""
        rng = self.generator(num_ranks)
        num_experts = self.experts_per_rank * num_ranks
        counts = self._num_tokens(rng, num_ranks)
        pool, weights = self._pool(rng, num_ranks)
        ids = [self._ids(rng, count, pool, weights) for count in counts]
        return Routing(ids, num_experts, *self._limits(rng, ids, num_experts))

    def _num_tokens(self, rng: np.random.Generator, num_ranks: int) -> list[int]:
        if self.stratum == "no_tokens_at_all":
            return [0] * num_ranks
        if self.stratum == "one_token":
            return [1] * num_ranks
        if self.stratum == "uneven":
            return rng.choice([0, 1, 2, 5, 17, 40], num_ranks).tolist()
        if self.stratum == "blocks":
            return rng.choice([31, 32, 33, 64, 65], num_ranks).tolist()
        counts = rng.integers(2, 20, num_ranks)
        if rng.random() < 0.5:
            counts[:] = counts[0]  # the same T everywhere, as trainers have it
        if self.stratum == "no_tokens_on_one_rank":
            counts[rng.integers(num_ranks)] = 0
        return counts.tolist()

    def _pool(self, rng: np.random.Generator, num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
        """Experts that tokens choose from, and how likely each is."""
        num_experts = self.experts_per_rank * num_ranks
        pool = np.arange(num_experts)
        if self.stratum == "one_expert":
            pool = rng.choice(pool, 1)
        elif self.stratum == "one_rank":
            rank = rng.integers(num_ranks)
            pool = pool[rank * self.experts_per_rank : (rank + 1) * self.experts_per_rank]
        elif self.stratum == "idle_experts":
            pool = rng.choice(pool, max(1, num_experts // 3), replace=False)
        weights = np.ones(len(pool))
        if self.stratum == "zipf":
            weights = 1 / (1 + rng.permutation(len(pool))) ** 1.5
        return pool, weights / weights.sum()

    def _ids(
        self, rng: np.random.Generator, count: int, pool: np.ndarray, weights: np.ndarray
    ) -> np.ndarray:
        ids = np.full((count, self.top_k), -1, dtype=np.int64)
        if self.stratum == "all_masked":
            return ids
        again = self.stratum in ("duplicates", "one_expert")
        for token in range(count):
            size = self.top_k if again else min(self.top_k, len(pool))
            chosen = rng.choice(pool, size, replace=again, p=weights)
            if self.stratum == "one_expert":
                chosen = chosen[: rng.integers(1, self.top_k + 1)]
            ids[token, rng.permutation(self.top_k)[: len(chosen)]] = chosen
            if self.stratum == "masked":
                ids[token, rng.random(self.top_k) < 0.4] = -1
                if rng.random() < 0.25:
                    ids[token] = -1
        return ids

    def _limits(
        self, rng: np.random.Generator, ids: list[np.ndarray], num_experts: int
    ) -> tuple[int | None, str, int | None]:
        if self.capacity == "exact":
            return None, "raise", None
        largest = max(
            sum(int((i // self.experts_per_rank == rank).sum()) for i in ids)
            for rank in range(len(ids))
        )
        num_tokens = [len(i) for i in ids]
        max_tokens = max(num_tokens) + int(rng.integers(0, 3))
        if len(set(num_tokens)) == 1 and rng.random() < 0.5:
            max_tokens = None
        if self.capacity == "ample":
            return (
                largest + 1 + int(rng.integers(0, 40)),
                str(rng.choice(["raise", "drop"])),
                max_tokens,
            )
        if self.capacity == "tight":
            return max(1, largest), str(rng.choice(["raise", "drop"])), max_tokens
        if self.capacity == "drop":
            return int(rng.integers(1, max(2, largest))), "drop", max_tokens
        return max(1, largest - 1 - int(rng.integers(0, 3))), "raise", max_tokens

    def shape(self, device: str) -> int:
        """Hidden size on `device`: GPUs take rows of multiples of 16 bytes, and few sizes keep compilation short."""
        if device == "cpu":
            return self.hidden
        return 136 if self.number % 4 == 0 else 64

    def encoded_rows(self, rank: int, num_tokens: int, hidden: int) -> torch.Tensor:
        """[T, H] whose bit patterns tell rank, token and column (modulo 2^16 for the short dtypes)."""
        token, column = np.meshgrid(np.arange(num_tokens), np.arange(hidden), indexing="ij")
        if self.dtype == torch.float32:
            bits = (rank << 28 | token << 16 | column + 1).astype(np.uint32).view(np.int32)
        else:
            bits = ((rank * 97 + token) * 509 + column * 31 + 1).astype(np.uint16).view(np.int16)
        return self._with_nonfinite(torch.from_numpy(bits).view(self.dtype))

    def random_rows(self, rng: np.random.Generator, num_rows: int, hidden: int) -> torch.Tensor:
        """[num_rows, H] of very different sizes, so that sums show the order in which they were made."""
        values = rng.standard_normal((num_rows, hidden)) * 2.0 ** rng.integers(
            -6, 7, (num_rows, hidden)
        )
        return self._with_nonfinite(torch.from_numpy(values).to(self.dtype))

    def probs(self, rank: int, num_tokens: int) -> torch.Tensor:
        """fp32 [T, K], all different."""
        return torch.from_numpy(
            self.generator(100 + rank).random((num_tokens, self.top_k), dtype=np.float32) + 0.1
        )

    def _with_nonfinite(self, rows: torch.Tensor) -> torch.Tensor:
        if self.stratum == "nonfinite" and rows.numel():
            rows = rows.clone()
            rows[0::5] = float("nan")
            rows[1::5, : 1 + rows.shape[1] // 2] = float("inf")
            rows[2::5, 0] = -float("inf")
        return rows


def make_case(number: int) -> Case:
    """Case `number` of an endless list, in which the strata take turns."""
    rng = np.random.default_rng([20261121, number])
    return Case(
        number=number,
        stratum=STRATA[number % len(STRATA)],
        top_k=int(rng.integers(1, 9)),
        experts_per_rank=int(rng.choice([1, 2, 3, 4, 8])),
        hidden=int(rng.choice(HIDDEN_SIZES)),
        dtype=DTYPES[int(rng.integers(len(DTYPES)))],
        capacity=str(rng.choice(CAPACITIES)),
    )


CASES = [make_case(number) for number in range(len(STRATA) * CASES_PER_STRATUM)]


def case_on(number: int, device: str) -> Case:
    """Case `number`. On GPUs with few different K, e and dtypes, because kernels are compiled for each of them."""
    case = make_case(number)
    if device == "cpu":
        return case
    top_k, experts_per_rank = (2, 4) if case.top_k < 5 else (5, 3)
    dtype = torch.float32 if case.dtype == torch.float32 else torch.bfloat16
    return replace(case, top_k=top_k, experts_per_rank=experts_per_rank, dtype=dtype)


def chosen() -> list[int]:
    """Numbers of the cases to run: all, or those that SYMMOE_CASE names."""
    named = os.environ.get("SYMMOE_CASE", "")
    return (
        [int(number) for number in named.split(",")] if named else [case.number for case in CASES]
    )


def third(is_first: bool) -> list[int]:
    """A third of chosen(), every third case of each stratum; or the other two."""
    numbers = chosen()
    if len(numbers) < len(CASES):
        return numbers
    return [n for n in numbers if (n // len(STRATA) % 3 == 0) == is_first]


# Ranks and cases that an oracle compares. On 8 ranks one of each stratum: on CPUs their oracles take minutes.
RANKS_AND_CASES = pytest.mark.parametrize(
    ("num_ranks", "device", "numbers"),
    [
        pytest.param(2, "cpu", third(True), id="2"),
        pytest.param(2, "cpu", third(False), id="2, others", marks=pytest.mark.slow),
        *(pytest.param(n, "cpu", chosen(), id=f"{n}", marks=pytest.mark.slow) for n in (1, 3, 4)),
        pytest.param(8, "cpu", chosen()[: len(STRATA)], id="8", marks=pytest.mark.slow),
        *(
            pytest.param(n, "cuda", chosen(), id=f"{n} GPUs", marks=pytest.mark.gpu)
            for n in (1, 2, 4, 8)
        ),
    ],
)
