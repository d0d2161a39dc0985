"""The findings of a check of one subject, and their display."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

LEVELS = ("ok", "note", "problem")
Row = tuple[object, str, str, str]  # condition, level, text, fix


@dataclass(frozen=True)
class Finding:
    """A finding about a subject. Levels: "ok"; "note": the subject works, but could be better, or users should know the
    text; "problem": the subject does not work. `fix` is the command or setting that helps; every problem has one."""

    level: str
    subject: str
    text: str
    fix: str = ""

    def __post_init__(self) -> None:
        assert self.level in LEVELS, self.level
        assert self.fix or self.level != "problem", self.text


def findings_about(subject: str, *rows: Row) -> list[Finding]:
    """The rows with a true condition, as findings about a subject."""
    return [Finding(level, subject, text, fix) for is_so, level, text, fix in rows if is_so]


def first(*rows: Row) -> list[Row]:
    """The first row with a true condition, or none."""
    return [row for row in rows if row[0]][:1]


def first_line(error: Exception) -> str:
    """The first line of an error's text: the texts of torch and NCCL have many."""
    return str(error).split("\n", 1)[0]


def worst_level(findings: Sequence[Finding]) -> str:
    """The worst level of all findings; "ok" if there are none."""
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")


def render(findings: Sequence[Finding]) -> str:
    """The findings on one screen of text. Lines of fixes are not wrapped: users copy them."""
    lines = []
    for finding in findings:
        head = f"{finding.level:<9}{finding.subject:<13}"
        lines.append(
            textwrap.fill(finding.text, 110, initial_indent=head, subsequent_indent=" " * len(head))
        )
        lines += [f"{'':<{len(head)}}-> {finding.fix}"] if finding.fix else []
    notes, problems = (sum(finding.level == level for finding in findings) for level in LEVELS[1:])
    counted = f"{notes} note{'s' * (notes != 1)}"
    verdict = (
        f"{problems} problem{'s' * (problems != 1)}, {counted}: what stands behind -> helps."
        if problems
        else f"No problems, {counted}: symmoe can run here."
    )
    return "\n".join([*lines, "", verdict])
