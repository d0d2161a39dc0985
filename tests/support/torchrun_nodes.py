"""Nodes, as far as one machine has them: torchrun agents, each with processes of its own."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from limits import PROMPT_S

DEADLINE_S = 400


@dataclass(frozen=True)
class Node:
    """The inputs of one torchrun: its arguments, and environment variables of its own."""

    arguments: Sequence[str]
    environment: Mapping[str, str]


def nodes(
    num_nodes: int, ranks_of_node: int, *, elastic: bool = False, on_gpus: bool = False
) -> list[Node]:
    """Nodes that are numbered, or, if elastic, find each other. Of the machine's GPUs each sees its share."""
    port = free_port()
    common = [f"--nnodes={num_nodes}", f"--nproc-per-node={ranks_of_node}"]
    if elastic:
        common += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test"]
        common += ["--local-addr=127.0.0.1"]
    else:
        common += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    commands = []
    for node in range(num_nodes):
        environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        if on_gpus:
            gpus = range(node * ranks_of_node, (node + 1) * ranks_of_node)
            environment |= {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
        if on_gpus and num_nodes > 1:  # NCCL takes them for different hosts
            environment |= {
                "NCCL_HOSTID": f"node-{node}",
                "NCCL_NET": "Socket",
                "NCCL_SOCKET_IFNAME": "lo",
            }
        commands.append(Node(common if elastic else [*common, f"--node-rank={node}"], environment))
    return commands


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
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
            agents.append(
                subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
            )
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
