"""Ranks for tests: processes that stay up, run functions one after the other and hand back what they return. A
`Cluster` is started once per size and reused, because importing torch costs seconds. Functions must be importable
(module level); arguments and results are pickled between the test process and its own children only."""

import functools
import gc
import inspect
import itertools
import multiprocessing as mp
import os
import sys
import tempfile
import traceback
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from launchers import launched
from limits import HANG_S
from shared_gpus import take_gpu
from worker import Findings, open_heap

from symmoe.symm_mem.heap import SymmetricHeap

FORKS = mp.get_context("forkserver")  # processes of its own for each process of pytest
# torch._inductor: torch.use_deterministic_algorithms imports it, for seconds.
_FOR_RANKS = [
    "pytest",
    "torch.distributed",
    "torch._inductor",
    "symmoe.kernels.twin",
    "symmoe.moe.layer",
]
FORKS.set_forkserver_preload(_FOR_RANKS)


def preload(module: str) -> None:
    """Ranks that are started from now on have imported it, too. Before the first of them."""
    FORKS.set_forkserver_preload([*_FOR_RANKS, module])


class RankFailure(AssertionError):
    """A rank raised; the text holds every rank's traceback."""


def on_ranks(
    *, cpu: Sequence[int], cuda: Sequence[int], marks=pytest.mark.gpu
) -> pytest.MarkDecorator:
    """Cases (num_ranks, device) of a test; those on GPUs have the marks."""
    on_gpus = [pytest.param(num_ranks, "cuda", marks=marks) for num_ranks in cuda]
    return pytest.mark.parametrize(
        ("num_ranks", "device"), [*((num_ranks, "cpu") for num_ranks in cpu), *on_gpus]
    )


def run_on(
    *num_ranks,
    on_gpus=(),
    fixture: str = "cluster",
    device: str | None = None,
    timeout_s: float = HANG_S,
) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Makes `test_x(rank, num_ranks, ...)` a test that runs on the ranks of a cluster, its other parameters being those
    of the test; it fails if a rank raises or has findings. On so many ranks; several numbers make a case each; none: on
    as many as the test's parameter `num_ranks` says. `on_gpus`: cases on so many GPUs, see :func:`on_ranks`; `fixture`:
    what gives clusters by size, and by `device`, given here or a parameter of the test, if any. What :func:`_answer`
    gives is no parameter of the test."""

    def decorate(body: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(body)
        def test(*on_a_rank, **kwargs) -> object:
            if on_a_rank:
                return body(*on_a_rank, **kwargs)
            size = (
                kwargs.pop("num_ranks", *num_ranks[:1]),
                *filter(None, [kwargs.get("device", device)]),
            )
            results = kwargs.pop(fixture)(*size).run(test, timeout_s=timeout_s, **kwargs)
            problems = [text for texts in results for text in texts or ()]
            assert not problems, "\n".join(problems)
            return None

        is_fixed = len(num_ranks) == 1 and not on_gpus
        inner = {"rank", *_GIVEN} | ({"num_ranks"} if is_fixed else set())
        parameters = [
            parameter
            for name, parameter in inspect.signature(body).parameters.items()
            if name not in inner
        ]
        test.__signature__ = inspect.Signature(
            [inspect.Parameter(fixture, inspect.Parameter.POSITIONAL_OR_KEYWORD), *parameters]
        )
        if on_gpus:
            return on_ranks(cpu=num_ranks, cuda=on_gpus)(test)
        return pytest.mark.parametrize("num_ranks", num_ranks)(test) if len(num_ranks) > 1 else test

    return decorate


def _trainer_heap(rank: int, num_ranks: int, stack: ExitStack) -> SymmetricHeap:
    stack.enter_context(launched(rank, num_ranks))
    return stack.enter_context(SymmetricHeap(num_bytes=4 << 20))


_GIVEN: dict[str, Callable[[int, int, ExitStack], object]] = {
    "findings": lambda rank, num_ranks, _: Findings(f"rank {rank} of {num_ranks}"),
    "heap": lambda _rank, _num_ranks, stack: stack.enter_context(
        open_heap("cpu", num_bytes=16 << 20)
    ),
    "trainer_heap": _trainer_heap,
}


def _answer(function: Callable, rank: int, num_ranks: int, args: Sequence, kwargs: dict):
    """The result of a function. If it takes `findings`, `heap` or `trainer_heap` after the number of ranks, it gets
    some, or a heap on CPUs, the latter within the environment of a launcher; of the first the texts are the answer."""
    names = itertools.takewhile(
        _GIVEN.__contains__, list(inspect.signature(inspect.unwrap(function)).parameters)[2:]
    )
    with ExitStack() as stack:
        stack.callback(forget_graphs)
        seed_torch(function.__qualname__)
        fixtures = {name: _GIVEN[name](rank, num_ranks, stack) for name in names}
        answer = function(rank, num_ranks, *fixtures.values(), *args, **kwargs)
    return fixtures["findings"].texts if "findings" in fixtures else answer


def seed_torch(name: str) -> None:
    """The numbers of a test that names no generator are the same in each run: torch's own seed is random."""
    torch.manual_seed(zlib.crc32(name.encode()))


