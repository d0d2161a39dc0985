"""Combine between nodes: each node's sum of a token returns along the rail, and the token's rank adds the sums. With
`order="slot"` a node sends the K rows of a token instead. "Order of sums" in docs/design/trips.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from symmoe import kernels
from symmoe.dispatch.nodes import NodesPlan, slices_by_node
from symmoe.dispatch.plan import Plan
from symmoe.kernels import control
from symmoe.symm_mem.heap import nodes_of


@dataclass(frozen=True, eq=False)
class Collected:
    """The results collected inside a node, for the tokens of one plan inside it."""

    plan: Plan
    # [T, 1, H], sums, or with order "slot" between nodes [T, K, H], single rows, which the token's rank adds. None:
    # only values return.
    rows: torch.Tensor | None
    values: torch.Tensor | None  # fp32 [T, K]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Rows and values, without None."""
        return [tensor for tensor in (self.rows, self.values) if tensor is not None]


class FromNodes:
    """One combine between nodes, row by row with order "slot", else a sum of each node; for rows [., H] like `rows`
    (None: only values return). The constructor allocates memory. `own_results`, `foreign_results`: results to collect
    inside this node."""

    def __init__(
        self,
        plan: Plan,
        nodes: NodesPlan[Plan],
        like: torch.Tensor | None,
        *,
        has_values: bool,
        order: str,
    ) -> None:
        self._plan = plan
        self.rails = nodes.rails
        num_rows = plan.top_k if order == "slot" else 1
        # This rank's own tokens, then the sent rows.
        integers = nodes.rails.integers
        self._home = _empty_results(
            plan, len(integers.home_row_to_token), like, has_values, num_rows
        )
        own_results = (
            None if tensor is None else tensor[: plan.num_tokens]
            for tensor in (self._home.rows, self._home.values)
        )
        self.own_results = Collected(nodes.own_plan, *own_results)
        self.foreign_results = _empty_results(
            nodes.foreign_plan, nodes.foreign_plan.num_tokens, like, has_values, num_rows
        )
        zero, self._num_values = integers.ends.split(1)
        self._slot_to_row = integers.slot_to_home_row
        row = self._slot_to_row if order == "slot" else integers.token_to_home_row
        self._maps = row, zero, integers.zeros[: row.numel()].view(row.shape), row

    @contextmanager
    def exchange_sums(self, agreed: control.CallFields) -> Iterator[Callable[[], None]]:
        """A context in which the results for foreign tokens travel home. Collective over the group. Yields a function
        that waits for the results from other nodes."""
        to_nodes, from_nodes = self.rails.node_slices
        sends = slices_by_node(self.foreign_results.tensors, from_nodes)
        sent_home = [tensor[self._plan.num_tokens :] for tensor in self._home.tensors]
        receives = slices_by_node(sent_home, to_nodes)
        self.rails.rendezvous(control.PHASE_NODES_HOME, agreed)
        with nodes_of(self._plan.heap).transfer(sends, receives) as wait:
            yield wait

    def add(
        self, out: torch.Tensor | None, values: torch.Tensor | None, ready: torch.Tensor
    ) -> None:
        """Makes sums [T, H] and values fp32 [T, K] of this rank's tokens from the received and its own results. ready:
        result of the trip's first barrier; if the call has failed, `out` gets NaN."""
        ops = kernels.for_device(self._plan.heap.device)
        if out is not None and self._home.rows is not None:
            # For this kernel home is a group of one rank, with all results for a token as its rows.
            rows = self._home.rows.flatten(0, 1)
            ops.sum_home((rows, rows), self._maps, (ready, ready), out, rank=0)
        if values is not None and self._home.values is not None:
            ops.gather_values(
                self._home.values.flatten(), self._slot_to_row, self._num_values, values
            )


def _empty_results(
    plan: Plan, num_tokens: int, like: torch.Tensor | None, has_values: bool, num_rows: int
) -> Collected:
    """Memory for collected results; num_rows: rows of a token."""
    rows = None if like is None else like.new_empty((num_tokens, num_rows, like.shape[1]))
    shape = (num_tokens, plan.top_k)
    device = plan.heap.device
    return Collected(
        plan, rows, torch.empty(shape, dtype=torch.float32, device=device) if has_values else None
    )
