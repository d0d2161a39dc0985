"""Tables of a step's launches. `python tests/support/step_table.py` prints the short one of docs/design/programs.md."""

import torch
from cluster import Cluster
from worker import open_heap

import symmoe
from symmoe.kernels.launches import Argument, Launch, Launches

_INTEGERS = ("topk_idx", "block_counts", "plan", "index", "report", "posted")  # that are shown
SIZES = {"hidden": 512, "ffn": 256, "num_experts": 8, "top_k": 2}


def recorded(rank: int, num_ranks: int, device: str = "cpu", **options) -> tuple[str, str]:
    """The table of a step of a small layer, as print() shows it, and in short."""
    torch.manual_seed(rank)
    with open_heap(device, num_bytes=64 << 20, programs="on") as heap:
        layer = symmoe.MoELayer(symmoe.MoEConfig(**SIZES, **options), heap)
        layer.experts.to(torch.bfloat16)
        x = torch.randn(64, SIZES["hidden"], dtype=torch.bfloat16, device=heap.device)
        for _ in range(3):  # the first calls have no program
            with symmoe.timeline.record_launches() as launches:
                layer(x.requires_grad_())[0].sum().backward()
        return str(launches), short(launches)


def short(launches: Launches) -> str:
    lines = []
    for program in launches.programs:
        lines += [program.name, *map(_line, program.launches)]
    return "\n".join(f"    {line}" for line in lines)


def _line(launch: Launch) -> str:
    reads, writes = (_names([*filter(_is_shown, uses)]) for uses in (launch.reads, launch.writes))
    ways = f"{reads} -> {writes}".removeprefix(" -> ")
    waits = f"; waits for {launch.waits_for}" * bool(launch.waits_for)
    if launch.kernel == "barrier":  # what it reads is what it publishes
        ways, waits = launch.waits_for, f"; tells them of {reads}" * bool(reads)
    return f"  {launch.kernel:21}{ways}{waits}{'; on a branch' * bool(launch.stream)}"


def _is_shown(use: Argument) -> bool:
    """No index of integers, and nothing that only failures write."""
    is_number = use.dtype is None or use.dtype.is_floating_point or use.name in _INTEGERS
    return (is_number or "lease" in use.place) and use.name != "nan_on_failure"


def _names(uses: list[Argument]) -> str:
    return ", ".join(dict.fromkeys(_name(use).replace("lease ", "") for use in uses))


def _name(use: Argument) -> str:
    return use.place if "lease" in use.place or use.name == "peers" else use.name


if __name__ == "__main__":
    with Cluster(2) as cluster:
        print(cluster.run(recorded)[0][1])
