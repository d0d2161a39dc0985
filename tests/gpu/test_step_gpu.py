"""A whole training step of MoELayer on GPUs: what it launches, as a CUDA graph, on several streams, in two groups."""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cluster import run_on
from gpu_steps import HIDDEN, TOKENS, TOP_K, check_replays, config_for, layer_for, training_step
from heap_calls import expect, outcome
from layers import WAYS, layer_config
from suites.figures import MemoryMeter, StepTrace, trace_step
from suites.layer import Step
from worker import Findings, open_heap

from symmoe import MoELayer, SymmetricHeap, plan_memory
from symmoe.combine import trip
from symmoe.errors import CapacityError
from symmoe.moe import ep_step


# -- what a step takes ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options", [{}, {"layout": "expert-major"}, {"stash": "none"}, {"capacity": 40000}], ids=str
)
@run_on(1, device="cuda")
def test_the_peak_is_as_planned(
    rank: int, num_ranks: int, findings: Findings, options: dict[str, Any]
) -> None:
    config = layer_config(hidden=2048, ffn=768, num_experts=32, top_k=8, **options)
    # Memory that is filled would have leases of a program that do not overlap.
    with open_heap("cuda", num_bytes=1 << 30, fills="0") as heap:
        torch.use_deterministic_algorithms(False)  # which would fill every torch.empty
        layer = MoELayer(config, heap, dtype=torch.bfloat16)
        x, dy = torch.randn(2, 4096, 2048, dtype=torch.bfloat16, device="cuda")
        step = Step(
            "layer",
            lambda: layer(x)[0],
            (x.requires_grad_(), *layer.parameters()),
            dy,
            lambda *_: 0.0,
        )
        for _ in range(4):
            step.results()
        meter = MemoryMeter(heap.device, heap)
        _ = step.results()
        measured = sum(meter.peak().values())
    planned = plan_memory(config, num_ranks=num_ranks, num_tokens=len(x)).peak_bytes
    findings.check(abs(planned / measured - 1) < 0.1, f"planned {planned}, found {measured}")


# -- what a step launches ---------------------------------------------------------------------------------------------
def traced(
    rank: int, num_ranks: int, spoil: str = "", fields: dict[str, str] = WAYS[0]
) -> StepTrace:
    with open_heap("cuda", num_bytes=256 << 20) as heap:
        exact = {"capacity": None, "overflow": "raise"} if spoil == "exact" else {}
        step = training_step(layer_for(heap, config_for(num_ranks, **exact, **fields)), TOKENS)
        collection, dispatch = trip.CombineTrip, ep_step.dispatch
        if spoil in (
            "output",
            "input",
            "wait",
        ):  # a program would run what was built, whatever is patched
            heap._run = lambda key, function, inputs, **numbers: function()
        if spoil == "output":
            trip.CombineTrip = lambda rows, *args, **options: collection(
                rows.clone(), *args, **options
            )
        elif spoil == "input":
            ep_step.dispatch = lambda x, *args, **options: dispatch(x.clone(), *args, **options)
        elif spoil == "wait":
            wait = torch.cuda.synchronize
            ep_step.dispatch = lambda *args, **options: (wait(), dispatch(*args, **options))[1]
        try:
            torch.use_deterministic_algorithms(False)  # which would fill every torch.empty
            for _ in range(3):
                step()
            return trace_step(step, row_numel=TOKENS * TOP_K * HIDDEN)
        finally:
            trip.CombineTrip, ep_step.dispatch = collection, dispatch


