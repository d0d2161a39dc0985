"""Two nodes on one machine: two torchrun agents, each with two processes."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from example_runs import EXAMPLES
from torchrun_nodes import Node, nodes, run

from symmoe.checkpoint import read_manifest

pytestmark = pytest.mark.timeout(900)
STEPS = 4
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def train(out: Path, on: Sequence[Node], *arguments: str) -> list[dict[str, Any]]:
    """Runs the main example to its end; its metrics except times."""
    program = [str(EXAMPLES / "train_lm.py"), "--preset=tiny", f"--steps={STEPS}", f"--out={out}"]
    run(on, *program, *arguments)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        del record["tokens_per_s"]
    return records


def losses_of(on: Sequence[Node], *program: str) -> list[str]:
    """The losses that the example with a mesh prints."""
    output = "\n".join(
        run(on, str(EXAMPLES / "fsdp2_moe.py"), *program, "--steps=3", "--save-every=0")
    ).splitlines()
    lines = [line for line in output if line.startswith("step ")]
    assert len(lines) == 3, output
    return lines


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.slow
@pytest.mark.parametrize("ranks_of_node", [1, 2])
def test_two_nodes_train_like_one(tmp_path: Path, ranks_of_node: int):
    """EP groups inside a node, replicas of the experts across: every bit as in one node with as many ranks."""
    two = train(tmp_path / "two", nodes(2, ranks_of_node), f"--ep={ranks_of_node}")
    one_node = train(tmp_path / "one", nodes(1, 2 * ranks_of_node), f"--ep={ranks_of_node}")
    assert ([record["step"] for record in two], two) == (list(range(1, STEPS + 1)), one_node)
    # Weights and moments of all ranks, and the text that the model writes.
    actual = tree(tmp_path / "two" / "checkpoints")
    assert actual == tree(tmp_path / "one" / "checkpoints")
    assert sum(name.endswith(".safetensors") for name in actual) == 2 * ranks_of_node
    assert (tmp_path / "two" / "sample.txt").read_bytes() == (
        tmp_path / "one" / "sample.txt"
    ).read_bytes()
    manifest = read_manifest(tmp_path / "two" / "checkpoints")
    assert (manifest.num_ranks, manifest.ep_size) == (2 * ranks_of_node, ranks_of_node)
    assert two[-1]["loss"] < two[0]["loss"] - 0.05
    for record in two:  # every slot of the global batch, in every layer
        assert [sum(load) for load in record["expert_load"]] == [8 * 64 * 2] * 2


@pytest.mark.slow
def test_nodes_train_with_a_rendezvous_and_a_mesh():
    """torchrun's c10d rendezvous, and experts that are sharded over the nodes."""
    program = ["--preset=tiny", "--ep=2"]
    assert losses_of(nodes(2, 2, elastic=True), *program) == losses_of(nodes(1, 4), *program)


@pytest.fixture(scope="module")
def one_node(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """An EP group of four ranks on one node that adds a token's rows in the order of its experts."""
    out = tmp_path_factory.mktemp("one-node")
    return out, train(out, nodes(1, 4), "--order=slot")


@pytest.mark.slow
@pytest.mark.parametrize("num_agents", [1, 2])
def test_an_ep_group_over_two_nodes_trains_like_one_node(
    tmp_path: Path, one_node: tuple[Path, list[dict[str, Any]]], num_agents: int
):
    """Virtual nodes of one agent, and two agents that find each other: every bit as in one node."""
    on = nodes(num_agents, 4 // num_agents, elastic=num_agents > 1)
    out, expected = one_node
    records = train(tmp_path, on, "--ranks-per-node=2", "--order=slot")
    assert records == expected
    assert records[-1]["loss"] < records[0]["loss"] - 0.05
    assert tree(tmp_path / "checkpoints") == tree(out / "checkpoints")


@pytest.mark.gpu
def test_two_nodes_of_gpus_train_like_one():
    """Half of the GPUs each, at most 2; between the nodes NCCL goes over sockets and adds up in another order."""
    per_node = min(2, torch.cuda.device_count() // 2)
    if not per_node:
        pytest.skip("needs 2 CUDA GPUs")
    two = losses_of(nodes(2, per_node, on_gpus=True), f"--ep={per_node}")
    one_node = losses_of(nodes(1, 2 * per_node, on_gpus=True), f"--ep={per_node}")
    numbers = [
        [[float(number) for number in _NUMBER.findall(line)] for line in lines]
        for lines in (two, one_node)
    ]
    for (step, loss, norm), (other_step, other_loss, other_norm) in zip(*numbers, strict=True):
        assert (step, loss) == (other_step, pytest.approx(other_loss, rel=2e-3))
        assert norm == pytest.approx(other_norm, rel=5e-2)
