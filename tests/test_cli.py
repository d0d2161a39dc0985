"""Wrong arguments of the command `symmoe`: one line that says what is wrong, and exit status 2; never a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from symmoe.cli import main

SIZES = ["--hidden=32", "--ffn=16", "--experts=4", "--top-k=2", "--tokens=8"]
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
@pytest.mark.parametrize(
    "command",
    [["plot", "load", "--png=x.png"], ["plot", "bench", "--out=x"], ["bench", "--load"], ["doctor", "--read"]],
)
def test_files_that_are_something_else(command: list[str], name: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    path = tmp_path / name
    if name in FILES:
        path.write_bytes(FILES[name])
    assert str(path) in complaint([*command, str(path)], capsys)


@pytest.mark.parametrize("option", ["--json=nowhere/x.json", "--plot=nowhere/x.png"])
def test_a_benchmark_that_could_not_be_kept_is_not_begun(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.chdir(tmp_path)
    assert "cannot be written" in complaint(["bench", "gemm", *SIZES, option], capsys)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--capacity-factor=1e300", "would need a heap of more than"),
        ("--hidden=99999999999999999999", "would need a heap of more than"),
        ("--tokens=99999999999999999999", "would need a heap of more than"),
        ("--capacity-factor=inf", "must be finite"),
        ("--layers=0", "num_layers (0) must be at least 1"),
        ("--ranks=3", "must be divisible by num_ranks (3)"),
    ],
)
def test_sizes_that_no_machine_has(option: str, text: str, capsys: pytest.CaptureFixture):
    assert text in complaint(["plan", *SIZES, "--ranks=2", option], capsys)


def test_a_heap_without_end(capsys: pytest.CaptureFixture):
    assert "heap-gib (inf) must be" in complaint(["bench", "gemm", *SIZES, "--heap-gib=inf"], capsys)


def test_a_picture_that_has_no_place(tmp_path: Path, capsys: pytest.CaptureFixture):
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 1, "expert_load": [[1, 2]]}\n')
    assert "nowhere" in complaint(["plot", "load", str(log), "--png", str(tmp_path / "nowhere" / "x.png")], capsys)
