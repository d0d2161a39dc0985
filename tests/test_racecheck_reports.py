"""Racecheck's reports of how Triton hands out roles: told apart from others, and false by what the kernels do."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import racecheck_reports
import torch
from racecheck_reports import KERNELS, count, dispatch_lines

# -- logs -------------------------------------------------------------------------------------------------------------

GEMM, PUSH = "hopper_gemm_kernel", "hopper_push_kernel"


def report(kernel: str, *accesses: tuple[str, str, int]) -> str:
    """As racecheck prints it: accesses (kind, file, line)."""
    first, *others = [f"{kind} access at {kernel}+0x1c0 in {file}:{line}" for kind, file, line in accesses]
    lines = [f"..========= Error: Race reported between {first}"]
    lines += [f"=========     and {other} [65 hazards]" for other in others]
    return "\n".join([*lines, "========= ", ""])


def of_dispatch(kernel: str) -> str:
    lines = dispatch_lines(kernel)
    return report(kernel, *(("Read", *place) for place in lines.reads), *(("Write", *place) for place in lines.writes))


def log_of(*reports: str, errors: int | None = None) -> str:
    number = len(reports) if errors is None else errors
    end = (
        f"30 passed in 95.24s\n========= RACECHECK SUMMARY: {number} hazards displayed ({number} errors, 0 warnings)\n"
    )
    return "".join(["========= COMPUTE-SANITIZER\n", *reports, end])


def test_reports_of_the_dispatch_are_counted_by_themselves():
    assert count(log_of()) == (0, 0)
    assert count(log_of(*map(of_dispatch, KERNELS))) == (len(KERNELS), 0)
    swapped = report(PUSH, *reversed([("Read", *x) for x in dispatch_lines(PUSH).reads]), ("Write", "rows.py", 1))
    assert count(log_of(of_dispatch(GEMM), swapped)) == (1, 1)


def test_everything_else_is_another_report():
    (read,), (write, *_) = dispatch_lines(PUSH).reads, sorted(dispatch_lines(PUSH).writes)
    file, line = read
    others = {
        "another line is read": report(PUSH, ("Read", file, line + 1), ("Write", *write)),
        "another line is written": report(PUSH, ("Read", *read), ("Write", *write), ("Write", file, line + 3)),
        "another file": report(PUSH, ("Read", *read), ("Write", "gemm.py", write[1])),
        "two writes": report(PUSH, ("Write", *write), ("Write", *write)),
        "a kernel that is not listed": report("push_rows_kernel", ("Read", *read), ("Write", *write)),
        "lines of another kernel": report(GEMM, ("Read", *read), ("Write", *write)),
        "no line": "========= Error: Race reported between Read access at hopper_push_kernel+0x10\n"
        "=========     and Write access at hopper_push_kernel+0x20 [1 hazards]\n",
        "one hazard by itself": "========= Error: Potential WAW hazard detected at __shared__ 0x404\n",
    }
    for name, text in others.items():
        assert count(log_of(of_dispatch(GEMM), text)) == (1, 1), name


def test_what_was_not_printed_is_another_report_and_a_log_without_an_end_is_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert count(log_of(of_dispatch(GEMM), errors=22)) == (1, 21)
    assert count(of_dispatch(GEMM)) is None
    file = tmp_path / "racecheck.log"
    for text, status, said in (
        (log_of(of_dispatch(GEMM)), 0, "1 reports of warp_specialize's dispatch, 0 others"),
        (log_of(of_dispatch(GEMM), errors=2), 1, "1 reports of warp_specialize's dispatch, 1 others"),
        (of_dispatch(GEMM), 2, "no summary of racecheck"),
    ):
        file.write_text(text, encoding="utf-8")
        assert racecheck_reports.main(str(file)) == status
        assert capsys.readouterr().out.strip() == said


# -- what the kernels do ----------------------------------------------------------------------------------------------

triton = pytest.importorskip("triton")

import planted_races  # noqa: E402
from test_gemm_compile import TYPE_NAMES, meta  # noqa: E402
from test_hopper_compile import SWIGLU, compiled_source  # noqa: E402
from test_hopper_rows_compile import peers_of  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from symmoe.kernels.hopper import act, gemm, rows, wgrad  # noqa: E402
from symmoe.kernels.low_precision import hopper_fp8, hopper_fp8_wgrad  # noqa: E402

BF16, E4M3, I32, I64, F32 = torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.int64, torch.float32
G, H, I, N, T = 3, 256, 128, 999, 512
BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# In the order of addresses; B is the barrier of all warps. Loop of the other warps: B, role read (R), B and B if there
# is none. Every role: B, work, B. First warps: roles written (W), B, B, work, B, "leave" written (W), B.
PROTOCOL = "BRBB(BB)+WBBBWB"
LAUNCHES: dict[str, Callable[[], None]] = {
    "hopper_gemm_kernel": lambda: gemm.launch_gemm(
        meta(N, I, dtype=BF16),
        meta(G, H, I, dtype=BF16),
        meta(2, G, dtype=I32),
        meta(N, H, dtype=BF16),
        weight_k_first=False,
        zero_tail=True,
        num_sms=132,
    ),
    "hopper_act_kernel": lambda: act.launch_act(
        meta(N, H, dtype=BF16),
        meta(G, 2 * I, H, dtype=BF16),
        meta(2, G, dtype=I32),
        meta(N, dtype=F32),
        meta(N, 2 * I, dtype=BF16),
        meta(N, I, dtype=BF16),
        SWIGLU,
        num_sms=132,
    ),
    "hopper_dact_kernel": lambda: act.launch_dact(
        meta(N, H, dtype=BF16),
        meta(G, H, I, dtype=BF16),
        meta(2, G, dtype=I32),
        meta(N, 2 * I, dtype=BF16),
        meta(N, dtype=F32),
        meta(N, 2 * I, dtype=BF16),
        meta(N, I, dtype=BF16),
        meta(N, dtype=F32),
        SWIGLU,
        num_sms=132,
    ),
    "hopper_wgrad_kernel": lambda: wgrad.launch_wgrad(
        meta(N, H, dtype=BF16), meta(N, I, dtype=BF16), meta(2, G, dtype=I32), meta(G, H, I, dtype=BF16), num_sms=132
    ),
    "hopper_fp8_gemm_kernel": lambda: hopper_fp8.launch_fp8_gemm(
        meta(N, I, dtype=E4M3),
        meta(N, I // 128, dtype=F32),
        meta(G, H, I, dtype=E4M3),
        meta(G, H // 128, I // 128, dtype=F32),
        meta(2, G, dtype=I32),
        meta(N, H, dtype=BF16),
        zero_tail=True,
        num_sms=132,
    ),
    "hopper_fp8_wgrad_kernel": lambda: hopper_fp8_wgrad.launch_fp8_wgrad(
        meta(H, 1280, dtype=E4M3),
        meta(10, H, dtype=F32).t(),
        meta(I, 1280, dtype=E4M3),
        meta(10, I, dtype=F32).t(),
        meta(2, G, dtype=I32),
        meta(G, H, I, dtype=F32),
        accumulate=True,
        num_sms=132,
    ),
    "hopper_push_kernel": lambda: rows.launch_push(
        meta(T, H, dtype=BF16),
        meta(T, 2, dtype=I32),
        peers_of(2, 0),
        meta(2, 3, dtype=I64),
        column=0,
        rank=1,
        num_ctas=4,
    ),
    "hopper_pre_reduce_kernel": lambda: rows.launch_pre_reduce(
        meta(T, H, dtype=BF16), meta(T, 4, dtype=I32), meta(3, dtype=I32), rank=1, columns=None, num_ctas=4
    ),
    "hopper_pull_kernel": lambda: rows.launch_pull(
        meta(T, 2, dtype=I32),
        meta(T, 4, dtype=I32),
        meta(T, 4, dtype=I32),
        peers_of(2, 0),
        meta(2, 3, dtype=I64),
        meta(T, H, dtype=BF16),
        column=0,
        columns=None,
        num_ctas=4,
    ),
}


def disassembled(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """SASS with source lines."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))
    cubin = folder / "lines.cubin"
    if name in LAUNCHES:
        calls: list[tuple] = []
        monkeypatch.setitem(TYPE_NAMES, E4M3, "fp8e4nv")
        for module in (act, hopper_fp8, hopper_fp8_wgrad, gemm, rows, wgrad):
            monkeypatch.setattr(module, "launch", lambda kernel, grid, *rest: calls.append((kernel.kernel, *rest)))
        LAUNCHES[name]()
        cubin.write_bytes(compiled_source(calls).asm["cubin"])
    else:
        source = GluonASTSource(getattr(planted_races, name), {"out": "*i32"}, {}, {})
        cubin.write_bytes(
            triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["cubin"]
        )
    command = [BINARIES / "nvdisasm", "-g", "-c", cubin]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def instructions(sass: str) -> list[tuple[tuple[str, int], str, str]]:
    """((file, line), operation, operands) in the order of addresses."""
    place, found = ("", 0), []
    for text in sass.splitlines():
        if (line := re.search(r'## File ".*?([^/"]+)", line (\d+)', text)) is not None:
            place = line[1], int(line[2])
        elif (code := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", text)) is not None:
            found.append((place, code[1], code[2]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_barriers_of_all_warps_lie_between_roles_read_and_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sass = disassembled(name, tmp_path, monkeypatch)
    code, lines = instructions(sass), dispatch_lines(name)
    order, written = "", set()
    read_at = None
    for place, operation, operands in code:
        if operation.startswith("BAR.SYNC") and operands.split(",")[0] == "0x1":
            assert operands == "0x1", "of some warps only"
            order += "B"
        elif re.match(r"(LDS|STS|LDSM|STSM|ATOMS)\b", operation) and place in lines.reads | lines.writes:
            offset = int(re.search(r"\+(0x[0-9a-f]+)\]", operands)[1], 16)
            if operation == "LDS.U8":
                assert place in lines.reads
                order, read_at = order + "R", offset
            else:
                assert re.fullmatch(r"STS(\.64|\.128)?", operation), "nothing else has these lines"
                assert place in lines.writes
                size = {"STS": 4, "STS.64": 8, "STS.128": 16}[operation]
                written |= set(range(offset, offset + size))
                order += "" if order.endswith("W") else "W"
    assert re.fullmatch(PROTOCOL, order), order
    assert not re.fullmatch(PROTOCOL, order.replace("WBB", "WB", 1))
    # A byte per warp that is not one of the first four, and the address that is read is that of warp 0.
    assert sorted(written) == list(range(read_at + 4, read_at + 4 + len(written)))
    assert len(written) % 4 == 0
    # Where there are several roles, a warp without one passes two barriers under a condition; else it branches to them.
    conditional = re.findall(r"@!?P\d\s+BAR\.SYNC\S* 0x1 ;", sass)
    assert len(conditional) == (0 if name == "planted_race_kernel" else 2)
    shared = [place for place, operation, _ in code if re.match(r"(LDS|STS|LDSM|STSM)\b", operation)]
    others = [place for place in shared if place not in lines.reads | lines.writes]
    assert bool(others) == (
        name not in ("planted_dispatch_kernel", "hopper_push_kernel")
    )  # all that push moves, TMA does
