"""symmoe as an expert-parallel implementation that transformers itself shards and calls."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import pytest

pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("accelerate")

import torch
import torch.distributed as dist
import transformers
from hf_cases import BOUND, WRONG, batch_of, error, mean_gradients, random_model
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
from worker import open_heap

from symmoe.errors import ArgumentError
from symmoe.integrations.transformers import StepConfig, register


@functools.cache  # meshes are process groups: one per rank's process
def new_groups(ranks: tuple[tuple[int, ...], ...]) -> list[dist.ProcessGroup]:
    return [dist.new_group(list(group)) for group in ranks]


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Whole gradients by name. Collective."""
    return {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for name, p in model.named_parameters()
    }


def loaded(folder: str, implementation: str, ep_size: int):
    config = DistributedConfig(fsdp_size=dist.get_world_size(), ep_size=ep_size, ep_implementation=implementation)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=config, attn_implementation="eager"
    )


def train(rank: int, num_ranks: int, folder: str, ep_size: int, target: str | None) -> dict[str, float]:
    """Worst errors of the loss and of all gradients, against the unmodified model and transformers' all_to_all."""
    batches = [batch_of(r) for r in range(num_ranks)]
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    want, seen = mean_gradients(reference, batches)

    groups = new_groups(tuple(tuple(range(i, i + ep_size)) for i in range(0, num_ranks, ep_size)))
    found = {}
    with open_heap("cpu", group=groups[rank // ep_size]) as heap:
        register(heap, step=StepConfig(stash="rows"))
        for implementation in ("symmoe", "all_to_all"):
            before = heap.high_water_bytes
            model = loaded(folder, implementation, ep_size)
            loss = model(batches[rank], labels=batches[rank]).loss
            loss.backward()
            got = gradients(model)
            assert got.keys() == want.keys()
            found[f"{implementation} loss"] = error(loss.detach(), seen[rank][0])
            found[implementation] = max(error(got[name], want[name]) for name in want)
            found[f"{implementation} uses the heap"] = float(heap.high_water_bytes > before)
            if implementation == "symmoe" and target is not None:
                model.save_pretrained(target)
    wrong = {name: grad.flip(0) if ".experts." in name else grad for name, grad in got.items()}
    found["control"] = max(error(wrong[name], want[name]) for name in want)
    return found


@pytest.mark.parametrize(
    ("family", "num_ranks", "ep_size"),
    [("qwen3_moe", 2, 2), ("gpt_oss", 2, 2), ("mixtral", 4, 2), ("deepseek_v3", 2, 2)],
)
def test_equals_the_unmodified_model(cluster, tmp_path: Path, family: str, num_ranks: int, ep_size: int):
    source, target = tmp_path / "source", tmp_path / "target"
    random_model(family).save_pretrained(source)
    for found in cluster(num_ranks).run(train, str(source), ep_size, str(target)):
        for name in ("symmoe", "symmoe loss", "all_to_all", "all_to_all loss"):
            assert found[name] < BOUND, found
        assert found["symmoe uses the heap"] == 1.0
        assert found["all_to_all uses the heap"] == 0.0
        assert found["control"] > WRONG
    name = "model.safetensors"
    assert (
        hashlib.sha256((source / name).read_bytes()).digest() == hashlib.sha256((target / name).read_bytes()).digest()
    )


def crowded(rank: int, num_ranks: int, folder: str) -> float:
    """All tokens go to the first rank: worst error of the gradients."""
    batches = [batch_of(r) for r in range(num_ranks)]
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    want, _ = mean_gradients(reference, batches)
    with open_heap("cpu") as heap:
        register(heap)
        model = loaded(folder, "symmoe", num_ranks)
        model(batches[rank], labels=batches[rank]).loss.backward()
        got = gradients(model)
    return max(error(got[name], gradient) for name, gradient in want.items())


def test_rank_without_tokens(cluster, tmp_path: Path):
    model = random_model("gpt_oss")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.router.bias[:2] += 100
    model.save_pretrained(tmp_path)
    assert max(cluster(2).run(crowded, str(tmp_path))) < BOUND


def refusals(rank: int, num_ranks: int, folder: str) -> None:
    alone = new_groups(((0,), (1,)))[rank]
    text = f"rank {rank} of 2 in the expert-parallel mesh, and rank 0 of 1 in the heap"
    with open_heap("cpu", group=alone) as heap:
        register(heap)
        with pytest.raises(ArgumentError, match=text):
            loaded(folder, "symmoe", num_ranks)


def test_heap_of_other_ranks_is_refused(cluster, tmp_path: Path):
    random_model("olmoe").save_pretrained(tmp_path)
    cluster(2).run(refusals, str(tmp_path))


def test_registers_a_subclass_and_only_when_asked(cluster):
    assert "symmoe" not in EPImplementationInterface()
    with open_heap("cpu") as heap:
        register(heap)
        try:
            assert issubclass(EPImplementationInterface()["symmoe"], EPImplementation)
        finally:
            del EPImplementationInterface._global_mapping["symmoe"]
