"""benchmarks/deepep.py: what DeepEP is told and gives is right, with a stand-in for the package."""

from __future__ import annotations

import deepep
import torch
import torch.distributed as dist

from symmoe.tools.bench.cases import Case, Shape
from symmoe.tools.bench.problem import Problem
from symmoe.tools.bench.ranks import Ranks

CASE = Case(Shape("tiny", 32, 16, 8, 3), 20, "zipf")


class DeepEPBuffer:
    """deep_ep.Buffer's calls, by gloo."""

    def get_dispatch_layout(self, topk_idx, num_experts):
        assert topk_idx.dtype == torch.int64
        self.local = num_experts // dist.get_world_size()
        ranks = torch.arange(dist.get_world_size())
        in_rank = (topk_idx[:, :, None] // self.local == ranks).any(1)
        return in_rank.sum(0).int(), None, torch.bincount(topk_idx.reshape(-1), minlength=num_experts), in_rank, None

    def dispatch(self, x, handle=None, *, topk_idx=None, topk_weights=None, num_tokens_per_rank=None,
                 is_token_in_rank=None, num_tokens_per_expert=None):  # fmt: skip
        if handle is not None:
            assert topk_idx is None
            return self._send(x, handle), None, None, None, None, None
        sent = num_tokens_per_rank.long()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        tokens = torch.cat([column.nonzero().squeeze(1) for column in is_token_in_rank.t()])
        handle = (tokens, sent.tolist(), received.tolist(), len(x))
        idx = self._send(topk_idx, handle) - dist.get_rank() * self.local
        mine = (idx >= 0) & (idx < self.local)
        idx = idx.masked_fill(~mine, -1)
        weights = self._send(topk_weights, handle).masked_fill(~mine, 0)
        counts = torch.bincount(idx[mine], minlength=self.local).tolist()
        return self._send(x, handle), idx, weights, counts, handle, None

    def combine(self, x, handle, topk_weights=None):
        return self._home(x, handle), None if topk_weights is None else self._home(topk_weights, handle), None

    def _send(self, rows, handle):
        tokens, sent, received, _ = handle
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows[tokens], received, sent)
        return out

    def _home(self, rows, handle):
        tokens, sent, received, num_tokens = handle
        back = rows.new_empty(len(tokens), *rows.shape[1:])
        dist.all_to_all_single(back, rows.contiguous(), sent, received)
        return rows.new_zeros(num_tokens, *rows.shape[1:]).float().index_add(0, tokens, back.float()).to(rows.dtype)


def _records(rank: int, num_ranks: int) -> list[tuple[str, str, bool]]:
    ranks = Ranks(torch.device("cpu"))
    problem, buffer = Problem(CASE, ranks), DeepEPBuffer()
    found = [deepep.step_record(problem, buffer, ranks, repetitions=2)]
    for trip in deepep.trips(problem, buffer):
        found += deepep.trip_records(problem, trip, ranks, repetitions=2)
    return [(record["suite"], record["direction"], bool(record["wire_bytes"])) for record in found]


def test_deepep_is_told_what_it_needs(cluster):
    """Every result is checked before it is timed."""
    trips = [("dispatch", "forward", True), ("dispatch", "backward", True), ("combine", "forward", True)]
    assert cluster(2).run(_records) == [[("steps", "step", False), *trips]] * 2
