"""Setup on a new machine: pip can install the packages that `make` requests, and folders may have any name.

A dry run of pip reads only metadata, for every Python that README names, without the user's configuration: a mirror or
a folder of wheels may have another torch than the registry."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from programs import printed_by

from symmoe import __version__

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    "pyproject.toml",
    "requirements-train.txt",
    "requirements.txt",
    "README.md",
    "LICENSE",
    "symmoe/__init__.py",
)
TIMEOUT_S = 800  # 20 s of a processor's time, which on a busy machine are minutes


def pythons() -> list[str]:
    """The Pythons that README names."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    ((first, last),) = set(re.findall(r"Python 3\.(\d+) to 3\.(\d+)", text))
    return [f"3.{minor}" for minor in range(int(first), int(last) + 1)]


def interpreter(python: str) -> str:
    """An interpreter of this version: that of the tests, one on the path, or pyenv's; "" if there is none."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    places = [
        sys.executable,
        shutil.which(f"python{python}"),
        *sorted(versions.glob(f"{python}.*/bin/python")),
    ]
    for candidate in filter(None, places):
        process = subprocess.run(
            [candidate, "--version"], capture_output=True, text=True, timeout=60, check=False
        ).stdout
        if process.startswith(
            f"Python {python}."
        ):  # pyenv's shim of a version that is not chosen says nothing
            return str(candidate)
    return ""


def dry_run(python: str, *requirements: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """pip's report, as JSON in stdout, of an installation by this interpreter into an empty environment."""
    options = ["--dry-run", "--ignore-installed", "--only-binary=:all:", "--quiet", "--report", "-"]
    # Metadata lie beside the wheels; where a mirror does not say so, fast-deps reads them out of the wheels.
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "--isolated",
        "--disable-pip-version-check",
        "install",
        *options,
        "--use-feature",
        "fast-deps",
        *map(str, requirements),
    ]
    environment = os.environ | {
        "XDG_CONFIG_DIRS": os.devnull
    }  # where a machine may say which torch it has
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )


@pytest.fixture(scope="session")
def registry() -> None:
    """Skips the test if the package registry does not answer."""
    pytest.importorskip("pip", minversion="25.3")  # an earlier one downloads all in a dry run
    process = dry_run(
        sys.executable, "--no-deps", "--retries", "0", "--timeout", "15", "setuptools", cwd=ROOT
    )
    if process.returncode:
        pytest.skip(f"pip reaches no registry: {process.stderr.strip()[-300:]}")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """The files of the checkout that pip reads, in a copy: a build writes beside them."""
    for name in SOURCES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize("python", pythons())
def test_requirements_of_make_resolve(registry: None, sources: Path, python: str):
    """Against the registry's torch, which on Linux requires one Triton and CUDA's libraries."""
    if not (python_path := interpreter(python)):
        pytest.skip(f"there is no Python {python} on the path or in pyenv")
    process = dry_run(python_path, "--requirement", "requirements.txt", cwd=sources)
    assert process.returncode == 0, process.stderr[-3000:]
    report = json.loads(process.stdout)
    assert report["environment"]["python_version"] == python
    packages = {item["metadata"]["name"].lower(): item for item in report["install"]}
    requirements = (ROOT / "requirements-train.txt").read_text(encoding="utf-8")
    (torch,) = re.findall(r"^torch==(\S+)", requirements, re.MULTILINE)
    assert packages["torch"]["metadata"]["version"] == torch  # no "+cpu"
    assert packages["torch"]["download_info"]["url"].startswith("https://")
    assert {"symmoe", "triton", "transformers", "megatron-core", "pytest", "mkdocs"} <= set(
        packages
    )


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize(
    ("torch", "extra", "bindings"),
    [("2.14.1", "nvshmem", "nvshmem4py-cu13"), ("2.15.0", "nvshmem-cu12", "nvshmem4py-cu12")],
)
def test_an_installed_torch_is_kept(
    registry: None, sources: Path, torch: str, extra: str, bindings: str
):
    """pip keeps the installed torch: symmoe requires no older one, and its extras resolve with it."""
    if not (python_path := interpreter("3.12") or interpreter("3.11")):
        pytest.skip("there is no Python 3.11 or 3.12")
    process = dry_run(python_path, f"torch=={torch}", f"{sources}[{extra},dev]", cwd=sources)
    assert process.returncode == 0, process.stderr[-3000:]
    everything = [item["metadata"] for item in json.loads(process.stdout)["install"]]
    versions = {package["name"].lower(): package["version"] for package in everything}
    assert versions["torch"].partition("+")[0] == torch
    assert {"symmoe", bindings} <= set(versions)


# Stands for an interpreter: writes down how it was called, and makes environments that have itself.
PYTHON = """#!/bin/sh
printf '%s\\n' "$0|$PYTHONPATH|$*" >>"$CALLS"
if [ "$1 $2" = "-m venv" ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; fi
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder symmoe with make's inputs, below a folder with a space; `python` beside it replaces an interpreter."""
    folder = tmp_path / "a folder" / "symmoe"
    folder.mkdir(parents=True)
    for name in (
        "Makefile",
        "pyproject.toml",
        *(path.name for path in ROOT.glob("requirements*.txt")),
    ):
        shutil.copy(ROOT / name, folder)
    (folder.parent / "python").write_text(PYTHON, encoding="utf-8")
    (folder.parent / "python").chmod(0o755)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    for name in (
        "MAKEFLAGS",
        "MAKELEVEL",
        "MFLAGS",
        "MAKEOVERRIDES",
    ):  # of the make that runs these tests
        monkeypatch.delenv(name, raising=False)
    return folder


