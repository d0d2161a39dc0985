"""MoELayer: a router, experts that are spread over ranks, and an optional shared expert."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn

from symmoe.autograd import is_in_backward
from symmoe.checks.arguments import check_kind, tensor_problem, working_dtype
from symmoe.dispatch.plan import MAX_TOP_K
from symmoe.errors import ArgumentError, SymmoeError, raise_for, users_line, warn
from symmoe.grouped.mlp import GroupedMLP
from symmoe.kernels import control
from symmoe.kernels.architectures import e4m3_problem
from symmoe.kernels.operands import require_tensor
from symmoe.moe import balance
from symmoe.moe.config import MoEConfig
from symmoe.moe.ddp_and_fsdp import ExpertParallelModule, device_problem
from symmoe.moe.listeners import Listeners, RoutingReport
from symmoe.moe.routed_experts import CALL_PHASES, RoutedExperts, experts_of, is_traced, run_routed
from symmoe.moe.router import (
    Choice,
    Router,
    RouterOutput,
    arguments_problem,
    check_finite,
    choice_of,
    inner_router,
    router_problem,
)
from symmoe.symm_mem.heap import FailPeersOnError, SymmetricHeap
from symmoe.torch_internals import around_call, register_namedtuple

_LOST_LOSS = (
    "metrics.aux_loss has no gradient: it comes from inside a checkpoint with use_reentrant=True, which has gradients "
    "of tensors only that it returns, not of those in its results. Give checkpoint use_reentrant=False"
)


class MoEMetrics(NamedTuple):
    """Load, drops and losses of one call of MoELayer. Tensors on the device; only reading them synchronises the host.

    A named tuple, because DDP, Fabric, accelerate and torch.export flatten or rebuild a module's output.

    Attributes:
        aux_loss: scalar to add to the training loss, already scaled by the coefficients; 0 if both are 0, or if the
            call had probs.
        expert_load: int32 [E], slots of each expert over the whole EP group, before a static capacity drops any.
        num_dropped: int32 [1], slots of the whole group dropped by a static capacity.
        topk_idx: int32 [T, K], experts of this rank's tokens, before a static capacity drops any; -1 is none.
        num_over_capacity: int32 [1], slots of this rank dropped by the capacity factor; None without one.
        replica_to_expert, replica_rows: int32 [R, S], for each replica slot of a rank, the expert that it replicates
            (-1 for none) and the number of rows that it takes; None without balance "replicas". Equal on all ranks.
    """

    aux_loss: torch.Tensor
    expert_load: torch.Tensor
    num_dropped: torch.Tensor
    topk_idx: torch.Tensor
    num_over_capacity: torch.Tensor | None
    replica_to_expert: torch.Tensor | None = None
    replica_rows: torch.Tensor | None = None

    @property
    def max_violation(self) -> torch.Tensor:
        """fp32 scalar, (largest - mean) / mean load; computed on access."""
        return balance.max_violation(self.expert_load)

    @property
    def coefficient_of_variation(self) -> torch.Tensor:
        """fp32 scalar, standard deviation over mean load; computed on access."""
        return balance.coefficient_of_variation(self.expert_load)

    @property
    def load_entropy(self) -> torch.Tensor:
        """fp32 scalar, entropy of the load as a part of log E; computed on access."""
        return balance.load_entropy(self.expert_load)

    @property
    def num_dead_experts(self) -> torch.Tensor:
        """int64 scalar, experts without a token of the group; computed on access."""
        return (self.expert_load == 0).sum()

    @property
    def rows_per_rank(self) -> torch.Tensor | None:
        """int64 [2, R], rows of each rank before and after balance by replicas, before a static capacity drops any, or
        None without replicas; computed on access."""
        if self.replica_to_expert is None or self.replica_rows is None:
            return None
        return balance.rows_per_rank(self.expert_load, self.replica_to_expert, self.replica_rows)

    @property
    def num_replicas(self) -> torch.Tensor | None:
        """int64 scalar, replicas with rows in the whole EP group, or None; computed on access."""
        return None if self.replica_to_expert is None else (self.replica_to_expert >= 0).sum()


register_namedtuple(MoEMetrics, serialized_type_name="symmoe.MoEMetrics")


class LatentProjection(nn.Linear):
    """A linear layer in the dtype of its input: trainers keep weights in fp32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype))


