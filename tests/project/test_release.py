"""Wheel and sdist: built from a copy of the checkout, and installed into an environment without the checkout.

The wheel is built from the unpacked sdist, as by `make dist`, so files that the sdist lacks are missing in the wheel,
too. It is installed without dependencies: the new environment uses torch and other packages of these tests."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from limits import HANG_S

import symmoe
from symmoe.tools.doctor.versions import Versions, check_versions

pytest.importorskip("setuptools", minversion="77", reason="builds the package")

from packaging.metadata import Metadata
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
NOT_SOURCES = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs")
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
EXTRAS = {"checkpoint", "dev", "examples", "megatron", "nvshmem", "nvshmem-cu12", "transformers"}
# Their next versions may change what symmoe relies upon.
BOUNDED = {"transformers", "accelerate", "megatron-core", "nvshmem4py-cu13", "nvshmem4py-cu12"}


@dataclass(frozen=True)
class Release:
    wheel: Path
    sdist: Path

    def metadata(self) -> Metadata:
        """The wheel's metadata; raises if a field violates the specification of core metadata."""
        (name,) = (name for name in files_of(self.wheel) if name.endswith(".dist-info/METADATA"))
        with zipfile.ZipFile(self.wheel) as archive:
            return Metadata.from_email(archive.read(name), validate=True)

    def requirements(self, name: str) -> list[Requirement]:
        return [
            requirement for requirement in self.metadata().requires_dist if requirement.name == name
        ]


def run(*command: str | Path, cwd: Path, exit_status: Iterable[int] = (0,)) -> str:
    """The output of a command, which runs without variables that name Python's folders, as `make` sets them."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
    }
    environment["OMP_NUM_THREADS"] = "1"
    process = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert process.returncode in exit_status, process.stdout[-3000:] + process.stderr[-3000:]
    return process.stdout


def files_of(archive: Path) -> set[str]:
    """Names of the files in a wheel or sdist; for the sdist without its top folder."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return {name for name in wheel.namelist() if not name.endswith("/")}
    with tarfile.open(archive) as sdist:
        return {member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout: several builds may run at the same time, and setuptools writes beside pyproject.toml."""
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("sources") / "symmoe", ignore=NOT_SOURCES)


@pytest.fixture(scope="module")
def release(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Release:
    """Wheel and sdist, built in one process by the installed backend."""
    out = tmp_path_factory.mktemp("dist")
    build = """
import os, shutil, sys
from setuptools.build_meta import build_sdist, build_wheel
out, unpacked = sys.argv[1:]
sdist = build_sdist(out)
shutil.unpack_archive(os.path.join(out, sdist), unpacked)
os.chdir(os.path.join(unpacked, sdist.removesuffix(".tar.gz")))
build_wheel(out)
"""
    run(sys.executable, "-c", build, out, tmp_path_factory.mktemp("sdist"), cwd=sources)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return Release(wheel, sdist)


@pytest.fixture(scope="module")
def environment(release: Release, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin` of a new environment with the wheel."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / "bin" / "python"
    pip = (
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-index",
        "--quiet",
    )
    run(*pip, release.wheel, cwd=folder)
    # Folders named in a .pth file come after the environment's own, and .pth files in them (as those of an editable
    # installation of the checkout) have no effect.
    (site_packages,) = folder.glob("lib/python*/site-packages")
    paths = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site_packages / "dependencies.pth").write_text("\n".join(paths) + "\n", encoding="utf-8")
    return python.parent


def test_the_wheel_has_the_package_only(release: Release, sources: Path):
    names = {name for name in files_of(release.wheel) if ".dist-info/" not in name}
    assert names == {
        path.relative_to(sources).as_posix()
        for path in (sources / "symmoe").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "symmoe/py.typed" in names


def test_the_sdist_has_all_tracked_files(release: Release):
    """Except hidden files, so tests in the sdist have their inputs."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    process = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True, check=False
    )
    if process.returncode or not process.stdout:
        pytest.skip("git does not know this folder, so nobody says what belongs to the sources")
    tracked = {
        name
        for name in process.stdout.split("\0")
        if name and not name.startswith(".") and (ROOT / name).exists()
    }
    names = files_of(release.sdist)
    assert tracked - names == set()
    assert {
        "tests/support/oracle.py",
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "pyproject.toml",
    } <= names