@pytest.mark.parametrize("fields", WAYS, ids=str)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_step_copies_nothing_and_never_waits(cluster, num_ranks: int, fields: dict[str, str]):
    for trace in cluster(num_ranks, "cuda").run(traced, fields=fields):
        assert trace.findings == []
        launched = " ".join(trace.kernels)
        of_layout = "push_rows" if fields["layout"] == "packed" else "place_rows"
        for kernel in (
            "barrier",
            of_layout,
            "sum_home",
            "grouped_gemm",
            *["push_sums"] * (num_ranks > 1),
        ):
            assert kernel in launched
        assert ("wait_for_signal" in launched) == (
            num_ranks > 1 and fields["schedule"] == "always-overlapped"
        )


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_step_with_exact_capacity_copies_nothing_for_its_plan(cluster, num_ranks: int):
    """The device posts the plan's report in memory of the host, which looks there: CUDA neither copies nor waits."""
    for trace in cluster(num_ranks, "cuda").run(traced, "exact"):
        assert trace.waits == {}
        assert [name for name in trace.copies if name.startswith("Memcpy")] == []
        assert not trace.row_copies


@pytest.mark.parametrize(
    ("spoil", "finding"), [("output", "DtoD"), ("input", "DtoD"), ("wait", "cudaDeviceSynchronize")]
)
def test_what_the_trace_must_find(cluster, spoil: str, finding: str):
    (trace,) = cluster(1, "cuda").run(traced, spoil)
    assert any(finding in text for text in trace.findings), trace.findings


# -- CUDA graphs ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("stash", "fields"), [("all", WAYS[0]), ("none", WAYS[0]), ("all", WAYS[3]), ("none", WAYS[2])]
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_replays_equal_eager_steps(cluster, num_ranks: int, stash: str, fields: dict[str, str]):
    assert cluster(num_ranks, "cuda").findings(check_replays, 101, stash, True, fields) == []


@pytest.mark.parametrize("fields", [WAYS[0], WAYS[2]], ids=str)
def test_a_thousand_replays(cluster, fields: dict[str, str]):
    assert (
        cluster(2, "cuda").findings(check_replays, 1000, "all", False, fields, timeout_s=240.0)
        == []
    )


@run_on(1, 2, device="cuda")
def test_what_a_graph_cannot_hold(rank: int, num_ranks: int, findings: Findings) -> None:
    """What a graph cannot hold raises while it is captured, with the reason; the next step is right."""
    with open_heap("cuda", num_bytes=256 << 20) as heap:
        exact = layer_for(heap, config_for(num_ranks, capacity=None, overflow="raise"))
        x = torch.randn(TOKENS, HIDDEN, device=heap.device, dtype=torch.bfloat16)
        before = exact(x)[0]
        heap.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            error = outcome(exact, x)
        expect(findings, error, "ArgumentError", "capacity (None)", "CUDA graph")
        del graph
        heap.release_graphs()
        findings.check(torch.equal(exact(x)[0], before), "the next call differs")


@run_on(1, 2, device="cuda")
def test_overflow_in_graphs(rank: int, num_ranks: int, findings: Findings) -> None:
    """An overflow during a replay is raised at the next check; what was computed stays inside its buffers."""
    with open_heap("cuda", num_bytes=256 << 20) as heap:
        torch.use_deterministic_algorithms(False)
        config = config_for(
            num_ranks,
            capacity=TOKENS * TOP_K + 64,
            overflow="raise",
            aux_loss_coef=0.0,
            z_loss_coef=0.0,
        )
        layer = layer_for(heap, config)
        x = torch.zeros(TOKENS, HIDDEN, device=heap.device, dtype=torch.bfloat16)
        few = torch.randn_like(x)
        # Every token the same: all go to the same experts, which lie on one rank or two.
        many = few[:1].expand_as(few)
        with torch.no_grad():
            layer.router.weight.copy_(torch.randn_like(layer.router.weight))
            x.copy_(few)
            graph = torch.cuda.CUDAGraph()
            for _ in range(2):
                with contextlib.suppress(CapacityError):
                    layer(x)
                    heap.synchronize()
            with torch.cuda.graph(graph):
                _, metrics = layer(x)
            raised = []
            for tokens in (many, few, many, few):
                x.copy_(tokens)
                graph.replay()
                raised.append(outcome(heap.synchronize)[0])
                per_rank = metrics.expert_load.cpu().view(num_ranks, -1).sum(1)
                findings.equal(
                    "raised",
                    raised[-1],
                    "CapacityError" if int(per_rank.max()) > config.capacity else "",
                )
        findings.check(num_ranks == 1 or raised[0], "nothing overflowed")
        del graph
        heap.release_graphs()


