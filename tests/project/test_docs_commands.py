"""The commands in README.md and docs/*.md: the command's own parser accepts them, or their files and options exist."""

import argparse
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import bench
import pytest
import trace_layer

from symmoe.cli import main
from symmoe.tools.shapes import add_options

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TOOLS = "symmoe|torchrun|make|pip|pytest|python"
YOURS = {"train.py"}  # files of the reader


def lines(text: str) -> Iterator[str]:
    """Indented lines, joined with lines that a backslash continues, and code spans within paragraphs."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from re.findall(r"^ {4,}(.*)$", re.sub(r"\\\n\s*", "", text), re.MULTILINE)
    yield from (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text))


def words_of(line: str) -> list[str]:
    """The words of a command, without prompt, comment, and brackets around optional parts; [] if the line is no
    command."""
    line = line.removeprefix("$ ")
    if not re.match(rf"({TOOLS}) |benchmarks/\S+\.sh", line):
        return []
    command = re.split(r"\s+#|\s{3,}", line)[0]
    return shlex.split(re.sub(r"[\[\]](?=[-\s]|$)", "", command))


def commands() -> list[tuple[str, tuple[str, ...]]]:
    """(page, words) of every command."""
    pairs = [
        (page.relative_to(ROOT).as_posix(), tuple(words))
        for page in PAGES
        for line in lines(page.read_text(encoding="utf-8"))
        if (words := words_of(line))
    ]
    return list(dict.fromkeys(pairs))


def after_launcher(words: tuple[str, ...]) -> tuple[str, ...]:
    """The words after torchrun or python and its options: the program and its arguments."""
    if words[0] not in ("torchrun", "python"):
        return words
    remaining = tuple(itertools.dropwhile(lambda word: word.startswith("--"), words[1:]))
    return remaining[1:] if remaining[:1] == ("-m",) else remaining


COMMANDS = [(page, words, after_launcher(words)) for page, words in commands()]
SYMMOE_COMMANDS = sorted({words for _, _, words in COMMANDS if words[:1] == ("symmoe",)})
SCRIPTS = sorted(
    {to for _, _, to in COMMANDS if to and to[0].endswith((".py", ".sh")) and to[0] not in YOURS}
)


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch):
    """The arguments that `main` parses, without running the command."""
    parse_args = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
        arguments = parse_args(parser, argv)
        arguments.run = lambda _: 0
        return arguments

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    return main


@pytest.mark.parametrize("words", SYMMOE_COMMANDS, ids=" ".join)
def test_commands_of_symmoe_parse(
    parse, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
):
    arguments = list(words[1:])
    if (
        words[-1].startswith("--") or len(words) < 4
    ):  # a command or an option that a sentence speaks of
        with pytest.raises(SystemExit) as ended:
            parse([arguments[0], "--help"])
        assert ended.value.code == 0
        shown = capsys.readouterr().out
        assert all(word in shown for word in arguments if word.startswith("--"))
    else:
        assert parse(arguments) == 0


@pytest.mark.parametrize("words", SCRIPTS, ids=" ".join)
def test_scripts_exist_and_have_these_options(words: tuple[str, ...]):
    if program := {"benchmarks/bench.py": bench, "benchmarks/trace_layer.py": trace_layer}.get(
        words[0]
    ):
        add_options(parser := argparse.ArgumentParser(), program.OPTIONS)
        assert set(vars(parser.parse_args(words[1:])).get("suites", ())) <= set(bench.SUITES)
        return
    text = (ROOT / words[0]).read_text(encoding="utf-8")
    for word in words[1:]:
        if word.startswith("--"):  # an option, or a field of a dataclass that options are made from
            field = word[2:].replace("-", "_")
            assert re.search(rf'"{word}"|^    {field}: ', text, re.MULTILINE), word


def test_targets_modules_and_extras_exist():
    makefile = (ROOT / "Makefile").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    for page, words, arguments in COMMANDS:
        if words[0] == "make":
            assert re.search(rf"^([\w-]+ )*{words[1]}( [\w-]+)*:", makefile, re.MULTILINE), (
                page,
                words,
            )
        elif words[0] == "pip":
            extras = re.findall(r"(?:symmoe|\.)\[([\w,]+)\]", " ".join(words))
            missing = [
                extra
                for extra in re.findall(r"\w+", ",".join(extras))
                if not re.search(rf"^{extra} = \[", project, re.MULTILINE)
            ]
            assert not missing, (page, words)
        elif words[0] == "pytest":
            assert all((ROOT / word).exists() for word in words[1:] if "/" in word), (page, words)
        elif arguments and re.fullmatch(r"tests(\.\w+)+", arguments[0]):
            path = ROOT / arguments[0].replace(".", "/")
            assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), (
                page,
                words,
            )


@pytest.mark.parametrize(("page", "number"), [("tuning", 1), ("nodes", 1), ("layouts", 2)])
def test_a_page_shows_the_output_of_symmoe_plan(
    page: str, number: int, capsys: pytest.CaptureFixture[str]
):
    """A line of three dots stands for omitted lines."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    shown = re.findall(r"^    \$ symmoe (plan (?:.*\\\n)*.*)\n((?:    .*\n)+)", text, re.MULTILINE)
    assert len(shown) == number
    for command, lines_shown in shown:
        assert main(shlex.split(command)) == 0
        parts = re.sub(r"^    ", "", lines_shown, flags=re.MULTILINE).split("...\n")
        assert re.fullmatch("(?:.*\n)+".join(map(re.escape, parts)), capsys.readouterr().out)


def test_a_wrong_command_does_not_parse(parse, capsys: pytest.CaptureFixture[str]):
    """Negative control."""
    assert len(SYMMOE_COMMANDS) >= 15
    assert len(SCRIPTS) >= 8
    (plan,) = (
        words for words in SYMMOE_COMMANDS if words[1] == "plan" and "--micro-batches" in words
    )
    for wrong in ([*plan[1:], "--layer", "x"], [*plan[1:-2], "--micro-batch-size", "4"], ["plam"]):
        with pytest.raises(SystemExit) as ended:
            parse(wrong)
        assert ended.value.code == 2
    capsys.readouterr()
