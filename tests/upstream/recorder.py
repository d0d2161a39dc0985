"""A pytest plugin that records the outcome of every test, the reason, and the number of symmoe's calls in it. The
plugins of the projects (swap_megatron.py, swap_transformers.py) count the calls: without them a passed test could be
empty."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest


@dataclass(slots=True)
class Ending:
    """The outcome of one test on one rank."""

    # "passed", "skipped" or "failed"; a test that is expected to fail, and does, counts as skipped
    outcome: str = "passed"
    reason: str = ""  # of a test that has not passed, one line
    num_calls: int = 0  # forward passes of symmoe's layers in the test


class Recorder:
    """Collects outcomes by the test's id; the project's plugin increments `num_calls`."""

    def __init__(self, path: Path) -> None:
        self.num_calls = 0
        self._path, self._endings = path, dict[str, Ending]()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Counts the calls of one test."""
        ending = self._endings.setdefault(item.nodeid, Ending())
        before = self.num_calls
        result = yield
        ending.num_calls = self.num_calls - before
        self._write()  # a later test may hang
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Takes the worst of a test's three phases."""
        ending = self._endings[report.nodeid]
        if report.passed or ending.outcome == "failed":
            return
        ending.outcome, ending.reason = report.outcome, _reason(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported is a failure, by the file's name."""
        if report.failed:
            self._endings[report.nodeid] = Ending(
                "failed", _first_line(report.longreprtext.splitlines()[-1])
            )

    def pytest_sessionfinish(self) -> None:
        """Writes the endings also if no test has been found."""
        self._write()

    def _write(self) -> None:
        """The file is whole at any time: run.py may end this process."""
        partial = self._path.with_suffix(".partial")
        partial.write_text(
            json.dumps({name: asdict(ending) for name, ending in self._endings.items()})
        )
        partial.replace(self._path)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options that run.py gives."""
    parser.addoption(
        "--symmoe-form",
        required=True,
        help="'plain', or which of the project's parts symmoe replaces",
    )
    parser.addoption("--symmoe-endings", required=True, type=Path, help="the file to write")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Starts the recorder."""
    config.pluginmanager.register(Recorder(config.getoption("--symmoe-endings")), "symmoe-recorder")


def recorder_of(config: pytest.Config) -> Recorder:
    """The recorder of this run."""
    recorder: Recorder = config.pluginmanager.get_plugin("symmoe-recorder")
    return recorder


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):  # (file, line, "Skipped: reason")
        return _first_line(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    return _first_line(report.longreprtext if crash is None else crash.message)


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")[:200]
