"""Two nodes, as far as one machine has them: two torchrun agents, each with two processes of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from example_runs import EXAMPLES
from limits import PROMPT_S

from symmoe.checkpoint import read_manifest

STEPS = 4
DEADLINE_S = 400
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Node:
    """What one torchrun gets: its arguments, and environment variables of its own."""

    arguments: Sequence[str]
    environment: Mapping[str, str]


def nodes(num_nodes: int, ranks_of_node: int, *, elastic: bool = False, on_gpus: bool = False) -> list[Node]:
    """Nodes that are numbered, or, if elastic, find each other. Of the machine's GPUs each sees its share."""
    port = free_port()
    common = [f"--nnodes={num_nodes}", f"--nproc-per-node={ranks_of_node}"]
    if elastic:
        common += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test"]
        common += ["--local-addr=127.0.0.1"]
    else:
        common += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    found = []
    for node in range(num_nodes):
        environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        if on_gpus:
            gpus = range(node * ranks_of_node, (node + 1) * ranks_of_node)
            environment |= {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
        if on_gpus and num_nodes > 1:  # NCCL takes them for different hosts
            environment |= {"NCCL_HOSTID": f"node-{node}", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
        found.append(Node(common if elastic else [*common, f"--node-rank={node}"], environment))
    return found


def free_port() -> int:
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        port: int = each.getsockname()[1]
        return port


def run(agents_of: Sequence[Node], *program: str) -> list[str]:
    """Runs a torchrun on each node to its end, which must be good; returns what each has printed. When one fails, or
    the deadline comes, the others are ended too."""
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in agents_of]
        agents = []
        for node, output in zip(agents_of, outputs, strict=True):
            command = [sys.executable, "-m", "torch.distributed.run", *node.arguments, *program]
            environment = os.environ | node.environment
            agents.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
            stack.callback(end, agents[-1])
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            codes = [agent.poll() for agent in agents]
            if None not in codes or any(codes):
                break
            time.sleep(0.1)
        for agent in agents:
            end(agent)
        texts = []
        for output in outputs:
            output.seek(0)
            texts.append(output.read())
    assert codes == [0] * len(agents), "\n".join(texts)
    return texts


def end(agent: subprocess.Popen[bytes]) -> None:
    """Ends an agent, and with it its processes."""
    if agent.poll() is None:
        agent.terminate()  # it ends its processes before itself; it kills those that stay after 30 s
    try:
        agent.wait(PROMPT_S)
    finally:
        agent.kill()


def train(out: Path, on: Sequence[Node], *arguments: str) -> list[dict[str, Any]]:
    """The main example, to its end; its metrics without those of time."""
    program = [str(EXAMPLES / "train_lm.py"), "--preset=tiny", f"--steps={STEPS}", f"--out={out}"]
    run(on, *program, *arguments)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        del record["tokens_per_s"]
    return records


def losses_of(on: Sequence[Node], *program: str) -> list[str]:
    """What the example with a mesh says of its steps."""
    said = "\n".join(run(on, str(EXAMPLES / "fsdp2_moe.py"), *program, "--steps=3", "--save-every=0")).splitlines()
    lines = [line for line in said if line.startswith("step ")]
    assert len(lines) == 3, said
    return lines


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks_of_node", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_two_nodes_train_as_one_does(tmp_path: Path, ranks_of_node: int):
    """EP groups inside a node, replicas of the experts across: every bit as in one node with as many ranks."""
    two = train(tmp_path / "two", nodes(2, ranks_of_node), f"--ep={ranks_of_node}")
    one = train(tmp_path / "one", nodes(1, 2 * ranks_of_node), f"--ep={ranks_of_node}")
    assert [record["step"] for record in two] == list(range(1, STEPS + 1))
    assert two == one
    # Weights and moments of all ranks, and the text that the model writes.
    found, expected = tree(tmp_path / "two" / "checkpoints"), tree(tmp_path / "one" / "checkpoints")
    assert found == expected
    assert sum(name.endswith(".safetensors") for name in found) == 2 * ranks_of_node
    assert (tmp_path / "two" / "sample.txt").read_bytes() == (tmp_path / "one" / "sample.txt").read_bytes()
    manifest = read_manifest(tmp_path / "two" / "checkpoints")
    assert (manifest.num_ranks, manifest.ep_size) == (2 * ranks_of_node, ranks_of_node)
    assert two[-1]["loss"] < two[0]["loss"] - 0.05
    for record in two:  # every slot of the global batch, in every layer
        assert [sum(load) for load in record["expert_load"]] == [8 * 64 * 2] * 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_replicas_add_up_to_one_ep_group(tmp_path: Path):
    """Up to rounding, and to the tokens over which the balance loss is taken."""
    two, whole = train(tmp_path / "two", nodes(2, 2), "--ep=2"), train(tmp_path / "whole", nodes(1, 4))
    assert [r["loss"] for r in whole] == pytest.approx([r["loss"] for r in two], rel=1e-3)
    assert [r["grad_norm"] for r in whole] == pytest.approx([r["grad_norm"] for r in two], rel=2e-2)
    assert whole != two


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nodes_that_find_each_other_and_a_mesh():
    """torchrun's c10d rendezvous, and experts that are sharded over the nodes."""
    program = ["--preset=tiny", "--ep=2"]
    assert losses_of(nodes(2, 2, elastic=True), *program) == losses_of(nodes(1, 4), *program)


@pytest.fixture(scope="module")
def one_node(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """An EP group of four ranks on one node that adds a token's rows in the order of its experts."""
    out = tmp_path_factory.mktemp("one-node")
    return out, train(out, nodes(1, 4), "--order=slot")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_agents", [1, 2])
def test_an_ep_group_that_spans_two_nodes(tmp_path: Path, one_node: tuple[Path, list[dict[str, Any]]], num_agents: int):
    """Virtual nodes of one agent, and two agents that find each other: every bit as in one node."""
    ranks_of_agent = 4 // num_agents
    on = nodes(num_agents, ranks_of_agent, elastic=num_agents > 1)
    out, expected = one_node
    records = train(tmp_path, on, "--ranks-per-node=2", "--order=slot")
    assert records == expected
    assert records[-1]["loss"] < records[0]["loss"] - 0.05
    assert tree(tmp_path / "checkpoints") == tree(out / "checkpoints")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nodes_add_up_in_their_own_order(tmp_path: Path, one_node: tuple[Path, list[dict[str, Any]]]):
    """By default a node adds up its rows before they travel, which may round otherwise."""
    records = train(tmp_path, nodes(1, 4), "--ranks-per-node=2")
    assert [r["loss"] for r in records] == pytest.approx([r["loss"] for r in one_node[1]], rel=1e-4)
    assert [r["grad_norm"] for r in records] == pytest.approx([r["grad_norm"] for r in one_node[1]], rel=1e-3)


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_two_nodes_of_gpus():
    """Half of the GPUs each, at most 2; between the nodes NCCL goes over sockets and adds up in another order."""
    each = min(2, torch.cuda.device_count() // 2)
    if not each:
        pytest.skip("needs 2 CUDA GPUs")
    two = losses_of(nodes(2, each, on_gpus=True), f"--ep={each}")
    one = losses_of(nodes(1, 2 * each, on_gpus=True), f"--ep={each}")
    numbers = [[[float(number) for number in _NUMBER.findall(line)] for line in lines] for lines in (two, one)]
    for (step, loss, norm), (other_step, other_loss, other_norm) in zip(*numbers, strict=True):
        assert step == other_step
        assert loss == pytest.approx(other_loss, rel=2e-3)
        assert norm == pytest.approx(other_norm, rel=5e-2)
