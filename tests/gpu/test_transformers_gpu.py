"""transformers models with expert-parallel experts on GPUs, and the example that fine-tunes one."""

import copy
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import run_on

pytest.importorskip("transformers", minversion="5.17")

import torch
import torch.distributed as dist
from worker import open_heap

from symmoe.integrations.transformers import ExpertParallelExperts, swap_moe

ROOT = Path(__file__).resolve().parents[2]

from hf_cases import FAMILIES, error, random_model  # noqa: E402

BOUND = 0.03  # of bf16, relative to the largest entry


@pytest.mark.parametrize("family", FAMILIES)
@run_on(1, 2, device="cuda")
def test_block_equals_the_unmodified_one(rank: int, num_ranks: int, family: str) -> None:
    """One block's output and this rank's gradient of its down projection, in bf16."""
    device = torch.device("cuda", rank)
    model = random_model(family, dtype=torch.bfloat16).to(device)
    reference = copy.deepcopy(model.model.layers[-1].mlp)
    inputs = [
        torch.randn(1, 40 + 8 * r, 32, generator=torch.Generator().manual_seed(r))
        for r in range(num_ranks)
    ]
    inputs = [x.to(device, torch.bfloat16) for x in inputs]
    with open_heap("cuda") as heap:
        block = swap_moe(model, heap).model.layers[-1].mlp
        first = block(inputs[rank])
        y = first[0] if isinstance(first, tuple) else first
        y.float().square().sum().backward()
        got = next(
            m for m in block.modules() if isinstance(m, ExpertParallelExperts)
        ).mlp.fc2.weight.grad
        outputs = [reference(x) for x in inputs]
        outputs = [out[0] if isinstance(out, tuple) else out for out in outputs]
        sum(out.float().square().sum() for out in outputs).backward()
        want = reference.experts.down_proj.grad
        want = want.transpose(1, 2) if family == "gpt_oss" else want
        dist.barrier()
        assert error(y.detach().float(), outputs[rank].detach().float()) < BOUND
        assert error(got.float(), want.float().chunk(num_ranks)[rank]) < BOUND


def test_example_learns_on_gpus(tmp_path: Path):
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={min(2, torch.cuda.device_count())}",
    ]
    command = [
        sys.executable,
        *launcher,
        str(ROOT / "examples" / "finetune_transformers.py"),
        "--out",
        str(tmp_path / "out"),
        "--steps",
        "20",
    ]
    process = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    losses = [float(loss) for loss in re.findall(r"step +\d+  loss (\d+\.\d+)", process.stdout)]
    assert losses[-1] < losses[0] - 1
    actual, expected = re.search(
        r"held-out loss (\S+); of .* in plain transformers (\S+)", process.stdout
    ).groups()
    assert float(expected) == pytest.approx(float(actual), abs=0.02)
