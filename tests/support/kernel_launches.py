"""Calls of the kernels in the working dtype on meta tensors, the way the layer makes them: see catch_launches."""

import torch
from compiled_launches import meta

from symmoe.kernels import control
from symmoe.kernels.activation import Activation
from symmoe.kernels.hopper import act as hopper_act
from symmoe.kernels.hopper import gemm as hopper_gemm
from symmoe.kernels.hopper import wgrad as hopper_wgrad
from symmoe.kernels.operands import TensorTable
from symmoe.kernels.triton import activation as gpu_activation
from symmoe.kernels.triton import (
    bias,
    gemm,
    gemm_act,
    nodes,
    plan,
    replicas,
    route,
    router_products,
    sync,
    tokens,
)

BF16, FP16, FP32, INT64 = torch.bfloat16, torch.float16, torch.float32, torch.int64
NUM_SMS = 132
SHAPES = {  # G, H, I, N
    "qwen3-30b": (32, 2048, 768, 65536),
    "mixtral-8x7b": (4, 4096, 14336, 16384),
    "deepseek-like": (32, 7168, 2048, 65536),
    "odd": (3, 1032, 712, 999),  # widths that no tile divides, contractions that no step divides
    "narrow": (65, 136, 72, 999),
    "narrower": (65, 136, 36, 999),
}


def _forms(function, *forms):
    return [(function, dict.fromkeys(form.split(), True)) for form in forms]


GEMMS = [
    *_forms(
        "gemm",
        "",
        "gather",
        "biased",
        "gather biased",
        "table",
        "gather table biased",
        "accumulate",
    ),
    *_forms("gemm", "gather biased accumulate"),
    *_forms("dgrad", "", "table", "gather", "accumulate"),
    *_forms("wgrad", "", "gather", "accumulate", "gather accumulate"),
    ("wgrad", {"accumulate": True, "out_dtype": FP32}),
    ("wgrad", {"gather": True, "accumulate": True, "out_dtype": FP32, "table": True}),
    ("wgrad", {"out_dtype": FP32, "table": True}),
]
ACTIVATIONS = {
    "swiglu": Activation(),
    "gpt-oss": Activation(alpha=1.702, limit=7.0, offset=1.0),
    "interleave": Activation(interleave=32),
    "srelu": Activation(function="relu2", is_gated=False),
    "gelu": Activation(function="gelu", is_gated=False),
    "geglu": Activation(function="gelu"),
    "tanh geglu": Activation(function="gelu_tanh"),
}
LAYOUTS = ("gather", "contiguous", "table", "biased")
ROUTERS = {  # T, E, H
    "qwen3-30b": (8192, 128, 2048),
    "mixtral-8x7b": (8192, 8, 4096),
    "deepseek-like": (8192, 64, 7168),
    "deepseek-v3": (8192, 256, 7168),
    "odd": (100, 20, 1000),
}
TRIPS = {  # T, H, E, K, R
    "qwen3-30b": (8192, 2048, 128, 8, 4),
    "deepseek-v3": (4096, 7168, 256, 8, 8),
    "qwen3-30b, two ranks": (8192, 2048, 128, 8, 2),
    "odd": (100, 1000, 12, 3, 3),
    "largest": (33, 512, 1024, 32, 64),
    "most experts per rank": (64, 512, 1024, 1, 1),
}


def sizes_of(shape):
    """G, H, I, N of a name, or as they are given."""
    return SHAPES.get(shape, shape)


def matrices(*shape, dtype, table=False):
    """Weights, packed or anywhere in memory."""
    return (
        TensorTable(meta(shape[0], dtype=INT64), shape, dtype)
        if table
        else meta(*shape, dtype=dtype)
    )


