"""Metrics of a model's MoE layers per step, as records and as numbers for any logger.

The device accumulates counts while the layers run; the host reads them once per step for all layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from symmoe.checks.arguments import check_kind
from symmoe.errors import warn
from symmoe.moe import balance
from symmoe.moe.listeners import Listeners, RoutingReport, layers_with_listeners
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.torch_internals import graph_task_id

Sink = Callable[[dict[str, float], int], object]
# A layer's totals besides the loads of its experts and ranks; counts but for the loss.
_TOTALS = (
    "num_calls",
    "aux_loss",
    "num_dropped",
    "num_over_capacity",
    "num_replicas",
    "replica_bytes",
    "dispatch_bytes",
    "combine_bytes",
)
_SPANS = ("forward", "dispatch", "combine")


def tensorboard_sink(writer: Any) -> Sink:
    """A sink for :class:`MetricsLogger` that writes each number to `writer`: a torch.utils.tensorboard.SummaryWriter or
    any object with `add_scalar`."""

    def sink(numbers: dict[str, float], step: int) -> None:
        for name, number in numbers.items():
            writer.add_scalar(name, number, step)

    return sink


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRecord:
    """One layer over one step: the calls in training mode since the last record.

    Attributes:
        name: the layer's name in the model.
        num_calls: micro-batches, usually. Recomputed forwards are not counted.
        aux_loss: mean over the calls; None if the trainer computes the losses (transformers, Megatron).
        tokens_per_expert: slots of each of the E experts over the EP group, before a static capacity drops any.
        tokens_per_rank: slots of each rank of the EP group: the sum over its experts.
        balanced_per_rank: tokens_per_rank after balance by replicas; None without replicas.
        num_replicas: replicas that had rows, of the EP group, summed over the calls.
        replica_bytes: bytes of weights that this rank sends to replicas of its experts, in forward and again in
            backward, and of gradients of trained weights that it reads from replicas. Counts a backward for every call.
        gate_mass: the sum of the probs of each expert, over this rank's slots; None if the trainer has the probs. An
            expert with many slots and little mass is chosen, and then hardly used.
        coefficient_of_variation, max_violation, load_entropy, num_dead_experts: of tokens_per_expert; see
            symmoe.moe.balance. For a longer window call :meth:`MetricsLogger.step` more rarely.
        num_dropped: slots of the EP group dropped by a static capacity.
        num_over_capacity: slots of this rank dropped by symmoe's capacity factor.
        dispatch_bytes, combine_bytes: bytes of token rows that this rank sends to, and reads from, others in forward.
            Backward moves as many rows again. Counts slots that a static capacity drops, and ignores moves to replicas.
            Treats a group on several nodes as if on one: see `symmoe plan --nodes`.
        heap_high_water_bytes: the most bytes ever leased of the heap.
        forward_s: seconds in the layer's forward; None without times_forward. In a swapped transformers model from
            dispatch to combine, elsewhere including the router (in Megatron also shared experts).
        dispatch_s, combine_s: seconds of forward_s in these trips, on any stream, including waits for other ranks. If
            GEMMs overlap, this exceeds the cost of the trips.
    """

    name: str
    num_calls: int
    aux_loss: float | None
    tokens_per_expert: tuple[int, ...]
    tokens_per_rank: tuple[int, ...]
    balanced_per_rank: tuple[int, ...] | None
    gate_mass: tuple[float, ...] | None
    coefficient_of_variation: float
    max_violation: float
    load_entropy: float
    num_dead_experts: int
    num_dropped: int
    num_over_capacity: int
    num_replicas: int
    replica_bytes: int
    dispatch_bytes: int
    combine_bytes: int
    heap_high_water_bytes: int
    forward_s: float | None
    dispatch_s: float | None
    combine_s: float | None


class MetricsLogger:
    """Records metrics of a model's MoE layers, until :meth:`close`. ArgumentError: it has none.

    Recording costs a few small kernels per call, no host synchronisation, and can be captured in a CUDA graph, whose
    replays then count. Compiled calls count too. When recording begins or ends, torch.compile compiles the model again,
    and :func:`symmoe.capture_step` captures its step again.

    Args:
        model: has MoELayers, or layers of symmoe's integrations in transformers, Megatron and torchtitan models.
            Layers in eval mode do not count.
        sink: :meth:`step` calls `sink(numbers, step)`, e.g. `wandb.log`, or a :func:`tensorboard_sink`. None:
            only records.
        times_forward: measure every forward, and its trips, with CUDA events, or perf_counter on CPUs. Excludes
            CUDA graphs and compiled calls.
        min_load_entropy: :meth:`step` warns of every layer whose `load_entropy` is smaller: its router collapses to
            few experts. None: no warning.
    """

    def __init__(
        self,
        model: nn.Module,
        sink: Sink | None = None,
        *,
        times_forward: bool = False,
        min_load_entropy: float | None = None,
    ) -> None:
        layers = layers_with_listeners(model)
        check_kind("sink", sink, (Callable, type(None)), "a function sink(numbers, step), or None")
        self._sink = sink
        self._min_load_entropy = min_load_entropy or 0.0
        all_listeners = [listeners for _, listeners in layers.values()]
        self._sizes = [
            2 * listeners.num_experts + listeners.heap.num_ranks + len(_TOTALS)
            for listeners in all_listeners
        ]
        self._totals = torch.zeros(
            sum(self._sizes), dtype=torch.float64, device=all_listeners[0].heap.device
        )
        self._removals = ExitStack()
        self._layers: list[_LayerTotals] = []
        for (name, (layer, listeners)), totals in zip(
            layers.items(), self._totals.split(self._sizes), strict=True
        ):
            timer = _Timer(listeners.heap) if times_forward else None
            self._layers.append(_LayerTotals(name, listeners, totals, timer))
            self._removals.callback(listeners.add(self._layers[-1].count, totals))
            if timer is not None:
                self._removals.callback(layer.register_forward_pre_hook(timer.before).remove)
                self._removals.callback(layer.register_forward_hook(timer.after).remove)
                # If a forward has raised.
                self._removals.callback(setattr, listeners.heap, "trip_timer", None)

    def step(self, step: int) -> list[LayerRecord]:
        """A record for each layer, with the counts since the last call. Waits for the device once. Local.

        The sink gets, for every field of the records that is a number, "moe/{layer}/{field}", and "moe/{field}/mean"
        and "moe/{field}/max" over the layers; for tokens_per_expert, gate_mass, tokens_per_rank and balanced_per_rank
        "moe/{layer}/{field}/{i}" of each expert or rank, and of ranks "moe/{layer}/{field}_max_over_mean". Except
        for aux_loss, gate_mass, num_over_capacity, bytes and times, records are the same on all ranks of an EP group.
        step: passed to the sink.
        """
        totals = self._totals.to("cpu", copy=True)
        self._totals.zero_()
        records = [
            layer.record(layer_totals)
            for layer, layer_totals in zip(self._layers, totals.split(self._sizes), strict=True)
        ]
        for record in records:
            if record.num_calls and record.load_entropy < self._min_load_entropy:
                warn(
                    f"the router of layer {record.name!r} collapses: load_entropy {record.load_entropy:.3f} is below "
                    f"min_load_entropy {self._min_load_entropy}, {record.num_dead_experts} experts have no token"
                )
        if self._sink is not None:
            self._sink(_numbers(records), step)
        return records

    def close(self) -> None:
        """Ends recording."""
        self._removals.close()


class _LayerTotals:
    """One layer: accumulates its reports, and builds its records."""

    def __init__(
        self, name: str, listeners: Listeners, totals: torch.Tensor, timer: _Timer | None
    ) -> None:
        self.listeners = listeners
        self.timer = timer
        self._name = name
        self._totals = totals
        self._has_losses = True
        self._has_probs = False
        self._has_replicas = False

    @torch.no_grad()
    def count(self, report: RoutingReport) -> None:
        """Adds a call's report to the totals: the callback for the layer's listeners."""
        if not _is_counted(report.is_training):
            return
        num_experts = self.listeners.num_experts
        heap = self.listeners.heap
        # Dispatch sends a token once to every other rank that has an expert of it (-1 is none). Combine reads as many
        # rows back with order "rank", and a row for every slot with order "slot".
        rank_TK = torch.div(report.topk_idx, num_experts // heap.num_ranks, rounding_mode="floor")
        is_remote_TK = (rank_TK >= 0) & (rank_TK != heap.rank)
        rank_or_none_TK = torch.where(is_remote_TK, rank_TK, -1)
        num_sent_rows = balance.routing_map(rank_or_none_TK, heap.num_ranks).sum()
        num_read_rows = is_remote_TK.sum() if self.listeners.order == "slot" else num_sent_rows
        load_E, mass_E, balanced_R, scalars = self._split(self._totals)
        load_E.add_(report.expert_load)
        if report.probs is not None:
            self._has_probs = True
            # The plan reports ids out of range; with a static capacity on a GPU it does later.
            is_slot_TK = (report.topk_idx >= 0) & (report.topk_idx < num_experts)
            expert_N = report.topk_idx.where(is_slot_TK, 0).flatten().long()
            mass_E.index_add_(0, expert_N, (report.probs * is_slot_TK).flatten().double())
        total = dict(zip(_TOTALS, scalars, strict=True))
        if report.replica_to_expert is not None and report.replica_rows is not None:
            self._has_replicas = True
            balanced_R.add_(
                balance.rows_per_rank(
                    report.expert_load, report.replica_to_expert, report.replica_rows
                )[1]
            )
            total["num_replicas"].add_((report.replica_to_expert >= 0).sum())
            is_own_RS = report.replica_to_expert // (num_experts // heap.num_ranks) == heap.rank
            total["replica_bytes"].add_(is_own_RS.sum(), alpha=report.replica_bytes)
        total["num_calls"].add_(1)
        self._has_losses = report.aux_loss is not None
        if report.aux_loss is not None:
            total["aux_loss"].add_(report.aux_loss.detach())
        total["num_dropped"].add_(report.num_dropped[0])
        if report.num_over_capacity is not None:
            total["num_over_capacity"].add_(report.num_over_capacity[0])
        total["dispatch_bytes"].add_(num_sent_rows, alpha=report.sent_row_bytes)
        total["combine_bytes"].add_(num_read_rows, alpha=report.row_bytes)

    def _split(self, totals: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The load and the gate mass of each expert, the balanced load of each rank, and _TOTALS."""
        num_experts, num_ranks = self.listeners.num_experts, self.listeners.heap.num_ranks
        return totals.tensor_split([num_experts, 2 * num_experts, 2 * num_experts + num_ranks])

    def record(self, values: torch.Tensor) -> LayerRecord:
        """The record of these totals, on the CPU; resets times."""
        heap = self.listeners.heap
        load_E, mass_E, balanced_R, scalars = self._split(values)
        load_E = load_E.long()
        total = dict(zip(_TOTALS, scalars.tolist(), strict=True))
        aux_loss = total.pop("aux_loss") / max(total["num_calls"], 1.0)
        numbers: dict[str, Any] = {name: int(value) for name, value in total.items()}
        numbers |= {
            f"{name}_s": None if self.timer is None else self.timer.pop_seconds(name)
            for name in _SPANS
        }
        return LayerRecord(
            name=self._name,
            aux_loss=aux_loss if self._has_losses else None,
            tokens_per_expert=tuple(load_E.tolist()),
            tokens_per_rank=tuple(load_E.view(heap.num_ranks, -1).sum(1).tolist()),
            balanced_per_rank=tuple(balanced_R.long().tolist()) if self._has_replicas else None,
            gate_mass=tuple(mass_E.tolist()) if self._has_probs else None,
            coefficient_of_variation=float(balance.coefficient_of_variation(load_E)),
            max_violation=float(balance.max_violation(load_E)),
            load_entropy=float(balance.load_entropy(load_E)),
            num_dead_experts=int((load_E == 0).sum()),
            heap_high_water_bytes=heap.high_water_bytes,
            **numbers,
        )


