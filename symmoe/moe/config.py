"""The configuration of an MoE layer: one frozen record, checked when it is created."""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields
from typing import Literal

from symmoe.checks import arguments
from symmoe.errors import ArgumentError, choice_problem, first_problem, raise_for
from symmoe.grouped.activations import activation_problem
from symmoe.kernels.activation import SWIGLU, Activation
from symmoe.kernels.routing_rule import RoutingRule
from symmoe.moe.overlap import received_layout
from symmoe.precision.recipes import Recipe, precision_problem
from symmoe.precision.wire import WireFormat, wire_problem

_SIZES = ("hidden", "ffn", "num_experts", "top_k", "replicas_per_rank")
_BOUNDS = ("latent", "capacity", "max_row_budget", "max_tokens", "rail_capacity")  # sizes or None
_CAPACITY_FIELDS = ("overflow", "max_tokens", "rail_capacity")  # need a static one


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig(RoutingRule):
    """The router of a layer: how it chooses experts and balances their load.

    Attributes:
        score: how logits become scores, by "softmax", "sigmoid" or "sqrtsoftplus", sqrt(log(1 + exp(logit)))
            (DeepSeek-V4).
        renormalize: make the K probs of a token sum to one (before `route_scale`).
        num_expert_groups: the experts form this many groups of neighbours; 1 turns group-limited routing off.
        topk_groups: groups a token may choose its experts from.
        route_scale: factor on the probs.
        expert_bias: keep a bias per expert that steers only the selection (balance without an auxiliary loss).
        bias_update: how balance_step moves that bias: by "sign" (DeepSeek-V3), or to the "quantile" at which the step's
            tokens would have been balanced (Kimi K3), for scores from 0 to 1 without groups.
        bias_update_rate: with "sign", the step of the bias per optimizer step.
        aux_loss_coef: factor of the load-balance loss; 0 turns it off.
        aux_loss: the tokens over which the loss balances the experts: one call's ("micro_batch", of the EP group; with
            a capacity_factor of this rank), each sequence's, or those of all micro-batches since the last balance_step
            ("global", which needs one balance_step per optimizer step); see symmoe.moe.balance. Ignored if
            aux_loss_coef is 0, so a search over coefficients may include 0.
        z_loss_coef: factor of the router z-loss; 0 turns it off.

    Raises:
        ArgumentError: a field is out of range, or two fields do not fit together. The text names both values.
    """

    expert_bias: bool = False
    bias_update: arguments.BiasUpdate = "sign"
    bias_update_rate: float = 1e-3
    aux_loss_coef: float = 0.0
    aux_loss: arguments.AuxLoss = "micro_batch"
    z_loss_coef: float = 0.0

    @property
    def sums_global_load(self) -> bool:
        """Whether a loss needs the load of all micro-batches since the last balance_step."""
        return self.aux_loss == "global" and self.aux_loss_coef != 0

    @property
    def rule(self) -> RoutingRule:
        """The fields by which the router turns logits into a choice."""
        rule = {field.name: getattr(self, field.name) for field in fields(RoutingRule)}
        return RoutingRule(**rule)

    def __post_init__(self) -> None:
        _normalise_sizes(self, "num_expert_groups", "topk_groups")
        choices = {name: getattr(self, name) for name in ("score", "aux_loss", "bias_update")}
        raise_for(arguments.choices_problem(**choices))
        for name in ("renormalize", "expert_bias"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(f"{name} ({getattr(self, name)!r}) must be True or False")
        for name in ("route_scale", "bias_update_rate", "aux_loss_coef", "z_loss_coef"):
            arguments.check_factor(name, getattr(self, name))
        object.__setattr__(self, "route_scale", float(self.route_scale))
        if self.bias_update == "quantile":
            needs = "bias_update ('quantile') needs"
            raise_for(
                first_problem(
                    (not self.expert_bias, f"{needs} expert_bias=True; it is {self.expert_bias}"),
                    (
                        self.score == "sqrtsoftplus",
                        f"{needs} scores from 0 to 1, not {self.score!r}",
                    ),
                    (
                        self.num_expert_groups > 1,
                        f"{needs} num_expert_groups=1; it is {self.num_expert_groups}",
                    ),
                )
            )
        if self.topk_groups > self.num_expert_groups:
            raise ArgumentError(
                f"topk_groups ({self.topk_groups}) must be at most num_expert_groups ({self.num_expert_groups})"
            )


def _normalise_sizes(config: RouterConfig | MoEConfig, *names: str) -> None:
    """Makes these fields int, for equal error texts on all ranks. ArgumentError: a field is no size."""
    sizes = {name: getattr(config, name) for name in names}
    raise_for(arguments.size_problem(**sizes))
    for name, size in sizes.items():
        object.__setattr__(config, name, operator.index(size))


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """One MoE layer: its shape, memory, communication and router. Equal on every rank of the EP group: every call's
    plan compares it.

    Attributes:
        hidden: H, width of the tokens.
        ffn: I, width of one expert's feed-forward layer.
        num_experts: E, experts in all; a multiple of the number of EP ranks (checked by the layer).
        top_k: K, experts per token.
        latent: L, width of the experts' rows (latent MoE; Megatron's moe_latent_size). A projection [L, H] makes rows
            of the tokens, and a projection [H, L] reads the experts' results. Router and shared expert read the tokens.
            None: the tokens are the rows.
        activation: the function between the two layers of an expert.
        capacity: rows a rank can receive in one call. None is exact: no slot is dropped, and the host reads the plan of
            a call after it has launched all kernels.
        max_row_budget: with exact capacity, the most rows that a call reserves before its routing is known. A call
            reserves the rows of recent calls and a margin; a call that needs more is planned again. If recent calls
            needed more than max_row_budget, the host waits for the routing first. None: no limit.
        overflow: with a static capacity, "raise" on every rank, or "drop" the last tokens of the fullest experts.
        max_tokens: with a static capacity, the most tokens of one rank in a call. None: a call's own number, which must
            then be equal on every rank.
        rail_capacity: with a static capacity, the most tokens that a rank sends to another node, see make_plan; ignored
            on one node. None: max_tokens, or the tokens of a call.
        order: order of the sum in combine. "rank" moves fewer bytes, "slot" does not depend on the number of ranks.
            "node": each node sums its rows in k order, and the token's rank adds the nodes' sums. On one node "node"
            equals "slot"; between nodes "rank" equals "node".
        stash: what forward keeps for backward. "all": the received rows (on the heap) and FC1's output h. "rows":
            backward recomputes h. "hidden": only h; backward dispatches the tokens again. "none": backward does both.
            All give the same bits.
        layout: layout of the received rows. "packed": one row per (token, rank), from which the GEMMs gather.
            "expert-major": one per (token, expert), which GEMMs read faster, in up to K times the heap. "auto": the
            faster one, expert-major for an ffn of about 500 and more, packed with a `precision`. Same bits.
        schedule: "overlapped": rows travel while GEMMs run, where that saves time (moe/overlap.py). "serial": dispatch,
            experts and combine run in sequence. "always-overlapped": every trip overlaps, for tests. Same bits.
        precision: the number format of the experts' products, a recipe of symmoe.precision (docs/precision.md); None:
            the working dtype. Parameters, their gradients and checkpoints do not depend on it.
        quantized_wire: which rows travel to the experts as E4M3 numbers of `precision`, in about half the bytes: tokens
            ("forward"), gradients of the experts' results ("backward"), "both" or "none". The experts' results keep
            their bits, except gradients of weights and biases, which use dequantised rows.
        balance: "replicas": in every call, overloaded ranks move rows to replicas of their experts on ranks with fewer
            rows, see docs/balance.md. "none": the rank of an expert computes all its rows.
        replicas_per_rank: with "replicas", the most replicas of other ranks' experts on a rank at a time.
        replica_slack: with "replicas", the rows above the mean that a rank may keep, as a share of the mean.
        router: the layer's router (symmoe.moe.router). None: the layer has no router and no router parameters; pass
            topk_idx and probs to each call.
        capacity_factor: an expert takes at most ceil(capacity_factor * T * K / E) of this rank's T tokens, including
            padding; the other tokens lose that slot before dispatch. None drops nothing.
        drop_policy: which tokens lose a slot: those with the smallest prob ("probs") or the last ones ("position").

    Raises:
        ArgumentError: a field is out of range, or two fields do not fit together. The text names both values.
    """

    hidden: int
    ffn: int
    num_experts: int
    top_k: int
    latent: int | None = None
    activation: Activation = SWIGLU
    capacity: int | None = None
    max_row_budget: int | None = None
    overflow: arguments.Overflow = "raise"
    max_tokens: int | None = None
    rail_capacity: int | None = None
    order: arguments.Order = "rank"
    stash: arguments.Stash = "all"
    layout: arguments.Layout = "auto"
    schedule: arguments.Schedule = "overlapped"
    precision: Recipe | None = None
    quantized_wire: arguments.QuantizedWire = "none"
    balance: arguments.Balance = "none"
    replicas_per_rank: int = 2
    replica_slack: float = 0.05
    router: RouterConfig | None = RouterConfig()  # frozen
    capacity_factor: float | None = None
    drop_policy: arguments.DropPolicy = "probs"

    @property
    def expert_hidden(self) -> int:
        """Width of the experts' rows."""
        return self.latent or self.hidden

    @property
    def received_layout(self) -> str:
        """The layout, with "auto" resolved."""
        return received_layout(self.layout, self.ffn, self.precision)

    @property
    def num_replica_slots(self) -> int:
        """S, the replica slots of a rank."""
        return self.replicas_per_rank if self.balance == "replicas" else 0

    def experts_per_rank(self, num_ranks: int) -> int:
        """E / R. Raises an ArgumentError if that is no integer."""
        if self.num_experts % num_ranks:
            raise ArgumentError(
                f"num_experts ({self.num_experts}) must be divisible by the number of ranks ({num_ranks})"
            )
        return self.num_experts // num_ranks

    def sent_row_bytes(self, direction: Literal["forward", "backward"], item_bytes: int) -> int:
        """Bytes of a token, or of the gradient of its result, on its way to an expert. item_bytes: bytes of one number.
        ArgumentError: unknown direction."""
        raise_for(choice_problem("direction", direction, ("forward", "backward")))
        if self.precision is None or self.quantized_wire not in (direction, "both"):
            return self.expert_hidden * item_bytes
        return WireFormat(self.precision, self.expert_hidden).row_bytes

    def __post_init__(self) -> None:
        bounds = [name for name in _BOUNDS if getattr(self, name) is not None]
        _normalise_sizes(self, *_SIZES, *bounds)
        raise_for(activation_problem(self.activation))
        choices = arguments.CHOICES.keys() & {field.name for field in fields(self)}
        raise_for(arguments.choices_problem(**{name: getattr(self, name) for name in choices}))
        arguments.check_factor("replica_slack", self.replica_slack)
        raise_for(precision_problem(self.precision, hidden=self.expert_hidden, ffn=self.ffn))
        if self.quantized_wire != "none" and (problem := wire_problem(self.precision)) is not None:
            raise ArgumentError(f"quantized_wire ({self.quantized_wire!r}): {problem}")
        if self.balance == "none":
            self._check_defaults(
                ("replicas_per_rank", "replica_slack"), "balance 'replicas', but balance is 'none'"
            )
        elif self.precision is not None:
            raise ArgumentError(
                f"balance ('replicas') must be 'none' with a precision ({self.precision})"
            )
        if self.replica_slack > 1:
            raise ArgumentError(f"replica_slack ({self.replica_slack}) must be at most 1")
        types = (RouterConfig, type(None))
        arguments.check_kind("router", self.router, types, "a RouterConfig, or None")
        router = self.router or RouterConfig()
        num_groups = router.num_expert_groups
        if self.num_experts % num_groups:
            raise ArgumentError(
                f"num_experts ({self.num_experts}) must be divisible by num_expert_groups ({num_groups})"
            )
        reachable = router.topk_groups * (self.num_experts // num_groups)
        for name, limit in (
            ("num_experts", self.num_experts),
            ("the experts in topk_groups groups", reachable),
        ):
            if self.top_k > limit:
                raise ArgumentError(f"top_k ({self.top_k}) must be at most {name} ({limit})")
        if self.capacity is None:
            self._check_defaults(_CAPACITY_FIELDS, "a static capacity, but capacity is None")
        elif self.max_row_budget is not None:
            raise ArgumentError(
                f"max_row_budget ({self.max_row_budget}) needs exact capacity, but capacity is {self.capacity}"
            )
        if (factor := self.capacity_factor) is None:
            self._check_defaults(("drop_policy",), "a capacity_factor, and it is None")
            return
        arguments.check_factor("capacity_factor", factor)
        # The plan counts the load of all ranks after the drops, which hides how overloaded an expert is.
        condition = f"with capacity_factor ({factor})"
        raise_for(
            first_problem(
                (not factor, f"capacity_factor ({factor}) must be more than 0"),
                (
                    router.expert_bias,
                    f"expert_bias (True) must be False {condition}: it would follow the load after the drops",
                ),
                (
                    router.aux_loss == "global",
                    f"aux_loss ('global') must be 'micro_batch' or 'sequence' {condition}",
                ),
            )
        )

    def _check_defaults(self, names: tuple[str, ...], requirement: str) -> None:
        """Raises an ArgumentError if one of these fields differs from its default: it needs the requirement."""
        for field in fields(self):
            if field.name in names and (value := getattr(self, field.name)) != field.default:
                raise ArgumentError(f"{field.name} ({value!r}) needs {requirement}")
