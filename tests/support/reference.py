"""Stacks of MoE layers over the tokens of all ranks in float64, with autograd for every gradient. No code of the
package: of its objects, parameters by name and fields of the configuration."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import oracle
import torch
import torch.distributed as dist
from activation_formula import SCORES
from torch.nn.functional import one_hot

Leaves = dict[str, torch.Tensor]  # parameters of one rank by name


@dataclass
class Expected:
    """Of one micro-batch, on this rank. aux, load (slots of each expert on all ranks), num_dropped: of each layer."""

    x: torch.Tensor  # whose gradient is the expected one
    y: torch.Tensor
    aux: list[torch.Tensor] = field(default_factory=list)
    load: list[torch.Tensor] = field(default_factory=list)
    num_dropped: list[int] = field(default_factory=list)


class Routed(NamedTuple):
    """A choice of experts, -1 for none."""

    ids: torch.Tensor  # [T, K]
    probs: torch.Tensor  # [T, K]
    chosen: torch.Tensor  # ids before a capacity factor drops slots
    scores: torch.Tensor  # [T, E]
    logits: torch.Tensor  # [T, E]


def expected_results(
    config, model: torch.nn.Module, calls: list[dict], scaling: float
) -> tuple[list[Expected], Leaves]:
    """Results of forward and backward of micro-batches on this rank: x + layer(x) for each of `model.layers`, and a
    loss that is the sum over all ranks of (y * dy).sum() and of the layers' aux_loss. Collective.

    Args:
        calls: x and dy, [B, S, H]; mask, bool [B, S], or None.
        scaling: of adapters.

    Returns:
        The expected results of each call, and gradients by the names of the model's parameters.
    """
    own_leaves = {name: as_double(tensor) for name, tensor in model.named_parameters()}
    own_calls = [{key: as_double(tensor) for key, tensor in call.items()} for call in calls]
    by_rank: list = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, (own_leaves, own_calls))
    leaves = [
        {name: tensor.requires_grad_() for name, tensor in tensors.items()}
        for tensors, _ in by_rank
    ]
    bias = [as_double(layer.router.expert_bias) for layer in model.layers]
    loss = torch.zeros((), dtype=torch.float64)
    results = []
    for turn in range(len(calls)):
        call_of_rank = [of_rank[turn] for _, of_rank in by_rank]
        ys = [call["x"].requires_grad_() for call in call_of_rank]
        result = Expected(ys[dist.get_rank()], ys[dist.get_rank()])
        masks = [call["mask"] for call in call_of_rank]
        for number in range(len(model.layers)):
            of_layer = [without_prefix(tensors, f"layers.{number}.") for tensors in leaves]
            outs, aux, load, num_dropped = moe_layer(
                config, of_layer, bias[number], ys, masks, scaling
            )
            ys = [y + out for y, out in zip(ys, outs, strict=True)]
            loss = loss + sum(aux)
            result.aux.append(aux[dist.get_rank()])
            result.load.append(load)
            result.num_dropped.append(num_dropped)
        result.y = ys[dist.get_rank()]
        loss = loss + sum((y * call["dy"]).sum() for y, call in zip(ys, call_of_rank, strict=True))
        results.append(result)
    loss.backward()
    return results, {name: leaf.grad for name, leaf in leaves[dist.get_rank()].items()}


def as_double(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A copy on the CPU, as float64 unless it is a mask."""
    if tensor is None or tensor.dtype == torch.bool:
        return None if tensor is None else tensor.cpu()
    return tensor.detach().cpu().double()


def without_prefix(leaves: Leaves, prefix: str) -> Leaves:
    """The leaves whose names begin with a prefix, by names without it."""
    return {
        name.removeprefix(prefix): leaf for name, leaf in leaves.items() if name.startswith(prefix)
    }


def moe_layer(
    config,
    leaves: list[Leaves],
    bias: torch.Tensor | None,
    xs: list[torch.Tensor],
    masks: list[torch.Tensor | None],
    scaling: float,
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor, int]:
    """The experts' part of y and aux_loss by rank, the load, and the slots that a static capacity drops."""
    routed = [
        route(config, x, params["router.weight"], bias, mask)
        for x, params, mask in zip(xs, leaves, masks, strict=True)
    ]
    load = sum(slots_of(config, of_rank.ids) for of_rank in routed)
    auxes = [
        aux_loss(config, x, mask, load, of_rank)
        for x, mask, of_rank in zip(xs, masks, routed, strict=True)
    ]
    layout = oracle.lay_out(
        [of_rank.ids.numpy() for of_rank in routed], config.num_experts, capacity=config.capacity
    )
    is_kept = torch.cat([torch.from_numpy(rows) >= 0 for rows in layout.slot_to_row])
    ids = torch.cat([of_rank.ids for of_rank in routed])
    probs = torch.cat([of_rank.probs for of_rank in routed])
    to_latent, from_latent = projections_of(leaves)
    tokens = torch.cat([(x @ w.T).flatten(0, -2) for x, w in zip(xs, to_latent, strict=True)])
    fc1, b1 = weights_of(leaves, "experts.fc1", scaling)
    fc2, b2 = weights_of(leaves, "experts.fc2", scaling)
    y = oracle.experts(tokens, ids.masked_fill(~is_kept, -1), probs, fc1, fc2, (b1, b2))
    by_rank = y.split([len(of_rank.ids) for of_rank in routed])
    outs = [(out @ w.T).view_as(x) for out, w, x in zip(by_rank, from_latent, xs, strict=True)]
    if "shared_expert.weight" in leaves[0]:
        outs = [
            out + x @ params["shared_expert.weight"].T + params["shared_expert.bias"]
            for out, x, params in zip(outs, xs, leaves, strict=True)
        ]
    return outs, auxes, load, layout.num_dropped


