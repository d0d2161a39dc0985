"""A rank that compiles every kernel, beside one that finds all of them in Triton's cache."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TIMEOUT_S = 1.0  # less than any rank needs to compile the kernels of a step

RANK = """
import os, sys, time, torch, torch.distributed as dist, symmoe
rank, store, timeout_s = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
torch.cuda.set_device(rank)
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
longest_s = 0.0
with symmoe.SymmetricHeap(num_bytes=64 << 20, backend="nvshmem", timeout_s=timeout_s) as heap:
    def train(num_steps, **options):
        global longest_s
        config = layer_config(hidden=512, num_experts=8, top_k=2, **options)
        layer = symmoe.MoELayer(config, heap, dtype=torch.bfloat16, device=heap.device)
        for _ in range(num_steps):
            start = time.monotonic()
            x = torch.randn(300, 512, device=heap.device, dtype=torch.bfloat16, requires_grad=True)
            y, _ = layer(x)
            y.float().square().mean().backward()
            launched_s = time.monotonic() - start  # the host waits for peers in one small read
            heap.synchronize()
            assert y.isfinite().all() and x.grad.isfinite().all()
            longest_s = max(longest_s, launched_s)
    train(3, ffn=256)
    train(3, ffn=384)  # other widths, much later
    train(3, ffn=256, order="slot", stash="none", layout="expert-major")
    train(3, ffn=256, capacity=2048, schedule="overlapped")
print(f"{longest_s:.3f}")
"""


def run_ranks(folder: Path, name: str, caches: list[Path]) -> list[float]:
    """The longest step of every rank, in seconds."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(folder / name), str(TIMEOUT_S)],
            env={**os.environ, "TRITON_CACHE_DIR": str(cache)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, cache in enumerate(caches)
    ]
    try:
        outputs = [process.communicate(timeout=280) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], outputs
    return [float(out.split()[-1]) for out, _ in outputs]


def test_a_rank_that_compiles_while_the_other_waits(tmp_path: Path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA GPUs")
    warm = tmp_path / "warm"
    run_ranks(tmp_path, "both are cold", [warm, warm])
    for cold_rank in range(2):
        caches = [
            tmp_path / f"cold-{cold_rank}" if rank == cold_rank else warm for rank in range(2)
        ]
        longest = run_ranks(tmp_path, f"rank {cold_rank} is cold", caches)
        assert longest[cold_rank] > TIMEOUT_S  # else this shows nothing
