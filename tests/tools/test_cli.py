"""Wrong arguments of symmoe and benchmarks: one line names the argument and its value, the exit status is 2, and there
is no traceback."""

import os
import re
import subprocess
import sys

import bench
import pytest
import trace_layer
from limits import HANG_S

from symmoe.cli import main
from symmoe.tools.shapes import PRESETS


def last_line_of_error(arguments: list[str], capsys: pytest.CaptureFixture) -> str:
    """The last line on stderr of a program that ends with status 2."""
    program = {"bench.py": bench.main, "trace_layer.py": trace_layer.main}.get(arguments[0], main)
    with pytest.raises(SystemExit) as ended:
        program(arguments if program is main else arguments[1:])
    assert ended.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.match(r"symmoe( \w+)?: error: " if program is main else r"\S+: error: ", line)
    return line


CUSTOM = ["--hidden=16", "--ffn=8", "--experts=4", "--top-k=2"]
LARGE = "--hidden 2048 --ffn 768 --experts 128 --top-k 8 --ranks 2 --tokens 8192"
WRONG = [
    ("bench.py layers", "suite (layers) must be of steps, layer, "),
    ("bench.py --preset qwen", "preset (qwen) must be of qwen3-30b"),
    ("bench.py --skew flat", "skew (flat) must be of uniform, zipf, hot"),
    ("bench.py --tokens 12,many", "tokens (many) must be comma-separated whole numbers"),
    ("bench.py --tokens 0", "tokens (0) must be comma-separated whole numbers of at least 1"),
    ("bench.py --hidden 16", "explicit sizes also need --ffn, --experts, --top-k"),
    (
        "bench.py CUSTOM --preset olmoe",
        "preset (olmoe) and sizes (hidden, ffn, experts, top_k) exclude each other",
    ),
    ("bench.py CUSTOM --top-k 5", "top_k (5) must be at most num_experts (4)"),
    ("bench.py CUSTOM --ffn 0", "ffn (0) must be at least 1"),
    ("bench.py --repetitions 0", "--repetitions: 0 must be an integer greater than 0"),
    ("bench.py --heap-gib -1", "--heap-gib: -1 must be finite and greater than 0"),
    ("bench.py --heap-gib inf", "--heap-gib: inf must be"),
    ("bench.py CUSTOM --json nowhere/x.json", "cannot be written"),  # before anything is measured
    ("doctor --nodes", "RANK, WORLD_SIZE, LOCAL_RANK not set"),
    ("doctor --nodes --read x.json", "--nodes and --read exclude each other"),
    ("doctor --nodes --ranks-per-node 0", "--ranks-per-node: 0 must be"),
    ("doctor --read .", "cannot read .: Is a directory"),
    ("doctor --read missing.json", "cannot read missing.json: No such file"),
    (
        "trace_layer.py CUSTOM --quantized-wire both",
        "quantized_wire ('both'): precision (None) must be a recipe",
    ),
    ("trace_layer.py CUSTOM --top-k 5", "top_k (5)"),
    ("trace_layer.py --tokens 0", "--tokens: 0 must be"),
    ("trace_layer.py --preset all", "preset (all) must be one of qwen3-30b, "),
    ("plan --ranks 2 --tokens 8", "name a --preset, or sizes"),
    (
        "plan --preset olmoe --hidden 8 --ranks 2 --tokens 8",
        "preset (olmoe) and sizes (hidden) exclude each other",
    ),
    (
        "plan --preset olmoe,qwen3-30b --ranks 2 --tokens 8",
        "preset (olmoe,qwen3-30b) must be one of qwen3-30b, ",
    ),
    ("plan CUSTOM --ranks 2 --tokens 8 --capacity-factor 1e300", "must be less than 2**31"),
    (
        "plan CUSTOM --ranks 2 --tokens 8 --hidden 99999999999999999999",
        "hidden (99999999999999999999) must be less than 2**31",
    ),
    (
        "plan CUSTOM --ranks 2 --tokens 800000000 --hidden 2000000000",
        "would need a heap of more than",
    ),
    (
        "plan CUSTOM --ranks 2 --tokens 8 --capacity-factor inf",
        "--capacity-factor: inf must be finite",
    ),
    ("plan CUSTOM --ranks 2 --tokens 8 --layers 0", "num_layers (0) must be at least 1"),
    ("plan CUSTOM --tokens 8 --ranks 3", "must be divisible by the number of ranks (3)"),
    ("plan LARGE --precision fp8", "invalid choice: 'fp8'"),
    (
        "plan LARGE --quantized-wire both",
        "quantized_wire ('both'): precision (None) must be a recipe of E4M3 numbers",
    ),
    (
        "plan LARGE --precision nvfp4 --quantized-wire forward",
        "must be a recipe of E4M3 numbers",
    ),
    (
        "plan LARGE --precision mxfp8 --hidden 2064",
        "hidden (2064) must be a multiple of 32 for MXFP8()",
    ),
    (
        "plan LARGE --ranks 3",
        "num_experts (128) must be divisible by the number of ranks (3)",
    ),
    ("plan LARGE --capacity-factor 0", "--capacity-factor: 0 must be"),
    ("plan LARGE --top-k 200", "top_k (200) must be at most num_experts (128)"),
    ("check missing.py:make --ranks 1", "--ranks: 1 must be an integer greater than 1"),
    *(
        (f"check {target}", f"target ({target}) is no file with :function")
        for target in ("missing.py:make", "model", "train.py", "/missing/model", "./model")
    ),
]


@pytest.mark.parametrize(("command", "text"), WRONG, ids=[command for command, _ in WRONG])
def test_wrong_arguments_are_named(command: str, text: str, monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    words = command.replace("CUSTOM", " ".join(CUSTOM)).replace("LARGE", LARGE).split()
    assert text in last_line_of_error(words, capsys)


SIZES = ["--ranks=8", "--tokens=8192"]


def test_a_plan_by_preset_equals_the_plan_by_sizes(capsys: pytest.CaptureFixture):
    shape = PRESETS["qwen3-30b"]
    sizes = [
        f"--hidden={shape.hidden}",
        f"--ffn={shape.ffn}",
        f"--experts={shape.num_experts}",
        "--top-k=8",
    ]
    output = []
    for layer in (["--preset=qwen3-30b"], sizes):
        for layout in ([], ["--layout=packed"], ["--layout=expert-major"]):
            assert main(["plan", *layer, *layout, *SIZES]) == 0
            output.append(capsys.readouterr().out)
    assert output[:3] == output[3:]
    assert len(set(output)) == 2  # "auto" is one of the two


def test_help_lists_options_and_an_example(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--help"])
    assert ended.value.code == 0
    output = capsys.readouterr().out
    assert "before any allocation" in output
    assert "symmoe plan --preset qwen3-30b --layout packed" in output
    assert "--preset PRESET       one: qwen3-30b, " in output


@pytest.mark.parametrize(
    "words",
    [
        f"plan --preset olmoe {' '.join(SIZES)}",
        pytest.param("plan --help", marks=pytest.mark.slow),
    ],
)
def test_a_closed_pipe_ends_the_command_without_a_traceback(words: str):
    """As `symmoe plan | head -1` does once head has ended."""
    command = [sys.executable, "-m", "symmoe", *words.split()]
    reads, writes = os.pipe()
    os.close(reads)
    process = subprocess.run(
        command, stdout=writes, stderr=-1, timeout=HANG_S, text=True, check=False
    )
    os.close(writes)
    assert process.stderr == ""
