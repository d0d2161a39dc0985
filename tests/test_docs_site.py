"""The site that mkdocs builds: no warning, every public name in the reference, nothing from other machines."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from limits import HANG_S

pytest.importorskip("mkdocs", reason="make docs, or pip install 'symmoe[docs]'")
pytest.importorskip("mkdocstrings")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
PUBLIC = ("", ".checkpoint", ".integrations.megatron", ".integrations.transformers", ".precision", ".timeline")


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config), "--site-dir", str(site)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    result = build(ROOT / "mkdocs.yml", folder)
    assert result.returncode == 0, result.stderr
    return folder


def public_names() -> list[str]:
    """Everything in an `__all__` of PUBLIC, and every exception, without importing them."""
    names = []
    for package in PUBLIC:
        tree = ast.parse((ROOT / f"symmoe{package}".replace(".", "/") / "__init__.py").read_text())
        (exported,) = (
            node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
        )
        names += [f"symmoe{package}.{name}" for name in ast.literal_eval(exported)]
    errors = ast.parse((ROOT / "symmoe" / "errors.py").read_text())
    return names + [f"symmoe.errors.{node.name}" for node in errors.body if isinstance(node, ast.ClassDef)]


def missing(reference: str) -> list[str]:
    """Public names without a heading of their own."""
    return [name for name in public_names() if f'id="{name}"' not in reference]


def test_the_reference_has_every_public_name(site: Path):
    reference = "".join(page.read_text() for page in (site / "api").glob("*.html"))
    assert len(public_names()) > 80
    assert not missing(reference)
    assert missing(reference.replace('id="symmoe.MoELayer"', "")) == ["symmoe.MoELayer"]  # negative control


def test_pages_are_whole(site: Path):
    pages = {path.relative_to(site): path.read_text() for path in site.rglob("*.html")}
    assert len(pages) == 1 + len(list((ROOT / "docs").rglob("*.md")))  # and 404.html
    for path, html in pages.items():
        assert not re.search(r":(class|meth|func|data):", html), path
        assert not re.search(r"<(?:script|link|img)[^>]+(?:src|href)=\"(?:https?:)?//", html), path
    for target in re.findall(r'href="(examples/[^"]+)"', "".join(pages.values())):
        assert (site / target).read_text() == (ROOT / target).read_text()
    assert (site / "images" / "data-flow.svg").is_file()


@pytest.mark.parametrize("wrong", ["[x](no-such-page.md)", "[x](index.md#no-such-part)", "[x](../examples/no_such.py)"])
def test_a_broken_link_fails_the_build(tmp_path: Path, wrong: str):
    """Negative control."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Title\n\n{wrong}\n")
    validation = re.search(r"^validation:\n(?:  .*\n)+", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)[0]
    hook = ROOT / "docs" / "site.py"
    config = tmp_path / "mkdocs.yml"
    config.write_text(f"site_name: x\ndocs_dir: docs\nhooks: ['{hook}']\nplugins: []\n{validation}")
    result = build(config, tmp_path / "site")
    assert result.returncode == 1
    assert "no-such" in result.stderr or "no_such" in result.stderr