def test_metadata(release: Release):
    metadata = release.metadata()
    assert (metadata.name, str(metadata.version)) == ("symmoe", symmoe.__version__)
    assert release.wheel.name == f"symmoe-{symmoe.__version__}-py3-none-any.whl"
    assert release.sdist.name == f"symmoe-{symmoe.__version__}.tar.gz"
    assert metadata.license_expression == "Apache-2.0"
    assert [name for name in files_of(release.wheel) if name.endswith("/licenses/LICENSE")]
    assert "Expert-parallel" in metadata.summary
    assert metadata.description_content_type == "text/markdown"
    assert metadata.description.strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()
    assert set(metadata.provides_extra) >= EXTRAS
    assert "3.9.0" not in metadata.requires_python
    assert all(f"{python}.0" in metadata.requires_python for python in (*PYTHONS, "3.99"))
    named = [
        c.rpartition(" ")[2] for c in metadata.classifiers if re.fullmatch(r".*Python :: 3\.\d+", c)
    ]
    assert named == list(PYTHONS)
    for url in (metadata.project_urls or {}).values():
        assert re.match(r"https://[\w-]+(\.[\w-]+)*\.(org|com|io|dev)/", url), url


def versions_tested(label: str) -> list[str]:
    """Versions in the row of the README's table "In a trainer" that begins with `label`."""
    (row,) = re.findall(
        rf"^\| {re.escape(label)} \|([^|]*)\|",
        (ROOT / "README.md").read_text("utf-8"),
        re.MULTILINE,
    )
    versions = re.findall(r"\d+(?:\.\d+)+", row)
    assert versions
    return versions


def test_version_ranges_include_tested_versions_and_end(release: Release):
    for name, label in (
        ("torch", "FSDP2, DDP, DCP, torch.compile"),
        ("transformers", "transformers"),
    ):
        (requirement,) = release.requirements(name)
        for version in versions_tested(label):
            assert version in requirement.specifier, f"{name} {version}"
    for python in PYTHONS:
        where = {"python_version": python, "extra": "megatron"}
        chosen = [
            entry for entry in release.requirements("megatron-core") if entry.marker.evaluate(where)
        ]
        assert len(chosen) == (python != "3.14"), python  # for which there is none
        for entry in chosen:
            assert [v for v in versions_tested("Megatron-Core") if v in entry.specifier], python
    for requirement in release.metadata().requires_dist:
        assert requirement.name not in BOUNDED or "99" not in requirement.specifier, (
            f"{requirement} has no end"
        )
    assert {requirement.name for requirement in release.metadata().requires_dist} >= BOUNDED


@pytest.mark.parametrize("version", ["2.10.1", "2.11.0", "2.13.1", "2.15.0", "2.99.0"])
def test_doctor_has_the_range_of_torch(release: Release, version: str):
    (requirement,) = release.requirements("torch")
    findings = check_versions(
        Versions(installed={"torch": version}, torch_cuda=None), has_gpu=False
    )
    refused = [
        finding for finding in findings if finding.level == "problem" and "torch" in finding.text
    ]
    assert bool(refused) == (version not in requirement.specifier)


# In one process: the import, a step of a layer, and the command.
PROGRAM = """
import runpy, sys
import symmoe
print(symmoe.__version__, symmoe.__file__, "torch" in sys.modules)
import torch
with symmoe.SymmetricHeap(num_bytes=1 << 20, backend="host") as heap:
    layer = symmoe.MoELayer(symmoe.MoEConfig(hidden=16, ffn=24, num_experts=4, top_k=2), heap)
    y, _ = layer(torch.randn(6, 16))
    y.square().sum().backward()
    print(*(bool(p.grad.any() and p.grad.isfinite().all()) for p in layer.parameters()))
del layer, y
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_the_installed_package_trains_and_has_the_command(environment: Path, tmp_path: Path):
    """Tests of the checkout, whose files the wheel has, prove correct results."""
    command = (environment / "symmoe", "doctor", "--no-self-test", "--json")
    # 1: there is a problem with this machine, which is its own.
    printed = run(environment / "python", "-c", PROGRAM, *command, cwd=tmp_path, exit_status=(0, 1))
    first, second, report = printed.split("\n", 2)
    version, file, has_torch = first.split()
    assert (version, has_torch) == (symmoe.__version__, "False")
    assert Path(file).is_relative_to(environment.parent)
    assert second.split() == ["True"] * 3
    (versions,) = (
        finding["text"]
        for finding in json.loads(report)["findings"]
        if finding["level"] == "ok" and finding["subject"] == "versions"
    )
    assert versions.startswith(f"symmoe {symmoe.__version__}, torch {torch.__version__}, ")
    assert os.access(command[0], os.X_OK)
