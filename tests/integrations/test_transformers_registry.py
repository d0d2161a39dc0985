"""symmoe as an expert-parallel implementation for models that transformers shards."""

import filecmp
import functools
from pathlib import Path

import pytest

pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("accelerate")

import torch.distributed as dist
import transformers
from hf_cases import BOUND, batch_of, error, mean_gradients, random_model
from small_model import whole_gradients
from transformers.distributed import DistributedConfig
from worker import open_heap

from symmoe.errors import ArgumentError
from symmoe.integrations.transformers import StepConfig, register


@functools.cache  # meshes are process groups: one per rank's process
def new_groups(ranks: tuple[tuple[int, ...], ...]) -> list[dist.ProcessGroup]:
    return [dist.new_group(list(group)) for group in ranks]


def loaded(folder: str, implementation: str, ep_size: int):
    config = DistributedConfig(
        fsdp_size=dist.get_world_size(), ep_size=ep_size, ep_implementation=implementation
    )
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=config, attn_implementation="eager"
    )


def train(
    rank: int, num_ranks: int, folder: str, ep_size: int, names: tuple[str, ...], target: str = ""
) -> None:
    """Checks that loss and all gradients of these implementations are those of the unmodified model; saves the last
    model."""
    batches = [batch_of(r) for r in range(num_ranks)]
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager"
    )
    want, outputs = mean_gradients(reference, batches)
    groups = new_groups(tuple(tuple(range(i, i + ep_size)) for i in range(0, num_ranks, ep_size)))
    with open_heap("cpu", group=groups[rank // ep_size]) as heap:
        register(heap, step=StepConfig(stash="rows"))
        for name in names:
            before = heap.high_water_bytes
            model = loaded(folder, name, ep_size)
            loss = model(batches[rank], labels=batches[rank]).loss
            loss.backward()
            got = whole_gradients(model)
            assert got.keys() == want.keys()
            assert error(loss.detach(), outputs[rank][0]) < BOUND, name
            assert max(error(got[key], want[key]) for key in want) < BOUND, name
            assert (heap.high_water_bytes > before) == (name == "symmoe")
        if target:
            model.save_pretrained(target)


@pytest.mark.parametrize(
    ("family", "num_ranks", "bias"),
    [
        ("qwen3_moe", 2, 0),
        ("gpt_oss", 2, 0),
        ("gpt_oss", 2, 100),
        ("mixtral", 4, 0),
        pytest.param("deepseek_v3", 2, 0, marks=pytest.mark.slow),
    ],
)
def test_equals_the_unmodified_model(
    cluster, tmp_path: Path, family: str, num_ranks: int, bias: int
):
    """A router bias sends all tokens to the first rank."""
    source, target = tmp_path / "source", tmp_path / "target"
    model = random_model(family)
    for layer in model.model.layers if bias else ():
        layer.mlp.router.bias.data[:2] += bias
    model.save_pretrained(source)
    cluster(num_ranks).run(train, str(source), 2, ("all_to_all", "symmoe"), str(target))
    assert filecmp.cmp(source / "model.safetensors", target / "model.safetensors", shallow=False)


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
