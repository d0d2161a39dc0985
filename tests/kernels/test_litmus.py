"""The litmus test's kernels without a GPU: what they count, in the interpreter, and the instructions that they become.
The suite itself is in tests/reliability/litmus.py; test_reliability.py runs a slice of it on CPUs."""

import re

import pytest
from interpreter import interpreter, run_checks


@interpreter
def test_what_kernels_count():
    assert run_checks("litmus_interpreter_checks").count(": ok") == 10


def ptx_of(name: str, **constants: int) -> str:
    """A kernel for Hopper, as GpuWords launches it."""
    pytest.importorskip("triton")
    from ahead_of_time import compile_for
    from reliability import litmus_kernels
    from triton.compiler import ASTSource

    kernel = getattr(litmus_kernels, name)
    types = {"counts": "*i64"}
    signature = {
        p.name: types.get(p.name) or p.annotation_type for p in kernel.params if not p.is_constexpr
    }
    signature |= dict.fromkeys(constants, "constexpr")
    return compile_for(90, ASTSource(kernel, signature, constants, {}), {"num_warps": 4}).ptx


@pytest.mark.parametrize("order", ["released", "flag first", "relaxed"])
def test_messages_are_sent_and_waited_for_as_the_library_does(order: str):
    from reliability.litmus_kernels import ORDERS, GpuWords

    sizes = {
        "STREAMS": GpuWords.num_streams,
        "MESSAGES": GpuWords.num_messages,
        "WORDS": GpuWords.message_words,
    }
    ptx = ptx_of("messages_kernel", **sizes, CHUNK=GpuWords.message_words // 4, ORDER=ORDERS[order])
    (flag,) = [line for line in ptx.splitlines() if re.search(r"\batom\.", line)]
    assert "sys" in flag
    assert "exch" in flag
    assert ("release" in flag, ptx.count("ld.acquire.sys.global.s64")) == (order != "relaxed", 1)
    assert ptx.count("%globaltimer") >= 4  # the waits' deadline, and the delays
    # Between the words of all threads and the flag of one, a barrier of the program, which the controls lack.
    block = ptx[ptx.rindex("$L__BB", 0, ptx.index("atom.")) : ptx.index("atom.")]
    assert ("bar.sync" in block) == (order == "released")
    assert re.search(r"st\.global\.(v\d\.)?b32", ptx)
    # Words are loaded before the wait, and again after it and the program's barrier.
    wait = ptx.index("ld.acquire.sys")
    loads = [match.start() for match in re.finditer(r"ld\.global\.(v\d\.)?b32", ptx)]
    after = [place for place in loads if place > wait]
    assert [place for place in loads if place < wait]
    assert after
    assert "bar.sync" in ptx[wait : min(after)]


@pytest.mark.parametrize("name", ["write_kernel", "read_kernel"])
def test_the_other_kernels_compile(name: str):
    ptx = ptx_of(name, BLOCK=1024)
    assert ("ld.global" if name == "read_kernel" else "st.global") in ptx
    assert "atom." not in ptx