def projections_of(leaves: list[Leaves]) -> list[list[torch.Tensor]]:
    """By rank, the matrices around latent experts; the identity where there are none."""
    names = ("fc1_latent_proj.weight", "fc2_latent_proj.weight")
    identity = torch.eye(leaves[0]["router.weight"].shape[1], dtype=torch.float64)
    return [[params.get(name, identity) for params in leaves] for name in names]


def weights_of(
    leaves: list[Leaves], name: str, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """[E, O, C] and [E, O] of all experts, from packed or discrete parameters, with what adapters add."""
    weights, biases = [], []
    for params in leaves:
        discrete = [
            leaf for key, leaf in params.items() if key.removeprefix(f"{name}.weight").isdecimal()
        ]
        weight = torch.stack(discrete) if discrete else params[f"{name}.weight"]
        if f"{name}.lora_a" in params:
            weight = weight + scaling * params[f"{name}.lora_b"] @ params[f"{name}.lora_a"]
        weights.append(weight)
        biases.append(params.get(f"{name}.bias", torch.zeros_like(weight[..., 0])))
    return torch.cat(weights), torch.cat(biases)


def route(config, x, weight, bias, mask) -> Routed:
    """Of the tokens of x [B, S, H] on one rank."""
    tokens = x.flatten(0, -2)
    if mask is not None:
        tokens = tokens.masked_fill(~mask.view(-1, 1), 0)
    logits = tokens @ weight.T
    scores = SCORES[config.router.score](logits)
    worth = scores.detach() + (0 if bias is None else bias)
    by_group = worth.view(len(worth), config.router.num_expert_groups, -1)
    best = min(1 if config.router.score == "softmax" else 2, by_group.shape[-1])
    open_groups = by_group.topk(best).values.sum(-1).topk(config.router.topk_groups).indices
    is_open = one_hot(open_groups, config.router.num_expert_groups).sum(1).bool()
    chosen = (
        by_group.masked_fill(~is_open[..., None], -math.inf).flatten(1).topk(config.top_k).indices
    )
    probs = scores.gather(1, chosen)
    if config.router.renormalize:
        probs = probs / probs.sum(-1, keepdim=True)
    probs = probs * config.router.route_scale
    if mask is not None:
        chosen = chosen.masked_fill(~mask.view(-1, 1), -1)
    ids = chosen.clone()
    if config.capacity_factor is not None:
        expert_capacity = math.ceil(ids.numel() / config.num_experts * config.capacity_factor)
        for expert in range(config.num_experts):
            slots = (ids.flatten() == expert).nonzero().flatten()
            best_first = slots[probs.detach().flatten()[slots].argsort(descending=True)]
            ids.view(-1)[best_first[expert_capacity:]] = -1
    return Routed(ids, probs, chosen, scores, logits)


def slots_of(config, ids: torch.Tensor) -> torch.Tensor:
    """int64 [E], slots of each expert."""
    return torch.bincount(ids[ids >= 0].flatten(), minlength=config.num_experts)


def aux_loss(config, x, mask, load, routed: Routed) -> torch.Tensor:
    """The balance loss of the micro-batch, or of each sequence, and the z-loss, by their coefficients."""
    keeps = torch.ones(x.shape[:-1], dtype=torch.bool) if mask is None else mask
    shares = routed.scores / routed.scores.sum(-1, keepdim=True)
    slots = load if config.capacity_factor is None else slots_of(config, routed.chosen)
    parts = [(keeps.flatten(), slots)]  # tokens, and the slots of each expert
    if config.router.aux_loss == "sequence":
        sequence = torch.arange(len(keeps)).repeat_interleave(keeps.shape[1])
        tokens = [keeps.flatten() & (sequence == number) for number in range(len(keeps))]
        parts = [(mask, slots_of(config, routed.chosen[mask])) for mask in tokens]
    total = torch.zeros((), dtype=torch.float64)
    for tokens, slots in parts:
        fractions = slots / slots.sum().clamp_min(1)
        mean_shares = shares[tokens].sum(0) / tokens.sum().clamp_min(1)
        total = total + config.num_experts * (fractions * mean_shares).sum() / len(parts)
    z = routed.logits[keeps.flatten()].logsumexp(-1).square().sum() / keeps.sum().clamp_min(1)
    return config.router.aux_loss_coef * total + config.router.z_loss_coef * z
