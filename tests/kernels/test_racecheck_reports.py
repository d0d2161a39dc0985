"""Racecheck's reports about Triton's dispatch of roles are separated from others, and the kernels' code shows that they
are false."""

import re
import subprocess
from pathlib import Path

import pytest
import racecheck_reports
from racecheck_reports import KERNELS, count, dispatch_lines

# -- logs -------------------------------------------------------------------------------------------------------------
GEMM, PUSH = "hopper_gemm_kernel", "hopper_push_kernel"


def report(kernel: str, *accesses: tuple[str, str, int]) -> str:
    """A report as racecheck prints it. accesses: (kind, file, line)."""
    first, *further_accesses = [
        f"{kind} access at {kernel}+0x1c0 in {file}:{line}" for kind, file, line in accesses
    ]
    lines = [
        f"..========= Error: Race reported between {first}",
        *(f"=========     and {access} [65 hazards]" for access in further_accesses),
    ]
    return "\n".join([*lines, "========= ", ""])


def of_dispatch(kernel: str) -> str:
    lines = dispatch_lines(kernel)
    return report(
        kernel,
        *(("Read", *source_line) for source_line in lines["Read"]),
        *(("Write", *source_line) for source_line in lines["Write"]),
    )


def log_of(*reports: str, errors: int | None = None) -> str:
    number = len(reports) if errors is None else errors
    end = f"========= RACECHECK SUMMARY: {number} hazards displayed ({number} errors, 0 warnings)\n"
    return "".join(["========= COMPUTE-SANITIZER\n", *reports, end])


(READ,), (WRITE, *_) = dispatch_lines(PUSH)["Read"], sorted(dispatch_lines(PUSH)["Write"])
FILE, LINE = READ
LOGS = {  # reports of the dispatch, and others
    "nothing": (log_of(), (0, 0)),
    "the dispatch of all": (log_of(*map(of_dispatch, KERNELS)), (len(KERNELS), 0)),
    "another line is read": (
        log_of(report(PUSH, ("Read", FILE, LINE + 1), ("Write", *WRITE))),
        (0, 1),
    ),
    "another line is written": (
        log_of(report(PUSH, ("Read", *READ), ("Write", FILE, LINE + 3))),
        (0, 1),
    ),
    "a further line": (
        log_of(report(PUSH, ("Read", *READ), ("Write", *WRITE), ("Write", FILE, LINE + 3))),
        (0, 1),
    ),
    "another file": (log_of(report(PUSH, ("Read", *READ), ("Write", "gemm.py", WRITE[1]))), (0, 1)),
    "two writes": (log_of(report(PUSH, ("Write", *WRITE), ("Write", *WRITE))), (0, 1)),
    "no listed kernel": (
        log_of(report("push_rows_kernel", ("Read", *READ), ("Write", *WRITE))),
        (0, 1),
    ),
    "lines of another kernel": (
        log_of(report(GEMM, ("Read", *READ), ("Write", *WRITE)), of_dispatch(GEMM)),
        (1, 1),
    ),
    "no line": (
        log_of("========= Error: Race reported between Read access at hopper_push_kernel+0x10\n"),
        (0, 1),
    ),
    "a hazard by itself": (
        log_of("========= Error: Potential WAW hazard detected at __shared__ 0x404\n"),
        (0, 1),
    ),
    "not all were printed": (log_of(of_dispatch(GEMM), errors=22), (1, 21)),
    "no end": (of_dispatch(GEMM), None),
}


@pytest.mark.parametrize("name", LOGS)
def test_reports_of_the_dispatch_are_counted_by_themselves(name: str, tmp_path: Path):
    text, counted = LOGS[name]
    assert count(text) == counted
    file = tmp_path / "racecheck.log"
    file.write_text(text, encoding="utf-8")
    assert racecheck_reports.main(str(file)) == (2 if counted is None else int(counted[1] > 0))


# -- the kernels' code ------------------------------------------------------------------------------------------------
pytest.importorskip("triton")

import planted_races  # noqa: E402
from ahead_of_time import BINARIES, compile_for  # noqa: E402
from launch_table import FP32, Launch  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

