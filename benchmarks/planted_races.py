"""Two kernels whose reports by racecheck are known, for benchmarks/sanitize.sh.

python benchmarks/planted_races.py dispatch      # in shared memory: mbarriers, and by what Triton hands out roles
python benchmarks/planted_races.py race          # one role reads what another writes, and nothing orders them
"""

from __future__ import annotations

import sys

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

THREADS = gl.constexpr(128)
ROLES = gl.constexpr(3)
TURNS = gl.constexpr(4)
PROGRAMS = 512  # what racecheck finds depends on time: a kernel of one program may pass


@gluon.jit
def lanes():
    return gl.arange(0, THREADS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))


@gluon.jit
def store_number(out, NUMBER: gl.constexpr):
    gl.store(out + (gl.program_id(0) * ROLES + NUMBER) * THREADS + lanes(), lanes() + NUMBER)


@gluon.jit
def take_turns(out, turn_of, NUMBER: gl.constexpr):
    for i in range(TURNS):
        mbarrier.wait(turn_of.index(NUMBER), (i & 1) ^ (1 - NUMBER))
        store_number(out, NUMBER)
        mbarrier.arrive(turn_of.index(1 - NUMBER))


@gluon.jit
def write_buffer(buffer, out):
    buffer.store(lanes().to(gl.int64))


@gluon.jit
def read_buffer(buffer, out):
    gl.store(out + lanes(), buffer.load(gl.BlockedLayout([1], [32], [4], [0])))


@gluon.jit
def planted_dispatch_kernel(out):
    """As the kernels of kernels/hopper/: several roles, warps without one, mbarriers between the roles."""
    turn_of = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(turn_of.index(i), count=1)
    gl.warp_specialize(
        [
            (take_turns, (out, turn_of, 0)),
            (store_number, (out, 2)),
            (take_turns, (out, turn_of, 1)),
        ],
        [4, 1],
        [64, 64],
    )


@gluon.jit
def planted_race_kernel(out):
    buffer = gl.allocate_shared_memory(gl.int64, [THREADS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    gl.warp_specialize([(write_buffer, (buffer, out)), (read_buffer, (buffer, out))], [4], [64])


def main(name: str) -> None:
    """Runs one of them."""
    kernel = {"dispatch": planted_dispatch_kernel, "race": planted_race_kernel}[name]
    out = torch.zeros(PROGRAMS * ROLES.value * THREADS.value, dtype=torch.int32, device="cuda")
    kernel[(PROGRAMS,)](out, num_warps=4)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1])
