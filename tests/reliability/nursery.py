"""The process that ranks are forked from: it has imported torch, so that a new rank takes milliseconds. A rank is an
interpreter of its own from the fork on: it leads a session, runs what it is sent, and ends as any Python program does
(an exception that nobody catches is exit code 1). It dies with the nursery, and the nursery with the launcher, whatever
kills them."""

import ctypes
import faulthandler
import gc
import json
import os
import signal
import socket
import sys
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection

_PR_SET_PDEATHSIG = 1
# torch._inductor: torch.use_deterministic_algorithms imports it, for seconds.
_FOR_RANKS = (
    "pytest",
    "torch.distributed",
    "torch._inductor",
    "symmoe.kernels.twin",
    "symmoe.moe.layer",
)
_FOR_RANKS_ON_GPUS = ("symmoe.kernels.gpu",)  # with Triton; importing it starts no CUDA


def main() -> int:
    """Serves the launcher's requests until it closes the socket. Returns the rank's exit code in a forked child."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    for name in _FOR_RANKS:
        import_module(name)
    if sys.modules["torch"].version.cuda:
        for name in _FOR_RANKS_ON_GPUS:
            import_module(name)
    gc.collect()
    gc.freeze()  # a rank that ends would otherwise walk through all of this, and copy every page of it

    while True:
        message, files, _, _ = socket.recv_fds(requests, 1 << 16, 1)
        if not message:
            return 0
        request = json.loads(message)
        if request["do"] == "start":
            pid = os.fork()
            if pid == 0:
                requests.close()
                return _be_a_rank(Connection(files[0]), request)
            os.close(files[0])
            requests.send(json.dumps(pid).encode())
        else:
            requests.send(json.dumps(_exit_code(request["pid"])).encode())


def _exit_code(pid: int) -> int | None:
    """The exit code of an ended child, which is reaped; minus the signal if one killed it. None: the child runs."""
    ended_pid, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended_pid else None


def _be_a_rank(connection: Connection, job: dict) -> int:
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    faulthandler.register(
        signal.SIGUSR1, all_threads=True
    )  # the launcher asks a rank that hangs where it is
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank = job["rank"]
    num_ranks = job["num_ranks"]
    if job["device"] == "cuda":
        torch.cuda.set_device(rank)
    store = f"file://{job['store']}"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=120)
    )
    connection.send(("ready", None))
    while True:
        try:
            function, arguments = connection.recv()
        except (EOFError, ConnectionError):
            dist.destroy_process_group()
            return 0
        for item in function(rank, num_ranks, *arguments):
            connection.send(("item", item))
        connection.send(("done", None))


if __name__ == "__main__":
    sys.exit(main())