class _Timer:
    """Sums the time of a layer's forwards and of their trips; read it after the device has finished."""

    def __init__(self, heap: SymmetricHeap) -> None:
        self._heap = heap
        self._on_gpu = heap.device.type == "cuda"
        self._spans: dict[str, list[tuple[Any, Any]]] = {name: [] for name in _SPANS}
        self._forward = ExitStack()

    def before(self, layer: nn.Module, _args: tuple[Any, ...]) -> None:
        """Hook before the layer's forward."""
        # The last forward may have raised.
        self._forward = ExitStack()
        self._heap.trip_timer = None
        if _is_counted(layer.training):
            self._forward.enter_context(self.trip("forward"))
            self._forward.callback(setattr, self._heap, "trip_timer", None)
            self._heap.trip_timer = self.trip

    def after(self, _layer: nn.Module, _args: tuple[Any, ...], _output: object) -> None:
        """Hook after the layer's forward."""
        self._forward.close()

    @contextmanager
    def trip(self, name: str) -> Iterator[None]:
        """Times a trip, or a forward, on the current stream."""
        begin = self._now()
        yield
        if begin is not None:
            self._spans[name].append((begin, self._now()))

    def pop_seconds(self, name: str) -> float:
        """Seconds since the last call of this method. On GPUs the events must be complete."""
        spans, self._spans[name] = self._spans[name], []
        return float(
            sum(
                begin.elapsed_time(end) / 1e3 if self._on_gpu else end - begin
                for begin, end in spans
            )
        )

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _is_counted(is_training: bool) -> bool:
    """Whether metrics count a call: in training mode, and not as a checkpoint's repetition in backward."""
    return is_training and (torch.compiler.is_compiling() or graph_task_id() == -1)


def _numbers(records: list[LayerRecord]) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for field in LayerRecord.__dataclass_fields__:
        values = {f"moe/{record.name}/{field}": getattr(record, field) for record in records}
        lists = {name: value for name, value in values.items() if isinstance(value, tuple)}
        numbers |= {
            f"{name}/{i}": float(number)
            for name, value in lists.items()
            for i, number in enumerate(value)
        }
        if field.endswith("_per_rank"):
            numbers |= {
                f"{name}_max_over_mean": max(value) * len(value) / max(1, sum(value))
                for name, value in lists.items()
            }
        if all(isinstance(value, (int, float)) for value in values.values()):
            numbers |= {
                **{name: float(value) for name, value in values.items()},
                f"moe/{field}/mean": float(sum(values.values()) / len(values)),
                f"moe/{field}/max": float(max(values.values())),
            }
    return numbers
