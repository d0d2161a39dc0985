"""What a new machine meets first: whether pip can install what `make` wants, and folders with any name. pip is asked
for every Python that README names, in a dry run that reads metadata alone, and without the user's configuration: a
mirror or a folder of wheels may have another torch than everybody else gets."""

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
    """One of this version: that of the tests, one on the path, or pyenv's; "" if there is none."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    places = [
        sys.executable,
        shutil.which(f"python{python}"),
        *sorted(versions.glob(f"{python}.*/bin/python")),
    ]
    for place in filter(None, places):
        said = subprocess.run(
            [place, "--version"], capture_output=True, text=True, timeout=60, check=False
        ).stdout
        if said.startswith(
            f"Python {python}."
        ):  # pyenv's shim of a version that is not chosen says nothing
            return str(place)
    return ""


def dry_run(python: str, *what: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """pip's answer, a report as JSON in stdout, to what this interpreter would install into an empty environment."""
    how = ["--dry-run", "--ignore-installed", "--only-binary=:all:", "--quiet", "--report", "-"]
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
        *how,
        "--use-feature",
        "fast-deps",
        *map(str, what),
    ]
    environment = os.environ | {
        "XDG_CONFIG_DIRS": os.devnull
    }  # where a machine may say which torch it has
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )


@pytest.fixture(scope="session")
def registry() -> None:
    """One that answers."""
    pytest.importorskip("pip", minversion="25.3")  # an earlier one downloads all in a dry run
    done = dry_run(
        sys.executable, "--no-deps", "--retries", "0", "--timeout", "15", "setuptools", cwd=ROOT
    )
    if done.returncode:
        pytest.skip(f"pip reaches no registry: {done.stderr.strip()[-300:]}")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """What pip reads of the checkout; building writes beside it."""
    for name in SOURCES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize("python", pythons())
def test_what_make_installs_resolves(registry: None, sources: Path, python: str):
    """Against torch as the registry has it, which on Linux asks for one Triton and for CUDA's libraries."""
    if not (place := interpreter(python)):
        pytest.skip(f"there is no Python {python} on the path or in pyenv")
    done = dry_run(place, "--requirement", "requirements.txt", cwd=sources)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["environment"]["python_version"] == python
    actual = {item["metadata"]["name"].lower(): item for item in report["install"]}
    requirements = (ROOT / "requirements-train.txt").read_text(encoding="utf-8")
    (torch,) = re.findall(r"^torch==(\S+)", requirements, re.MULTILINE)
    assert actual["torch"]["metadata"]["version"] == torch  # no "+cpu"
    assert actual["torch"]["download_info"]["url"].startswith("https://")
    assert {"symmoe", "triton", "transformers", "megatron-core", "pytest", "mkdocs"} <= set(actual)


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize(
    ("torch", "extra", "bindings"),
    [("2.14.1", "nvshmem", "nvshmem4py-cu13"), ("2.15.0", "nvshmem-cu12", "nvshmem4py-cu12")],
)
def test_a_users_torch_stays(registry: None, sources: Path, torch: str, extra: str, bindings: str):
    """What is installed is wanted as it is: symmoe asks for no older torch, and its extras resolve beside it."""
    if not (place := interpreter("3.12") or interpreter("3.11")):
        pytest.skip("there is no Python 3.11 or 3.12")
    done = dry_run(place, f"torch=={torch}", f"{sources}[{extra},dev]", cwd=sources)
    assert done.returncode == 0, done.stderr[-3000:]
    everything = [item["metadata"] for item in json.loads(done.stdout)["install"]]
    actual = {each["name"].lower(): each["version"] for each in everything}
    assert actual["torch"].partition("+")[0] == torch
    assert {"symmoe", bindings} <= set(actual)


# Stands for an interpreter: writes down how it was called, and makes environments that have itself.
PYTHON = """#!/bin/sh
printf '%s\\n' "$0|$PYTHONPATH|$*" >>"$CALLS"
if [ "$1 $2" = "-m venv" ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; fi
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder symmoe below one with a space, with what make reads; `python` beside it stands for an interpreter."""
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
    done = subprocess.run(
        command, cwd=checkout, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    calls = Path(os.environ["CALLS"]).read_text(encoding="utf-8").splitlines()
    Path(os.environ["CALLS"]).unlink()
    parts = (call.split("|", 2) for call in calls)
    return [(python, paths.partition(":")[0], words) for python, paths, words in parts]


@pytest.mark.parametrize("target", ["train", "test", "test-all"])
def test_make_runs_below_a_folder_with_a_space(checkout: Path, target: str):
    calls = make(checkout, target)
    theirs, ours = str(checkout.parent / "python"), ".venv/bin/python"
    assert [python for python, _, _ in calls] == [theirs] + [ours] * (len(calls) - 1)
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


def test_test_all_runs_the_core_tests_on_other_pythons_that_are_found(
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


def test_a_program_beside_the_checkout_finds_the_package(tmp_path: Path):
    """Of an editable install; the folder symmoe beside the program, the checkout, is no package."""
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
    ours = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(ours)}
    assert printed_by("-c", run, cwd=tmp_path, env=environment) == f"{__version__}\n"


def test_ci_runs_in_a_folder_named_as_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A copy of what is tracked or new, below a folder with a space; its exit code is make's, and nothing is left."""
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
    done = subprocess.run(
        [checkout / ".ci" / "run"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 3, done.stderr
    place, *files, target = done.stdout.splitlines()
    assert Path(place).name == "symmoe"
    assert " " in Path(place).parent.name
    assert Path(place).is_relative_to(temporary.resolve())
    assert (files, target) == (["./.ci/run", "./.git/HEAD", "./.gitignore", "./new.py"], "test")
    assert list(temporary.iterdir()) == []
