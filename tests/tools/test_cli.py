"""Wrong arguments of the command `symmoe`: one line that says what is wrong, and exit status 2; never a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from symmoe.cli import main

FILES = {
    "nested.json": b"[" * 100_000 + b"\n",
    "binary.json": b"\x00\xff\xfe\n",
    "empty.json": b"{}\n",
    "cut.json": b'[{"suite"',
}


def complaint(arguments: list[str], capsys: pytest.CaptureFixture) -> str:
    """The line that it ends with."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("symmoe: error: ")
    return line


@pytest.mark.parametrize("name", [*FILES, "missing.json", "."])
def test_files_that_are_something_else(name: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    path = tmp_path / name
    if name in FILES:
        path.write_bytes(FILES[name])
    assert str(path) in complaint(["doctor", "--read", str(path)], capsys)


CUSTOM = ["--hidden=16", "--ffn=8", "--experts=4", "--top-k=2"]
WRONG = [
    ("bench layers", "suite (layers) must be of steps, layer, or all"),
    ("bench --preset qwen", "preset (qwen) must be of qwen3-30b"),
    ("bench --skew flat", "skew (flat) must be of uniform, zipf, hot"),
    ("bench --tokens 12,many", "tokens (many) must be comma-separated whole numbers"),
    ("bench --tokens 0", "tokens (0) must be at least 1"),
    ("bench --hidden 16", "explicit sizes also need --ffn, --experts, --top-k"),
    ("bench CUSTOM --preset olmoe", "preset (olmoe) and sizes (hidden, ffn, experts, top_k) exclude each other"),
    ("bench CUSTOM --top-k 5", "top-k (5) must be in [1, experts (4)]"),
    ("bench CUSTOM --ffn 0", "ffn (0) must be at least 1"),
    ("bench --repetitions 0", "repetitions (0) must be greater than 0"),
    ("bench --heap-gib -1", "heap-gib (-1.0) must be greater than 0"),
    ("bench --heap-gib inf", "heap-gib (inf) must be"),
    ("bench CUSTOM --json nowhere/x.json", "cannot be written"),  # before anything is measured
    ("trace CUSTOM --quantized-wire both", "quantized_wire ('both'): precision (None) must be a recipe"),
    ("trace CUSTOM --top-k 5", "top_k (5)"),
    ("trace --tokens 0", "tokens (0) must be at least 1"),
    ("trace --preset all", "preset (all) must be one"),
    ("plan CUSTOM --ranks 2 --tokens 8 --capacity-factor 1e300", "would need a heap of more than"),
    ("plan CUSTOM --ranks 2 --tokens 8 --hidden 99999999999999999999", "would need a heap of more than"),
    ("plan CUSTOM --ranks 2 --tokens 99999999999999999999", "would need a heap of more than"),
    ("plan CUSTOM --ranks 2 --tokens 8 --capacity-factor inf", "must be finite"),
    ("plan CUSTOM --ranks 2 --tokens 8 --layers 0", "num_layers (0) must be at least 1"),
    ("plan CUSTOM --tokens 8 --ranks 3", "must be divisible by the number of ranks (3)"),
]


@pytest.mark.parametrize(("command", "text"), WRONG, ids=[command for command, _ in WRONG])
def test_wrong_arguments_are_named(command: str, text: str, capsys: pytest.CaptureFixture):
    assert text in complaint(command.replace("CUSTOM", " ".join(CUSTOM)).split(), capsys)
