"""docs/troubleshooting.md has every class of error, and a text, a cause and a fix for each.

That each of these errors arises, and that the next correct call works, the tests of its subject show.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from symmoe import errors

PAGE = Path(__file__).resolve().parent.parent / "docs" / "troubleshooting.md"
OTHERS = {"RuntimeError", "AttributeError", "UserWarning"}  # sections that are not about an error of symmoe's
ENTRY = re.compile(r"\* \*\*([^*]+)\.\*\* `[^`]+` .*\*Cause:\* .+ \*Fix:\* .+")


def problems_of(page: str) -> list[str]:
    """Classes without a section, sections without an entry, entries that are not whole or that are there twice."""
    classes = {c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.SymmoeError)}
    raised = classes - {base for c in classes for base in c.__bases__} | {errors.ArgumentError}
    sections = dict(section.split("\n", 1) for section in re.split(r"^## ", page, flags=re.M)[1:])
    problems = [f"class: {name}" for name in sections.keys() ^ ({c.__name__ for c in raised} | OTHERS)]
    headings = []
    for name, text in sections.items():
        entries = [" ".join(entry.split()) for entry in re.findall(r"^\* .*\n(?:  .*\n)*", text, re.M)]
        found = [ENTRY.fullmatch(entry) for entry in entries]
        headings += [match[1] for match in found if match]
        problems += [] if found and all(found) else [f"entries of {name}"]
    return problems + [f"twice: {heading}" for heading in headings if headings.count(heading) > 1]


def test_every_class_is_on_the_page_and_every_entry_is_whole():
    page = PAGE.read_text(encoding="utf-8")
    assert problems_of(page) == []
    # Negative controls.
    assert problems_of(page.replace("## StaleRows\n", "## StaleRow\n")) != []
    assert problems_of(page.replace("*Fix:*", "*What to do:*", 1)) != []
    assert problems_of(page + "\n## UserWarning\n") != []
    assert problems_of(page + page[page.rindex("* **") :]) != []