class MoELayer(ExpertParallelModule):
    """A Mixture-of-Experts feed-forward layer whose experts are spread over the ranks of a heap's EP group: rank r
    holds experts r * E / R to (r + 1) * E / R - 1. The router (None if config.router is) is replicated: its gradients
    are data-parallel, the gradients of `experts` are not (see reduce_gradients).

    To use your own router, set router=None and pass topk_idx and probs to each call. To use your own experts, call
    make_plan, dispatch_tokens and combine_tokens around them, all differentiable: see docs/own_experts.md.

    Args:
        config: the same on all ranks.
        heap: the EP group's symmetric heap; several layers share one. aux_loss="global" sums the load over its
            `expert_group` in each forward.
        experts: this rank's E / R experts, a GroupedMLP, e.g. with biases; None creates one.
        shared_expert: a module for every token, [..., H] to [..., H]; its output is added to the experts'. On GPUs it
            runs on a separate stream, while tokens travel and experts compute, forward and backward. It is replicated,
            so its gradients are data-parallel.
        dtype: the dtype of the expert weights. The layer computes in the dtype of its input, or in autocast's.
        device: the device of the parameters; None is the heap's.

    Raises:
        ArgumentError: the configuration does not fit the group or its GPUs, or `experts` does not fit it.
    """

    def __init__(
        self,
        config: MoEConfig,
        heap: SymmetricHeap,
        *,
        experts: GroupedMLP | None = None,
        shared_expert: nn.Module | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_kind("config", config, MoEConfig)
        check_kind("heap", heap, SymmetricHeap)
        config.experts_per_rank(heap.num_ranks)  # raises unless ranks get equally many
        for name, limit in (("num_experts", control.MAX_EXPERTS), ("top_k", MAX_TOP_K)):
            if getattr(config, name) > limit:
                raise ArgumentError(f"{name} ({getattr(config, name)}) must be at most {limit}")
        raise_for(e4m3_problem(config.precision, heap.device))
        device = heap.device if device is None else device
        self.config = config
        self.heap = heap
        self.listeners = Listeners(heap, num_experts=config.num_experts, order=config.order)
        router = config.router
        self.router = None if router is None else Router(config, device=device, heap=heap)
        self.sums_global_load = router is not None and router.sums_global_load
        self.counts_needed_biases = router is not None and router.bias_update == "quantile"
        if experts is None:
            experts = experts_of(config, heap.num_ranks, dtype=dtype, device=device)
        self.set_experts(experts)
        self.fc1_latent_proj = self.fc2_latent_proj = None
        if (latent := config.latent) is not None:
            options: dict[str, Any] = {"bias": False, "dtype": dtype, "device": device}
            self.fc1_latent_proj = LatentProjection(config.hidden, latent, **options)
            self.fc2_latent_proj = LatentProjection(latent, config.hidden, **options)
        self.shared_expert = shared_expert
        self._called_at: tuple[str, int] | None = None  # by the last call without gradients

    def set_experts(self, experts: GroupedMLP) -> None:
        """Replaces this rank's experts by `experts`. Local. ArgumentError: they do not fit the configuration."""
        raise_for(self._fit_problem(experts))
        self.experts = experts
        self._routed_experts = RoutedExperts.of(self.config, self.heap, experts)

    def _fit_problem(self, experts: GroupedMLP) -> ArgumentError | None:
        """The error if these experts differ from the configuration, or None."""
        config = self.config
        if not isinstance(experts, GroupedMLP):
            return ArgumentError(
                f"experts ({type(experts).__name__}) must be a GroupedMLP, whose call the kernels replace; experts of "
                "another kind run by parts, between dispatch_tokens and combine_tokens: see symmoe.MoELayer"
            )
        for name, value, required in (
            ("num_groups", experts.num_groups, config.experts_per_rank(self.heap.num_ranks)),
            ("hidden", experts.hidden, config.expert_hidden),
            ("ffn", experts.ffn, config.ffn),
            ("precision", experts.precision, config.precision),
            ("activation", experts.activation.activation, config.activation),
        ):
            if value != required:
                return ArgumentError(
                    f"experts.{name} ({value}) must be {required} with this config and heap"
                )
        return None

    def forward(
        self,
        x: torch.Tensor,
        token_mask: torch.Tensor | None = None,
        *,
        topk_idx: torch.Tensor | None = None,
        probs: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, MoEMetrics]:
        """Collective over the EP group, forward and backward. With exact capacity the host waits for the plan after it
        has launched all kernels; with static capacity it does not wait.

        Args:
            x: [..., H] fp32, fp16 or bf16 on the heap's device. The number of tokens may differ from rank to rank. For
                aux_loss="sequence", the second-to-last dimension is the sequence: [B, S, H] has B sequences.
            token_mask: bool [...]; False marks padding, which goes to no expert and counts in no load and no loss. Its
                y is 0 plus the shared expert, which computes all tokens as in Megatron-Core.
            topk_idx: int [T, K], experts that replace the router's choice (symmoe.routing); -1 is none.
            probs: fp32, fp16 or bf16 [T, K], with topk_idx: weights of these experts, e.g. of your own router. They are
                used unchanged, and get a gradient. The layer's router does not run: its losses are 0, and the call does
                not count for balance_step.

        Returns:
            y like x (in autocast's dtype under autocast), and the metrics of the call.

        Raises:
            ArgumentError, ConfigMismatch, CapacityError, HeapExhausted, PeerTimeout: see make_plan; on every rank. On
                CPUs also for router logits, or probs, of NaN or Inf; on GPUs such a token's own y is NaN. Inside
                torch.compile a wrong x, token_mask, topk_idx or probs is the compiler's error, on that rank only.
        """
        is_compiling = torch.compiler.is_compiling()
        shared_call = (
            None if self.shared_expert is None else _SideCall(self.shared_expert, x, self.heap)
        )
        before_trips = None if shared_call is None else shared_call.start
        with nullcontext() if is_compiling else FailPeersOnError(self.heap, *CALL_PHASES):
            if not is_compiling:
                self.heap._fail_for(
                    self.prepare_call() or self._problem(x, token_mask, topk_idx, probs),
                    control.PHASE_PLAN,
                )
            load_before = self._load_before_call() if self.sums_global_load else None
            token_mask = None if token_mask is None else token_mask.reshape(-1)
            dtype = working_dtype(x)
            x_TH = x if x.dim() == 2 else x.reshape(-1, self.config.hidden)
            project = self.fc1_latent_proj
            tokens = x_TH.to(dtype) if project is None else project(x_TH)  # [T, H], or [T, L]
            out_shape = torch.Size((*x.shape[:-1], tokens.shape[-1]))
            router = self.router
            experts = self.experts
            is_routed_by_layer = token_mask is None and topk_idx is None and probs is None
            if (
                is_routed_by_layer
                and dtype == x.dtype
                and self.config.capacity_factor is None
                and not is_traced(experts)
                and router is not None
                and around_call(router) is None
            ):
                shape = len(x_TH), self.config.top_k
                topk_idx = torch.empty(shape, dtype=torch.int32, device=x.device)
                route = router.route_of(x_TH, topk_idx=topk_idx)
                y, load, routed = self._routed_experts.run(
                    tokens, route, topk_idx, experts, out_shape=out_shape, before_trips=before_trips
                )
                assert routed is not None  # with a route
                choice: Choice = RouterOutput.of(routed)
            else:
                # Not of the tokens: autocast would round the router's input.
                choice = self._route(x, token_mask, topk_idx, probs)
                y, load = run_routed(
                    self._routed_experts,
                    tokens,
                    choice.probs,
                    choice.topk_idx,
                    experts,
                    out_shape,
                    before_trips=before_trips,
                )
        if self.fc2_latent_proj is not None:
            y = self.fc2_latent_proj(y)
        step_load = (
            router.step_load if router is not None and isinstance(choice, RouterOutput) else None
        )
        if step_load is not None and self.training and torch.is_grad_enabled():
            y = balance.count_in_backward(y, load[0], step_load)  # for the optimizer step
            if self.counts_needed_biases:
                y = balance.count_needed_biases(
                    y, inner_router(cast(Router, router)), cast(RouterOutput, choice), token_mask
                )
        if shared_call is not None:
            y = y + shared_call.join()
        aux_loss = self._aux_loss(x, token_mask, choice, load[0], load_before)
        if self.training and not is_compiling:
            self._warn_of_lost_loss(y, aux_loss)
        metrics = MoEMetrics(
            aux_loss, load[0], load[1], choice.topk_idx, choice.num_over_capacity, *load[2:]
        )
        if self.listeners.callbacks:
            self.listeners.report(
                RoutingReport(
                    **metrics._asdict(),
                    chosen_idx=choice.chosen_idx,
                    probs=choice.probs.detach(),
                    row_bytes=self.config.expert_hidden * dtype.itemsize,
                    sent_row_bytes=self.config.sent_row_bytes("forward", dtype.itemsize),
                    is_training=self.training,
                    replica_bytes=self._replica_bytes(dtype.itemsize),
                )
            )
        return y, metrics

    if TYPE_CHECKING:
        __call__ = forward  # nn.Module's has no types

    def _replica_bytes(self, item_bytes: int) -> int:
        """Bytes that one replica moves in a step: an expert's tensors twice, and gradients of the trained ones."""
        num_bytes = 0
        for fc in (self.experts.fc1, self.experts.fc2):
            weight_gradient_bytes = 4 if fc.accumulate_into_main_grad else item_bytes
            parameters = {
                name.rstrip("0123456789"): parameter for name, parameter in fc.named_parameters()
            }
            for name, parameter in parameters.items():
                is_of_one = name == "weight" and not fc.is_packed
                numel = parameter.numel() if is_of_one else parameter.numel() // parameter.shape[0]
                gradient_bytes = weight_gradient_bytes if name == "weight" else item_bytes
                num_bytes += numel * (2 * item_bytes + gradient_bytes * parameter.requires_grad)
        return num_bytes

    def _problem(
        self,
        x: torch.Tensor,
        token_mask: torch.Tensor | None,
        topk_idx: torch.Tensor | None,
        probs: torch.Tensor | None,
    ) -> SymmoeError | None:
        """The error of forward's arguments, or None. Reads no device memory."""
        hidden = self.config.hidden
        width = f"hidden ({hidden})"
        problem: SymmoeError | None = tensor_problem(
            "x", x, shape=("...", width), dtypes=control.DTYPES, device=self.heap.device
        )
        if problem is None and x.shape[-1] != hidden:
            problem = ArgumentError(f"x ({list(x.shape)}) must be [..., {width}]")
        is_x_alone = token_mask is None and topk_idx is None and probs is None
        if problem is None and not (is_x_alone and self.config.router and not x.is_inference()):
            arguments = {"token_mask": token_mask, "topk_idx": topk_idx, "probs": probs}
            problem = arguments_problem(self.config, x, **arguments)
            problem = problem or self._inference_problem(x=x, **arguments)
        return problem

    def parts_problem(self) -> SymmoeError | None:
        modules = self._modules
        device = self.heap.device  # both may have been assigned
        experts = cast(GroupedMLP, modules["experts"])
        router = modules.get("router")
        return (
            self._fit_problem(experts)
            or router_problem(router)
            or device_problem("router", router, device)
            or device_problem("shared_expert", modules.get("shared_expert"), device)
            or device_problem("fc1_latent_proj", modules.get("fc1_latent_proj"), device)
            or device_problem("fc2_latent_proj", modules.get("fc2_latent_proj"), device)
            or super().parts_problem()
        )

    def _inference_problem(self, **tensors: torch.Tensor | None) -> ArgumentError | None:
        """The error for an inference tensor, which torch cannot save for backward: it would raise while peers wait."""
        for name, tensor in tensors.items():
            if (
                tensor is not None
                and tensor.is_inference()
                and torch.is_grad_enabled()
                and any(p.requires_grad for p in self.parameters())
            ):
                return ArgumentError(
                    f"{name} was made in inference_mode, and backward cannot use it: give its clone()"
                )
        return None

    def _route(
        self,
        x: torch.Tensor,
        token_mask: torch.Tensor | None,
        topk_idx: torch.Tensor | None,
        probs: torch.Tensor | None,
    ) -> Choice:
        """The routing of the tokens of x; token_mask is bool [T]."""
        if self.router is None or probs is not None:
            topk_idx = require_tensor("topk_idx", topk_idx)
            probs_TK = require_tensor("probs", probs).float().masked_fill(topk_idx < 0, 0.0)
            choice = choice_of(self.config, topk_idx, probs_TK, token_mask)
        else:
            x_TH = x.reshape(-1, self.config.hidden)
            choice = self.router(x_TH, token_mask=token_mask, topk_idx=topk_idx)
        if not isinstance(choice, Choice):
            raise ArgumentError(
                f"router returns {type(choice).__name__}; it must return a RouterOutput, or a Choice"
            )
        if x.device.type != "cpu" or is_traced(self.experts):  # on a GPU the host would wait
            return choice
        if isinstance(choice, RouterOutput):
            check_finite(self.heap, "the router's logits", choice.logits)
        else:
            check_finite(self.heap, "probs", choice.probs)
        return choice

    def _load_before_call(self) -> torch.Tensor | None:
        """The load that the step counted before this call, if a loss needs it and the router counts."""
        router = None if self.router is None else inner_router(self.router)
        return None if router is None or router.step_load is None else router.load_before_call()

    def _aux_loss(
        self,
        x: torch.Tensor,
        token_mask: torch.Tensor | None,
        choice: Choice,
        expert_load: torch.Tensor,
        load_before: torch.Tensor | None,
    ) -> torch.Tensor:
        """The scalar aux_loss; 0 if both coefficients are 0, or if the router has not run."""
        config = self.config
        options = config.router
        has_loss = options is not None and (options.aux_loss_coef or options.z_loss_coef)
        if options is None or not has_loss or not isinstance(choice, RouterOutput):
            return torch.zeros((), device=expert_load.device)
        sequence_length = None
        if options.aux_loss == "sequence":
            sequence_length = x.shape[-2] if x.dim() > 1 else 1
        elif load_before is not None:
            expert_load = balance.load_so_far(load_before, expert_load)
            if self.heap.expert_group is not None:
                dist.all_reduce(expert_load, group=self.heap.expert_group)
        elif options.aux_loss_coef and config.capacity_factor is not None:
            # The load before the drops: afterwards an overloaded expert looks less loaded.
            expert_load = balance.routing_map(choice.chosen_idx, config.num_experts).sum(0)
        loss = balance.RouterLoss(
            options.aux_loss_coef, options.z_loss_coef, options.score, sequence_length
        )
        return balance.router_loss(
            loss, choice.logits, choice.scores, choice.chosen_idx, expert_load, token_mask
        )

    def _warn_of_lost_loss(self, y: torch.Tensor, aux_loss: torch.Tensor) -> None:
        """Warns if a checkpoint repeats this call in backward and differentiates y but not aux_loss. Autograd reaches y
        after aux_loss, which is newer; with use_reentrant=False it reaches neither."""
        if not torch.is_grad_enabled():
            self._called_at = users_line()
        elif aux_loss.requires_grad and is_in_backward():
            loss_gradients: list[torch.Tensor] = []
            aux_loss.register_hook(loss_gradients.append)
            y.register_hook(lambda _: None if loss_gradients else warn(_LOST_LOSS, self._called_at))


class _SideCall:
    """module(x) at the same time as the work of the current stream: on the heap's side stream from :meth:`start` to
    :meth:`join`; on CPUs immediately. Autograd runs its backward on that stream too, and orders it correctly."""

    def __init__(self, module: nn.Module, x: torch.Tensor, heap: SymmetricHeap) -> None:
        self._module = module
        self._x = x
        self._stream = heap.streams.side_stream
        self._y: torch.Tensor | None = None

    def start(self) -> None:
        """Enqueues the call after the current stream's work so far."""
        if (stream := self._stream) is not None:
            stream.wait_stream(torch.cuda.current_stream(self._x.device))
            # Without this the allocator might reuse the memory while `stream` still reads it.
            self._x.record_stream(stream)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            self._y = self._module(self._x)

    def join(self) -> torch.Tensor:
        """The result, for use on the current stream. A call that was not started runs there now."""
        y = self._y
        stream = self._stream
        if y is not None and stream is not None:
            current = torch.cuda.current_stream(y.device)
            current.wait_stream(stream)
            y.record_stream(current)
        return cast(torch.Tensor, self._module(self._x)) if y is None else y