# -- several streams, several groups ----------------------------------------------------------------------------------
@pytest.mark.parametrize(("num_ranks", "fields"), [(1, WAYS[0]), (2, WAYS[0]), (2, WAYS[2])])
@run_on(device="cuda", timeout_s=240.0)
def test_micro_batches_on_two_streams(
    rank: int, num_ranks: int, findings: Findings, fields: dict[str, str]
) -> None:
    """Four micro-batches in flight, in turn on two streams, against one after the other on one."""
    with open_heap("cuda", num_bytes=512 << 20) as heap:
        torch.use_deterministic_algorithms(False)
        layer = layer_for(heap, config_for(num_ranks, **fields))
        streams = [torch.cuda.Stream() for _ in range(2)]
        generator = torch.Generator(heap.device).manual_seed(rank)
        batches = [
            torch.randn(TOKENS, HIDDEN, generator=generator, device=heap.device).bfloat16()
            for _ in range(4)
        ]

        def forward(turn: int) -> tuple[torch.Tensor, torch.Tensor]:
            x = batches[turn].clone().requires_grad_()
            return x, layer(x)[0]

        want = []
        for turn in range(4):
            x, y = forward(turn)
            y.float().square().sum().backward()
            want.append((y.detach().clone(), x.grad.clone()))
        layer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        for step in range(500):
            flying = []
            for turn in range(4):
                with torch.cuda.stream(streams[turn % 2]):
                    flying.append(forward(turn))
            for turn in (0, 1, 2, 3) if step % 2 else (3, 2, 1, 0):
                with torch.cuda.stream(streams[turn % 2]):
                    x, y = flying[turn]
                    y.float().square().sum().backward()
            if step % 20 == 0 or step == 499:
                torch.cuda.synchronize()
                for turn, (x, y) in enumerate(flying):
                    findings.check(
                        torch.equal(y, want[turn][0]),
                        f"step {step}: y of micro-batch {turn} differs",
                    )
                    findings.check(
                        torch.equal(x.grad, want[turn][1]),
                        f"step {step}: dx of micro-batch {turn} differs",
                    )
            if findings.texts:
                break
            del flying, x, y
            layer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        findings.equal("leased bytes", heap.leased_bytes, 0)


@run_on(2, 4, 8, device="cuda")
def test_disjoint_groups(rank: int, num_ranks: int, findings: Findings) -> None:
    """Disjoint EP groups work at once, at their own pace."""
    size = num_ranks // 2
    groups = [
        dist.new_group(list(range(start, start + size))) for start in range(0, num_ranks, size)
    ]
    with SymmetricHeap(groups[rank // size], num_bytes=256 << 20) as heap:
        layer, results = layer_for(heap, config_for(size)), []
        for turn in range(30 + 10 * (rank // size)):  # the groups take different numbers of steps
            torch.manual_seed(1000 * (turn % 10) + heap.rank)
            x = torch.randn(TOKENS, HIDDEN, device=heap.device).bfloat16().requires_grad_()
            y, _ = layer(x)
            y.float().square().sum().backward()
            results.append((y.detach(), x.grad))
        for turn, (y, dx) in enumerate(results):
            findings.check(torch.equal(y, results[turn % 10][0]), f"y of step {turn} differs")
            findings.check(torch.equal(dx, results[turn % 10][1]), f"dx of step {turn} differs")
        total = torch.stack([y.float().abs().sum() for y, _ in results[:10]]).cpu()
    everywhere = [torch.zeros_like(total) for _ in range(num_ranks)]
    dist.all_gather(everywhere, total)
    for peer in range(rank % size, num_ranks, size):
        findings.check(
            torch.equal(everywhere[peer], total),
            f"rank {peer} of another group has other results",
        )
    for group in groups:
        dist.destroy_process_group(group)