def launch_gemm(
    function,
    shape,
    dtype,
    *,
    gather=False,
    table=False,
    biased=False,
    accumulate=False,
    out_dtype=None,
):
    """A GEMM of the first expert layer, [2I, H] weights."""
    G, H, I, N = sizes_of(shape)
    W, rows_N = 2 * I, N // 2 if gather else N
    row_range, index = meta(2, G), meta(N) if gather else None
    x, h = meta(rows_N, H, dtype=dtype), meta(N, W, dtype=dtype)
    options = {"accumulate": accumulate, "num_sms": NUM_SMS}
    if function == "gemm":
        biases = {"bias": (meta(G, W, dtype=dtype), meta(N, dtype=FP32)), "zero_tail": True}
        options |= biases if biased else {}
        gemm.grouped_gemm(
            (x, index), matrices(G, W, H, dtype=dtype, table=table), row_range, h, **options
        )
    elif function == "dgrad":
        dout, out = (meta(rows_N, W, dtype=dtype), meta(N, H, dtype=dtype)) if gather else (h, x)
        weight = matrices(G, W, H, dtype=dtype, table=table)
        gemm.grouped_gemm_dgrad((dout, index), weight, row_range, out, zero_tail=True, **options)
    else:
        out = matrices(G, W, H, dtype=out_dtype or dtype, table=table)
        gemm.grouped_gemm_wgrad(h, (x, index), row_range, out, **options)


