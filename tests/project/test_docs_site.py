"""Links of README.md and docs have targets, in the repository and on the site. mkdocs builds the site without warnings,
with every public name in the reference, and with pages only."""

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from limits import HANG_S

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = (
    "",
    ".checkpoint",
    ".integrations.megatron",
    ".integrations.transformers",
    ".precision",
    ".timeline",
)
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def headings(page: Path) -> list[str]:
    """The texts of a page's headings, without lines in code blocks."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"^#+ (.+)$", text, re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors of headings that the repository's pages and mkdocs share. They differ in spaces around omitted
    characters."""
    plain = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings(page)]
    repository = {re.sub(r"\s", "-", heading) for heading in plain}
    return repository & {re.sub(r"[-\s]+", "-", heading) for heading in plain}


def has_target(page: Path, link: str) -> bool:
    """Whether a link of a page is a web address, or has a file and a heading that exist."""
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    return bool(re.match(r"https?://", link)) or (
        target.exists() and (not anchor or anchor in anchors(target))
    )


def broken_links(page: Path, text: str) -> list[str]:
    """Links in this text of a page, pictures too, to files or headings that do not exist."""
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not has_target(page, link)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_have_targets(page: Path):
    assert broken_links(page, page.read_text("utf-8")) == []


def test_a_broken_link_is_reported():
    """Negative control."""
    page = ROOT / "docs" / "index.md"
    wrong = ["start.md#no-such-heading", "no-such-page.md", "images/no-such.png"]
    text = "".join(f"[x]({link}) " for link in (*wrong, "start.md#install", "#symmoe"))
    assert broken_links(page, text) == wrong


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="make docs, or pip install '.[docs]'")
    pytest.importorskip("mkdocstrings")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, *"-m mkdocs build --strict --config-file".split()]
    result = subprocess.run(
        [*command, ROOT / "mkdocs.yml", "--site-dir", folder],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    assert result.returncode == 0, result.stderr
    return folder


def public_names() -> list[str]:
    """Everything in an `__all__` of PUBLIC, and every exception."""
    names = [
        f"symmoe{package}.{name}"
        for package in PUBLIC
        for name in importlib.import_module(f"symmoe{package}").__all__
    ]
    errors = ast.parse((ROOT / "symmoe" / "errors.py").read_text())
    return names + [
        f"symmoe.errors.{node.name}" for node in errors.body if isinstance(node, ast.ClassDef)
    ]


def missing(reference: str) -> list[str]:
    """Public names without a heading of their own."""
    return [name for name in public_names() if f'id="{name}"' not in reference]


@pytest.mark.slow
def test_the_site_has_pages_pictures_and_linked_files_only(site: Path):
    assert [path for path in site.rglob("*") if path.suffix in (".pyc", ".md")] == []
    assert (site / "index.html").is_file()


@pytest.mark.slow
def test_the_reference_has_every_public_name(site: Path):
    reference = "".join(page.read_text() for page in (site / "api").glob("*.html"))
    assert len(public_names()) > 80
    assert not missing(reference)
    assert missing(reference.replace('id="symmoe.MoELayer"', "")) == [
        "symmoe.MoELayer"
    ]  # negative control
