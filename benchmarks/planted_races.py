"""Two kernels whose reports by racecheck are known, for benchmarks/sanitize.sh.

python benchmarks/planted_races.py dispatch      # no shared memory but that in which Triton hands out roles
python benchmarks/planted_races.py race          # one role reads what another writes, and nothing orders them
"""

from __future__ import annotations

import sys

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

THREADS = gl.constexpr(128)


@gluon.jit
def lanes():
    return gl.arange(0, THREADS, gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def store_number(out, NUMBER: gl.constexpr):
    gl.store(out + NUMBER * THREADS + lanes(), lanes() + NUMBER)


@gluon.jit
def write_buffer(buffer, out):
    buffer.store(lanes().to(gl.int64))


@gluon.jit
def read_buffer(buffer, out):
    gl.store(out + lanes(), buffer.load(gl.BlockedLayout([1], [32], [4], [0])))


@gluon.jit
def planted_dispatch_kernel(out):
    gl.warp_specialize([(store_number, (out, 0)), (store_number, (out, 1))], [4], [64])


@gluon.jit
def planted_race_kernel(out):
    buffer = gl.allocate_shared_memory(gl.int64, [THREADS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    gl.warp_specialize([(write_buffer, (buffer, out)), (read_buffer, (buffer, out))], [4], [64])


def main(name: str) -> None:
    """Runs one of them."""
    kernel = {"dispatch": planted_dispatch_kernel, "race": planted_race_kernel}[name]
    out = torch.zeros(2 * THREADS.value, dtype=torch.int32, device="cuda")
    kernel[(1,)](out, num_warps=4)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1])