def launch_activations(shape, activation, dtype=BF16, layout="gather"):
    """Both GEMMs that are fused with an activation, and the activation by itself, forward and backward."""
    G, H, I, N = sizes_of(shape)
    W, table = activation.hidden_width(I), layout == "table"
    gather = layout != "contiguous"
    index = meta(N) if gather else None
    x, h, a = (
        meta(N // 2 if gather else N, H, dtype=dtype),
        meta(N, W, dtype=dtype),
        meta(N, I, dtype=dtype),
    )
    row_range, scale = meta(2, G), meta(N, dtype=FP32)
    bias = meta(G, W, dtype=dtype) if layout == "biased" else None
    w1, w2 = (
        matrices(G, W, H, dtype=dtype, table=table),
        matrices(G, H, I, dtype=dtype, table=table),
    )
    gemm_act.grouped_gemm_act(
        (x, index), w1, row_range, scale, (h, a), activation, bias=bias, num_sms=NUM_SMS
    )
    workspace = meta(gemm_act.dact_workspace_numel(N, G, I, activation), dtype=FP32)
    arguments = row_range, (h, scale), (h, a, scale, bias), workspace, activation
    gemm_act.grouped_gemm_dact((x, index), w2, *arguments, num_sms=NUM_SMS)
    gpu_activation.scaled_activation(h, scale, a, activation)
    gpu_activation.scaled_activation_grad(a, h, scale, h, scale, activation)


def launch_hopper_gemm(shape, dtype, k_first):
    """The second GEMM of the experts, or its input gradient."""
    G, H, I, N = sizes_of(shape)
    narrow, wide = meta(N, I, dtype=dtype), meta(N, H, dtype=dtype)
    rows, out = (wide, narrow) if k_first else (narrow, wide)
    options = {"weight_k_first": k_first, "zero_tail": True, "num_sms": NUM_SMS}
    hopper_gemm.launch_gemm(rows, meta(G, H, I, dtype=dtype), meta(2, G), out, **options)


def launch_hopper_act(shape, activation, dtype, variant):
    G, H, I, N = sizes_of(shape)
    h, a, scale = meta(N, 2 * I, dtype=dtype), meta(N, I, dtype=dtype), meta(N, dtype=FP32)
    operands = meta(N, H, dtype=dtype), meta(G, 2 * I, H, dtype=dtype), meta(2, G), scale
    hopper_act.launch_act(*operands, (h, a), activation, variant=variant, num_sms=NUM_SMS)


def launch_hopper_dact(shape, activation, dtype, variant, gather=False):
    G, H, I, N = sizes_of(shape)
    h, a, scale = (
        meta(N, activation.hidden_width(I), dtype=dtype),
        meta(N, I, dtype=dtype),
        meta(N, dtype=FP32),
    )
    rows = meta(N // 2 if gather else N, H, dtype=dtype), meta(N) if gather else None
    operands = rows, meta(G, H, I, dtype=dtype), meta(2, G), (h, scale), (h, a, scale)
    hopper_act.launch_dact(*operands, activation, num_sms=NUM_SMS, variant=variant)


def launch_hopper_wgrad(shape, dtype, fc):
    G, H, I, N = sizes_of(shape)
    out_rows, columns = (2 * I, H) if fc == 1 else (H, I)
    operands = meta(N, out_rows, dtype=dtype), meta(N, columns, dtype=dtype), meta(2, G)
    hopper_wgrad.launch_wgrad(*operands, meta(G, out_rows, columns, dtype=dtype), num_sms=NUM_SMS)


def launch_bias_gradients(dtype, gather, shape="qwen3-30b"):
    G, _, I, N = sizes_of(shape)
    dout, biases, row_range = meta(N, 2 * I, dtype=dtype), meta(G, 2 * I, dtype=dtype), meta(2, G)
    index, scale = meta(N) if gather else None, meta(N, dtype=FP32)
    bias.grouped_bias_grad((dout, index), row_range, biases, scale=scale)
    bias.grouped_bias_dot((dout, index), biases, row_range, scale, accumulate=True)


def launch_zeros(dtype):
    """The gradient of no rows, in matrices of a table."""
    G, H, I, _ = SHAPES["odd"]
    out = matrices(G, 2 * I, H, dtype=dtype, table=True)
    gemm.grouped_gemm_wgrad(meta(0, 2 * I, dtype=dtype), meta(0, H, dtype=dtype), meta(2, G), out)


def launch_splits(num_groups, dtype):
    plan.splits_to_row_range(meta(num_groups, dtype=dtype), meta(2, num_groups), 12345)


def launch_router(shape):
    num_tokens, num_experts, width = ROUTERS[shape]
    x, weight = meta(num_tokens, width, dtype=BF16), meta(num_experts, width, dtype=FP32)
    logits = meta(num_tokens, num_experts, dtype=FP32)
    router_products.router_gemm(x, weight, logits)
    router_products.router_gemm_grads(
        logits, x, weight, torch.empty_like(x), torch.empty_like(weight)
    )


def launch_choice(num_experts, top_k, rule, num_ranks=0):
    counts = (
        meta(8192 // control.TOKENS_PER_BLOCK, num_experts + num_ranks + 2) if num_ranks else None
    )
    logits, probs, topk_idx = (
        meta(8192, num_experts, dtype=FP32),
        meta(8192, top_k, dtype=FP32),
        meta(8192, top_k),
    )
    route.choose_experts(
        logits, logits[0], None, topk_idx, probs, logits, rule=rule, block_counts=counts
    )
    route.choose_experts_grad(probs, logits, topk_idx, logits, logits, rule=rule)


def launch_losses(num_experts, score):
    logits, load = meta(8192, num_experts, dtype=FP32), meta(num_experts)
    mask, loss = meta(8192, dtype=torch.bool), meta(dtype=FP32)
    sums = meta(8192 // control.TOKENS_PER_LOSS_BLOCK, num_experts + 2, dtype=FP32)
    slopes, options = meta(num_experts + 1, dtype=FP32), {"normalises": score != "softmax"}
    given = logits, logits, load, mask, sums, slopes, loss
    route.router_losses(*given, balance_coef=0.1, z_coef=0.1, **options)
    route.router_losses_grad(loss, logits, logits, mask, slopes, logits, logits, **options)


def peers_of(num_ranks, rank, arena_bytes=1 << 30):
    arena = torch.empty(arena_bytes, dtype=torch.uint8, device="meta")
    bases, layout = meta(num_ranks, dtype=INT64), control.ControlLayout(num_ranks)
    return control.Peers(
        rank=rank, num_ranks=num_ranks, bases=bases, views=(arena,) * num_ranks, layout=layout
    )


def launch_barrier(num_ranks):
    peers, received = (
        peers_of(num_ranks, num_ranks - 1),
        meta(num_ranks, control.NUM_PUBLISHED, dtype=INT64),
    )
    status = torch.zeros(control.STATUS_WORDS, dtype=INT64)
    sync.barrier(
        peers,
        tuple(range(control.NUM_PUBLISHED)),
        received,
        status,
        call=1,
        fault=False,
        timeout_ns=10**9,
    )


def launch_signals():
    peers, status = peers_of(4, 3), torch.zeros(control.STATUS_WORDS, dtype=INT64)
    sync.send_signal(peers, 3)
    sync.wait_for_signal(peers, 3, torch.zeros(1, dtype=INT64), status, phase=3, timeout_ns=10**9)


def launch_plan(shape, id_dtype=torch.int32, drop=False, num_replica_slots=0):
    """Every kernel of a plan, with places for replicas that of the copies."""
    num_tokens, _, num_experts, top_k, num_ranks = TRIPS[shape]
    num_blocks = -(-num_tokens // control.TOKENS_PER_BLOCK)
    peers, received = (
        peers_of(num_ranks, num_ranks - 1),
        meta(num_ranks, control.NUM_PUBLISHED, dtype=INT64),
    )
    topk_idx = meta(num_tokens, top_k, dtype=id_dtype)
    numel, layout = control.plan_layout(
        num_tokens, top_k, num_experts, num_ranks, num_replica_slots
    )
    if num_replica_slots:
        counts = meta(num_blocks, num_experts + num_ranks + 2)
        integers = control.PlanIntegers(meta(numel), layout)
        replicas.place_replicas(peers, integers, slack=50, num_near=num_ranks)
        starts, num_experts = counts, num_experts + num_ranks * num_replica_slots
        replicas.route_to_replicas(
            topk_idx, starts, integers, meta(num_blocks, num_experts + num_ranks + 2)
        )
        topk_idx = integers.slot_to_copy
    counts = meta(num_blocks, num_experts + num_ranks + 2)
    integers, status = (
        control.PlanIntegers(meta(numel), layout),
        torch.zeros(control.STATUS_WORDS, dtype=INT64),
    )
    plan.count_slots(topk_idx, counts, num_experts=num_experts, num_ranks=num_ranks)
    plan.send_counts(
        counts, topk_idx, tuple(range(control.HEADER_WORDS)), peers, num_experts=num_experts
    )
    overflow = control.OVERFLOW_DROP if drop else control.OVERFLOW_REPEAT
    options = {"capacity": 1000, "overflow": overflow, "ranks": range(num_ranks)}
    plan.lay_out(peers, received, status, integers, **options)
    plan.assign_rows(topk_idx, counts, integers, drop=drop)


def launch_replicas(dtype, table):
    """What moves weights of replicas, and their gradients."""
    peers, received = peers_of(4, 3), meta(4, control.NUM_PUBLISHED, dtype=INT64)
    places, shapes = (meta(4, 2), meta(32, 4)), ((8, 1032, 712), (8, 712, 516))
    pair = tuple(matrices(*shape, dtype=dtype, table=table) for shape in shapes)
    replicas.push_replicas(pair, places[0], peers, received, column=3, starts=(512, 4096))
    replicas.add_from_replicas(pair, places, peers, received, column=0, starts=(0, 4096))


def launch_between_nodes(shape, num_nodes):
    """Every kernel of a plan between nodes, and those of an exchange."""
    num_tokens, _, num_experts, top_k, num_ranks = TRIPS[shape]
    per_node, num_sent = num_ranks // num_nodes, 8 * (num_nodes - 1)
    of_ranks = (num_ranks + 1,), (num_nodes, per_node), (num_ranks - per_node,), (num_ranks + 1,)
    to_node, by_node, other_ranks, first_with = (meta(*shape, dtype=INT64) for shape in of_ranks)
    maps = control.RankMaps(
        1,
        per_node,
        to_node,
        meta(num_nodes * (num_ranks + 1)),
        by_node,
        by_node[0],
        other_ranks,
        first_with,
    )
    numbers, rows = meta(num_nodes + 2), meta(num_tokens, num_nodes)
    nodes.rail_rows(meta(num_tokens, top_k), maps, numbers, rows, num_experts=num_experts, most=8)
    peers, received = (
        peers_of(per_node, per_node - 1),
        meta(num_ranks, control.NUM_PUBLISHED, dtype=INT64),
    )
    nodes.tell_header(numbers, peers, 0, word=1)
    nodes.own_counts(by_node[0], peers, rows, rows)
    nodes.other_counts(rows, other_ranks, peers, received)
    numel, layout = control.plan_layout(num_tokens, top_k, num_experts, num_ranks)
    its = control.in_node_layout(
        num_tokens, top_k, num_experts // num_ranks, (num_nodes, per_node), num_sent, num_sent
    )
    plan_of = control.PlanIntegers(meta(numel), layout)
    nodes.plan_in_node(plan_of, rows, numbers, maps, control.InNodeIntegers(meta(its[0]), its[1]))
    nodes.take_rows(meta(num_tokens, 64, dtype=BF16), rows, meta(num_tokens, 64, dtype=BF16))
    posted = torch.zeros(control.REPORT_SLOTS, control.SUMMARY_WORDS, dtype=INT64)
    plan.post_report(meta(control.SUMMARY_WORDS), posted, plan=1)
    sync.count_exchange(meta(2, dtype=INT64), torch.zeros(2, dtype=INT64), which=1)
    sync.receive_fault_flags(meta(num_nodes, 5, dtype=INT64), meta(1, dtype=INT64))


def launch_rows(shape, dtype):
    """Every kernel that moves or sums rows; some launch nothing with one rank, or with one slot per token."""
    num_tokens, hidden, _, top_k, num_ranks = TRIPS[shape]
    peers, received = (
        peers_of(num_ranks, num_ranks - 1),
        meta(num_ranks, control.NUM_PUBLISHED, dtype=INT64),
    )
    x, rows = meta(num_tokens, hidden, dtype=dtype), meta(num_tokens * 2, hidden, dtype=dtype)
    per_token, slots, starts = (
        meta(num_tokens, num_ranks),
        meta(num_tokens, top_k),
        meta(num_ranks + 1),
    )
    tokens.push_rows(x, per_token, peers, received, column=0)
    tokens.place_rows(x, slots, slots, rows, received, rank=peers.rank)
    tokens.fan_out(rows, slots, starts, rank=peers.rank)
    tokens.push_sums(rows, slots, starts, peers, received, column=0)
    tokens.pull_rows(slots, slots, peers, received, x, column=0)
    index = per_token, meta(num_ranks), slots, slots
    tokens.sum_home((rows, rows), index, (received, received), x, rank=peers.rank)


def launch_slots(shape, with_probs):
    """Every kernel that moves slots or values."""
    num_tokens, _, _, top_k, num_ranks = TRIPS[shape]
    peers, received = (
        peers_of(num_ranks, num_ranks - 1),
        meta(num_ranks, control.NUM_PUBLISHED, dtype=INT64),
    )
    slots, one, rows = meta(num_tokens, top_k), meta(1), meta(num_tokens)
    values, row_values = meta(num_tokens, top_k, dtype=FP32), meta(num_tokens, dtype=FP32)
    probs, row_probs = (values, row_values) if with_probs else (None, None)
    per_token, per_rank = meta(num_tokens, num_ranks), meta(num_ranks)
    region = per_token, meta(1, num_ranks), per_rank, per_rank
    tokens.push_slots((slots, slots, probs), region, peers, received, row_column=1, prob_column=2)
    trip, index = (received, received), (slots, rows, row_probs)
    tokens.index_rows((slots, probs), (one, one), one, trip, index)
    tokens.gather_values(row_values, slots, one, values)
    tokens.pull_values(slots, per_token, peers, received, values, column=1)