def make(checkout: Path, *arguments: str) -> list[tuple[str, str, str]]:
    """(interpreter, first folder of PYTHONPATH, arguments) of every call."""
    if shutil.which("make") is None:
        pytest.skip("needs make")
    command = ["make", f"PYTHON={checkout.parent / 'python'}", "OTHERS=", *arguments]
    process = subprocess.run(
        command, cwd=checkout, capture_output=True, text=True, timeout=60, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    calls = Path(os.environ["CALLS"]).read_text(encoding="utf-8").splitlines()
    Path(os.environ["CALLS"]).unlink()
    parts = (call.split("|", 2) for call in calls)
    return [(python, paths.partition(":")[0], words) for python, paths, words in parts]


@pytest.mark.parametrize("target", ["train", "test", "test-all"])
def test_make_runs_below_a_folder_with_a_space(checkout: Path, target: str):
    calls = make(checkout, target)
    given_python, venv_python = str(checkout.parent / "python"), ".venv/bin/python"
    assert [python for python, _, _ in calls] == [given_python] + [venv_python] * (len(calls) - 1)
    assert {path for _, path, _ in calls} == {str(checkout)}
    arguments = [words for _, _, words in calls]
    set_up = ["-m venv .venv", "-I -m pip install --requirement requirements-train.txt"]
    if target != "train":
        set_up.append("-I -m pip install --requirement requirements.txt")
    if target == "test-all":
        set_up.append(
            "-I -m pip install --quiet --no-deps --requirement requirements-torchtitan.txt"
        )
    assert [words for words in arguments if words.startswith(("-m venv ", "-I -m pip "))] == set_up
    assert arguments[:2] == set_up[:2]
    assert arguments[-1].startswith(
        "-m torch.distributed.run" if target == "train" else "-m pytest tests "
    )
    assert ("-m not gpu" in arguments[-1]) == (target == "test-all")
    again = make(checkout, target)
    assert [words for _, _, words in again] == [words for words in arguments if words not in set_up]


def test_make_test_all_runs_the_core_tests_on_all_installed_pythons(
    checkout: Path, tmp_path: Path, monkeypatch
):
    (tmp_path / "bin").mkdir()
    shutil.copy(checkout.parent / "python", tmp_path / "bin" / "python3.99")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    calls = make(checkout, "test-all", "OTHERS=python3.98 python3.99")
    assert not any("3.98" in python for python, _, _ in calls)
    first = [words for _, _, words in calls].index("-m venv .venv-python3.99")
    assert [words.split()[:3] for _, _, words in calls[first - 2 : first]] == [
        ["-m", "pytest", "tests"],
        ["--version"],
    ]
    python, _, words = calls[-1]
    assert python == ".venv-python3.99/bin/python"
    assert words.startswith("-m pytest tests/project/test_import.py ")
    for path in (word for word in words.split() if word.startswith("tests/")):
        assert (ROOT / path).exists()


def test_a_program_beside_the_checkout_imports_the_package(tmp_path: Path):
    """From an editable install; the folder symmoe beside the program, the checkout, is no package."""
    pytest.importorskip("setuptools", minversion="77")
    checkout = tmp_path / "symmoe"
    shutil.copytree(
        ROOT / "symmoe", checkout / "symmoe", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    build = f"from setuptools.build_meta import build_editable as build; build({str(tmp_path)!r})"
    printed_by("-c", build, cwd=checkout)
    (wheel,) = tmp_path.glob("*.whl")
    shutil.unpack_archive(wheel, tmp_path / "site", "zip")
    (tmp_path / "program.py").write_text(
        "import symmoe\nprint(symmoe.__version__)\n", encoding="utf-8"
    )
    run = f"import runpy, site; site.addsitedir({str(tmp_path / 'site')!r}); runpy.run_path('program.py')"
    paths = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    assert printed_by("-c", run, cwd=tmp_path, env=environment) == f"{__version__}\n"


def test_ci_runs_in_a_folder_named_as_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """CI runs on a copy of tracked and new files below a folder with a space, returns make's exit code, and removes the
    copy."""
    if not (ROOT / ".ci" / "run").exists():
        pytest.skip("an sdist has no hidden files")
    checkout = tmp_path / "checkout"
    for name, text in {
        ".gitignore": (ROOT / ".gitignore").read_text(encoding="utf-8"),
        ".git/HEAD": "ref",
        "new.py": "",
        ".venv/bin/python": "",
        "symmoe/__pycache__/x.pyc": "",
        "runs/model.pt": "",
    }.items():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text(text, encoding="utf-8")
    shutil.copytree(ROOT / ".ci", checkout / ".ci")
    tools, temporary = tmp_path / "tools", tmp_path / "temporary"
    tools.mkdir()
    temporary.mkdir()
    (tools / "make").write_text(
        '#!/bin/sh\npwd\nfind . -type f | sort\necho "$@"\nexit 3\n', encoding="utf-8"
    )
    (tools / "make").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(temporary))
    process = subprocess.run(
        [checkout / ".ci" / "run"], capture_output=True, text=True, timeout=60, check=False
    )
    assert process.returncode == 3, process.stderr
    folder, *files, target = process.stdout.splitlines()
    assert Path(folder).name == "symmoe"
    assert " " in Path(folder).parent.name
    assert Path(folder).is_relative_to(temporary.resolve())
    assert (files, target) == (["./.ci/run", "./.git/HEAD", "./.gitignore", "./new.py"], "test")
    assert list(temporary.iterdir()) == []
