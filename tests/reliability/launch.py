"""Ranks for suites that stop, kill and restart them. torchrun is unsuitable: it kills the survivors.

The process that uses this module never touches a GPU. Every rank leads its own session, and every wait has a deadline.
A rank that exceeds a deadline writes its stacks to its log. Only these ranks are killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]
_START_S = {"cpu": 600.0, "cuda": 120.0}
_END_S = {"cpu": 3.0, "cuda": 10.0}
# NVML: else torch.cuda.is_available() in the nursery would start CUDA there, and its forks could not use the GPU.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
_LOG_TAIL = 4000  # characters of a rank's log that a failure shows


class JobFailure(AssertionError):
    """A rank died, raised or did not answer in time; the text has the end of every rank's log."""


class Launcher:
    """Starts jobs. A context: its end ends all started processes."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="symmoe-reliability-")
        parent_socket, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests = parent_socket
        paths = [_TESTS, _TESTS / "support", _TESTS.parent, os.environ.get("PYTHONPATH", "")]
        path = os.pathsep.join(map(str, paths))
        self._nursery = subprocess.Popen(
            [sys.executable, "-m", "reliability.nursery", str(child_socket.fileno())],
            pass_fds=[child_socket.fileno()],
            env={**os.environ, "PYTHONPATH": path, **_ENVIRONMENT},
            start_new_session=True,
        )
        child_socket.close()
        self._lock = threading.Lock()  # jobs may be started and watched in several threads
        self._num_jobs = 0

    def start(self, num_ranks: int, device: str) -> Job:
        """A job of `num_ranks` new processes, joined by gloo on loopback. On "cuda" rank r uses GPU r."""
        with self._lock:
            self._num_jobs += 1
            folder = Path(self._folder.name, f"job-{self._num_jobs}")
        folder.mkdir()
        return Job(self, num_ranks, device, folder)

    def start_rank(self, request: dict, file: int) -> int:
        """Starts a rank, which communicates with the launcher through `file`, and returns its pid."""
        with self._lock:
            socket.send_fds(
                self._requests, [json.dumps({"do": "start", **request}).encode()], [file]
            )
            return json.loads(self._requests.recv(1 << 16))

    def exit_code(self, pid: int) -> int | None:
        """Of a rank, once; None while it runs."""
        with self._lock:
            self._requests.send(json.dumps({"do": "poll", "pid": pid}).encode())
            return json.loads(self._requests.recv(1 << 16))

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *exc: object) -> None:
        self._requests.close()  # the nursery ends, and with it every rank that is left
        try:
            self._nursery.wait(10.0)
        except subprocess.TimeoutExpired:
            self._nursery.kill()
            self._nursery.wait()
        self._folder.cleanup()


class Job:
    """Some ranks; made by :meth:`Launcher.start`. A context that ends them.

    Attributes:
        pids: of the ranks; each is its session's id as well.
    """

    def __init__(self, launcher: Launcher, num_ranks: int, device: str, folder: Path) -> None:
        self._launcher, self._folder = launcher, folder
        self.num_ranks, self.device = num_ranks, device
        self.pids: list[int] = []
        self._connections = []
        self._exit_codes: dict[int, int] = {}
        for rank in range(num_ranks):
            parent_pipe, child_pipe = Pipe()
            request = {
                "rank": rank,
                "num_ranks": num_ranks,
                "device": device,
                "store": str(folder / "store"),
                "log": str(self._log(rank)),
            }
            self._connections.append(parent_pipe)
            self.pids.append(launcher.start_rank(request, child_pipe.fileno()))
            child_pipe.close()
        deadline = time.monotonic() + _START_S[device]
        for rank in range(num_ranks):
            self._receive(rank, deadline)

    def stream(
        self, function: Callable[..., Iterator], *arguments, deadline_s: float
    ) -> Iterator[list]:
        """What `function(rank, num_ranks, *arguments)` yields on the ranks: a list in rank order for every yield.

        Args:
            function: importable; a generator that yields equally often on all ranks.
            deadline_s: for each yield.

        Raises:
            JobFailure: a rank died or did not yield in time. The job is over.
        """
        self.send(function, *arguments)
        while True:
            deadline = time.monotonic() + deadline_s
            messages = [self._receive(rank, deadline) for rank in range(self.num_ranks)]
            kinds = {kind for kind, _ in messages}
            if kinds == {"done"}:
                return
            if kinds != {"item"}:
                raise JobFailure(f"ranks yielded differently often: {messages}")
            yield [item for _, item in messages]

    def run(self, function: Callable[..., Iterator], *arguments, deadline_s: float) -> list:
        """The single yield of `function` on each rank, in rank order."""
        (items,) = self.stream(function, *arguments, deadline_s=deadline_s)
        return items

    def send(self, function: Callable[..., Iterator], *arguments) -> None:
        """Starts `function` on every rank; :meth:`received` returns its yields."""
        for connection in self._connections:
            connection.send((function, arguments))

    def received(self, rank: int, *, deadline: float) -> Iterator:
        """The yields of one rank, until the function returns, the rank has ended, or `deadline` (time.monotonic()) has
        passed."""
        connection = self._connections[rank]
        while connection.poll(max(0.0, deadline - time.monotonic())):
            try:
                kind, item = connection.recv()
            except (EOFError, ConnectionError):
                return
            if kind == "done":
                return
            yield item

    def exit_code(self, rank: int, *, deadline: float) -> int | None:
        """The exit code of a rank that ends by itself; None if the rank still runs at `deadline` (time.monotonic())."""
        while rank not in self._exit_codes:
            code = self._launcher.exit_code(self.pids[rank])
            if code is not None:
                self._exit_codes[rank] = code
            elif time.monotonic() > deadline:
                return None
            else:
                time.sleep(0.005)
        return self._exit_codes[rank]

    def log(self, rank: int) -> str:
        """The end of a rank's output, stack dumps included."""
        try:
            return self._log(rank).read_text(errors="replace")[-_LOG_TAIL:]
        except OSError:
            return ""

    def dump_stacks(self) -> None:
        """Makes every running rank write the stacks of its threads to its log."""
        for rank, pid in enumerate(self.pids):
            if self.exit_code(rank, deadline=0.0) is None:
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)

    def processes(self) -> list[int]:
        """Processes in the sessions of this job's ranks."""
        sessions, pids = set(self.pids), []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[3]) in sessions and fields[0] != "Z":  # state, parent, group, session
                    pids.append(int(stat.parent.name))
        return pids

    def close(self, *, grace_s: float | None = None) -> None:
        """Ends the ranks: idle ranks exit by themselves, and ranks that still run after the grace get SIGKILL.
        grace_s: None: short, as some ranks may be stopped, or wait forever."""
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + (_END_S[self.device] if grace_s is None else grace_s)
        for rank in range(len(self.pids)):
            if self.exit_code(rank, deadline=deadline) is None:
                self.kill(rank)
        for pid in self.processes():  # children of ranks; none of ours starts any
            os.kill(pid, signal.SIGKILL)

    def kill(self, rank: int) -> None:
        """Ends one rank by SIGKILL, if it still runs."""
        if self.exit_code(rank, deadline=0.0) is None:  # not reaped: the pid is still this rank's
            os.kill(self.pids[rank], signal.SIGKILL)
            self.exit_code(rank, deadline=time.monotonic() + 10.0)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc: object) -> None:
        if exc_type is not None:
            for rank in range(len(self.pids)):
                self.kill(rank)
        self.close()

    def _receive(self, rank: int, deadline: float) -> tuple[str, object]:
        connection = self._connections[rank]
        try:
            if connection.poll(max(0.0, deadline - time.monotonic())):
                return connection.recv()
            problem = "gave no answer in time"
        except (EOFError, ConnectionError):
            # It takes a while from there to its end; who did not get the time for an answer has a moment for that.
            code = self.exit_code(rank, deadline=max(deadline, time.monotonic() + 2.0))
            problem = "does not end" if code is None else f"ended with exit code {code}"
        self.dump_stacks()
        logs = "\n".join(f"-- log of rank {r}:\n{self.log(r)}" for r in range(self.num_ranks))
        for peer in range(self.num_ranks):
            self.kill(peer)
        raise JobFailure(f"rank {rank} {problem}\n{logs}")

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.log"