# In the order of addresses; B is the barrier of all warps. Loop of the other warps: B, role read (R), B and B if there
# is none. Every role: B, work, B. First warps: roles written (W), B, B, work, B, "leave" written (W), B.
PROTOCOL = "BRBB(BB)+WBBBWB"
ROWS = {"G": 3, "H": 256, "I": 128, "N": 999}
NUMBERS = {"G": 3, "W": 256, "H": 128, "N": 999}
TRIP = {"T": 512, "H": 256, "E": 8, "K": 4, "R": 2}
LAUNCHES = {
    "hopper_gemm_kernel": Launch("launch_gemm", ROWS),
    "hopper_act_kernel": Launch("launch_act", ROWS),
    "hopper_dact_kernel": Launch("launch_dact", ROWS),
    "hopper_wgrad_kernel": Launch("launch_wgrad", ROWS, ways="fc2"),
    "hopper_fp8_gemm_kernel": Launch("launch_fp8_gemm", NUMBERS, ways="zero-tail"),
    "hopper_fp8_wgrad_kernel": Launch("launch_fp8_wgrad", NUMBERS, FP32, ways="accumulate"),
    "hopper_push_kernel": Launch("launch_push", TRIP),
    "hopper_push_sums_kernel": Launch("launch_push_sums", TRIP),
    "hopper_sum_home_kernel": Launch("launch_sum_home", TRIP, changes={"rank": 1}),
}


def disassembled(name: str, folder: Path, launches) -> str:
    """SASS with source lines."""
    cubin = folder / "lines.cubin"
    if name in LAUNCHES:
        (launch,) = launches.made_by(LAUNCHES[name])
        cubin.write_bytes(launch.compile().asm["cubin"])
    else:
        source = GluonASTSource(getattr(planted_races, name), {"out": "*i32"}, {}, {})
        cubin.write_bytes(compile_for(90, source, {"num_warps": 4}).asm["cubin"])
    command = [BINARIES / "nvdisasm", "-g", "-c", cubin]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def instructions(sass: str) -> list[tuple[tuple[str, int], str, str]]:
    """((file, line), operation, operands) in the order of addresses."""
    source_line, code_lines = ("", 0), []
    for text in sass.splitlines():
        if (line := re.search(r'## File ".*?([^/"]+)", line (\d+)', text)) is not None:
            source_line = line[1], int(line[2])
        elif (
            code := re.search(
                r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", text
            )
        ) is not None:
            code_lines.append((source_line, code[1], code[2]))
    return code_lines


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_barriers_of_all_warps_lie_between_roles_read_and_written(
    name: str, tmp_path: Path, launches
):
    sass = disassembled(name, tmp_path, launches)
    code = instructions(sass)
    lines = dispatch_lines(name)
    order, written = "", set()
    read_at = None
    for source_line, operation, operands in code:
        if operation.startswith("BAR.SYNC") and operands.split(",")[0] == "0x1":
            assert operands == "0x1", "of some warps only"
            order += "B"
        elif (
            re.match(r"(LDS|STS|LDSM|STSM|ATOMS)\b", operation)
            and source_line in lines["Read"] | lines["Write"]
        ):
            offset = int(re.search(r"\+(0x[0-9a-f]+)\]", operands)[1], 16)
            if operation == "LDS.U8":
                assert source_line in lines["Read"]
                order, read_at = order + "R", offset
            else:
                assert re.fullmatch(r"STS(\.64|\.128)?", operation), "nothing else has these lines"
                assert source_line in lines["Write"]
                size = {"STS": 4, "STS.64": 8, "STS.128": 16}[operation]
                written |= set(range(offset, offset + size))
                order += "" if order.endswith("W") else "W"
    assert re.fullmatch(PROTOCOL, order), order
    assert not re.fullmatch(PROTOCOL, order.replace("WBB", "WB", 1))
    # A byte per warp that is not one of the first four, and the address that is read is that of warp 0.
    assert sorted(written) == list(range(read_at + 4, read_at + 4 + len(written)))
    assert len(written) % 4 == 0
    # Where there are several roles, a warp without one passes two barriers under a condition; else it branches to them.
    assert len(re.findall(r"@!?P\d\s+BAR\.SYNC\S* 0x1 ;", sass)) == (
        0 if name == "planted_race_kernel" else 2
    )
    shared = [
        source_line
        for source_line, operation, _ in code
        if re.match(r"(LDS|STS|LDSM|STSM)\b", operation)
    ]
    other_accesses = [
        source_line for source_line in shared if source_line not in lines["Read"] | lines["Write"]
    ]
    assert bool(other_accesses) == (
        name not in ("planted_dispatch_kernel", "hopper_push_kernel")
    )  # TMA moves all of push
