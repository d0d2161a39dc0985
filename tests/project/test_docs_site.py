"""The site that mkdocs builds: no warning, every public name in the reference, nothing from other machines."""

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from limits import HANG_S

pytest.importorskip("mkdocs", reason="make docs, or pip install '.[docs]'")
pytest.importorskip("mkdocstrings")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = (
    "",
    ".checkpoint",
    ".integrations.megatron",
    ".integrations.transformers",
    ".precision",
    ".timeline",
)


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "--strict",
            "--config-file",
            str(config),
            "--site-dir",
            str(site),
        ],
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
    """Everything in an `__all__` of PUBLIC, and every exception."""
    modules = [importlib.import_module(f"symmoe{package}") for package in PUBLIC]
    names = [f"{module.__name__}.{name}" for module in modules for name in module.__all__]
    errors = ast.parse((ROOT / "symmoe" / "errors.py").read_text())
    return names + [
        f"symmoe.errors.{node.name}" for node in errors.body if isinstance(node, ast.ClassDef)
    ]


def missing(reference: str) -> list[str]:
    """Public names without a heading of their own."""
    return [name for name in public_names() if f'id="{name}"' not in reference]


def test_the_reference_has_every_public_name(site: Path):
    reference = "".join(page.read_text() for page in (site / "api").glob("*.html"))
    assert len(public_names()) > 80
    assert not missing(reference)
    assert missing(reference.replace('id="symmoe.MoELayer"', "")) == [
        "symmoe.MoELayer"
    ]  # negative control
