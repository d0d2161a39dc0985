"""The result of a check of one subject, and how such findings are shown."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

LEVELS = ("ok", "note", "problem")
_WIDTH = 110
_INDENT = max(map(len, LEVELS)) + 2
_SUBJECT = 13  # the longest subject, and two spaces


@dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
        level: "ok"; "note": it works, but not as well as it could, or is worth knowing; "problem": it does not work.
        subject: what was checked.
        text: what was found.
        fix: the command or setting that helps; every problem has one.
    """

    level: str
    subject: str
    text: str
    fix: str = ""

    def __post_init__(self) -> None:
        assert self.level in LEVELS, self.level
        assert self.fix or self.level != "problem", self.text


def worst_level(findings: Sequence[Finding]) -> str:
    """The worst level of all findings; "ok" if there are none."""
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")


def render(findings: Sequence[Finding]) -> str:
    """One screen of text. Fixes are not wrapped, so that users can copy them."""
    lines = []
    for finding in findings:
        head = f"{finding.level:<{_INDENT}}{finding.subject:<{_SUBJECT}}"
        lines.append(textwrap.fill(finding.text, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head)))
        if finding.fix:
            lines.append(f"{'':<{len(head)}}-> {finding.fix}")
    return "\n".join([*lines, "", _verdict(findings)])


def _verdict(findings: Sequence[Finding]) -> str:
    counts = {level: sum(finding.level == level for finding in findings) for level in LEVELS}
    notes = "1 note" if counts["note"] == 1 else f"{counts['note']} notes"
    if not counts["problem"]:
        return f"No problems, {notes}: symmoe can run here."
    problems = "1 problem" if counts["problem"] == 1 else f"{counts['problem']} problems"
    return f"{problems}, {notes}: what stands behind -> helps."
