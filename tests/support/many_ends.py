"""Pairs of ranks that end as a script does, and close and destroy nothing: `python many_ends.py PAIRS ENDING FOLDER`.
One process, which has imported everything, forks them until one has failed. A busy process has their core, and gloo's
threads get the remaining time: so they do the remaining work as late as they can."""

import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

import symmoe
import symmoe.kernels.twin
import symmoe.moe.layer

ENOUGH_S = (
    300.0  # a pair takes 10 to 12 s, on a busy machine more: then there are fewer than asked for
)


def be_busy() -> int:
    """Starts a process that never sleeps, on the one core that this process and its children have from now on."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    parent = os.getpid()
    if busy := os.fork():
        return busy
    while os.getppid() == parent:
        pass
    os._exit(0)


def start_slow_gloo(rank: int, store: str) -> None:
    """The process group. Its threads are as nice as the one that makes it: they get what others leave."""

    def make() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()


def main(rank: int, store: str, ending: str) -> None:
    global heap, layer
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    start_slow_gloo(rank, store)
    if ending != "without a heap":
        heap = symmoe.SymmetricHeap(num_bytes=4 << 20, backend="host")
    if ending == "a layer":
        layer = symmoe.MoELayer(symmoe.MoEConfig(hidden=16, ffn=16, num_experts=4, top_k=2), heap)
        y, _ = layer(torch.randn(8, 16))
        y.sum().backward()
    for _ in range(3):
        dist.all_reduce(torch.ones(4))


def start(num_pairs: int, ending: str, folder: str) -> tuple[int, str] | list[int]:
    """On a rank: its number and its store; in the parent, at last, how every rank has ended."""
    busy = be_busy()
    codes = []
    begun = time.monotonic()
    for pair in range(num_pairs):
        if any(codes) or time.monotonic() - begun > ENOUGH_S:
            break
        store, ranks = f"{folder}/store-{pair}", []
        for rank in range(2):
            if (pid := os.fork()) == 0:
                return rank, store
            ranks.append(pid)
        codes += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    os.kill(busy, signal.SIGKILL)
    os.waitpid(busy, 0)
    return codes


if __name__ == "__main__":
    result = start(int(sys.argv[1]), *sys.argv[2:4])
    if isinstance(result, tuple):
        main(*result, sys.argv[2])
    else:
        print(result)