def forget_graphs() -> None:
    """The graphs of torch.compile are dropped: the next test compiles its own."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


class Cluster(AbstractContextManager["Cluster"]):
    """`num_ranks` processes joined by gloo on loopback. On GPUs (`device_type="cuda"`), rank r uses GPU r (see
    shared_gpus.py). The end of it as a context closes it. `start`: of multiprocessing; "spawn" has imported nothing."""

    def __init__(self, num_ranks: int, device_type: str = "cpu", start: str = "forkserver") -> None:
        self.num_ranks = num_ranks
        self._dir = tempfile.TemporaryDirectory(prefix="symmoe-cluster-")
        store = os.path.join(self._dir.name, "store")
        self._pipes, self._processes = [], []
        for rank in range(num_ranks):
            parent_end, child_end = mp.Pipe()
            arguments = child_end, rank, num_ranks, store, device_type
            process = mp.get_context(start).Process(target=_serve, args=arguments, daemon=True)
            process.start()
            child_end.close()
            self._pipes.append(parent_end)
            self._processes.append(process)

    def run(self, fn: Callable, *args, timeout_s: float = HANG_S, **kwargs) -> list:
        """`fn(rank, num_ranks, *args, **kwargs)` on every rank; results in rank order.

        Raises:
            RankFailure: a rank raised, died, or gave no answer within `timeout_s`. The cluster is closed.
        """
        for pipe in self._pipes:
            pipe.send((fn, args, kwargs))
        results, failures = [], []
        for rank, pipe in enumerate(self._pipes):
            try:
                if not pipe.poll(timeout_s):
                    failures.append(f"rank {rank}: no answer within {timeout_s} s")
                    timeout_s = 1.0  # the others have had their time
                    continue
                ok, value = pipe.recv()
            except (EOFError, ConnectionResetError):
                self._processes[rank].join(timeout=10)  # its pipe closes before it has an exit code
                ok, value = False, f"died with exit code {self._processes[rank].exitcode}"
            if ok:
                results.append(value)
            else:
                failures.append(f"rank {rank}: {value}")
        if failures:
            self.close()
            raise RankFailure("\n".join(failures))
        return results

    def run_without(
        self, victims: Sequence[int], fn: Callable, *args, timeout_s: float = HANG_S
    ) -> dict:
        """Same as :meth:`run`, by rank, of ranks that go on when `victims` die or stop. Then all are ended."""
        try:
            for pipe in self._pipes:
                pipe.send((fn, args, {}))
            answers = {}
            for rank, pipe in enumerate(self._pipes):
                if rank not in victims:
                    answers[rank] = (
                        pipe.recv()[1]
                        if pipe.poll(timeout_s)
                        else f"no answer within {timeout_s} s"
                    )
            return answers
        finally:
            for rank in victims:
                self._processes[rank].kill()
            self.close()

    def findings(self, check: Callable[..., object], *args, **kwargs) -> list[str]:
        """The problems that `check` finds on any rank; see `worker.Findings`. Raises as `run`."""
        return [text for texts in self.run(check, *args, **kwargs) for text in texts]

    @property
    def alive(self) -> bool:
        """Whether every rank can still run functions."""
        return bool(self._processes) and all(p.is_alive() for p in self._processes)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(2.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes, self._processes = [], []
        self._dir.cleanup()


def _serve(pipe, rank: int, num_ranks: int, store: str, device_type: str) -> None:
    mp.set_start_method(
        "fork", force=True
    )  # whose semaphores have no names that stay (tqdm makes some)
    gc.freeze()  # what was imported before the fork
    torch.set_num_threads(1)
    if device_type == "cuda":
        take_gpu(rank, num_ranks)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=HANG_S),
    )
    while True:
        try:
            fn, args, kwargs = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)  # the test process has gone or is done with us
        try:
            pipe.send((True, _answer(fn, rank, num_ranks, args, kwargs)))
        except BaseException:  # noqa: BLE001 - whatever it was, the test has to see it
            pipe.send((False, traceback.format_exc()))
