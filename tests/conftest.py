"""Clusters that tests share, and what no test may leave behind."""

from __future__ import annotations

import gc
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import torch
from cluster import Cluster, forget_graphs, preload, seed_torch
from shared_gpus import are_too_few
from shared_memory import left_in_shared_memory, shared_memory

if TYPE_CHECKING:
    from symmoe import SymmetricHeap

# Files that take longest, the longest first. With `--dist loadfile`, a worker that gets one of them last works alone
# for as long as it takes. Others follow in the order of their names; a name that is not here, or gone, does no harm.
_FIRST = """
test_several_nodes test_megatron_example test_convergence test_parallel test_products_compile test_megatron
test_features test_low_precision_layer test_interpreted test_reliability test_docs_code test_transformers_trainer
test_rows_compile test_compile test_programs test_bench test_captured_step test_access test_bad_input
test_low_precision test_row_budget test_wrappers test_oracle test_transformers_checkpoint test_balance_by_replicas
test_quantized_gemm_compile test_nodes_faults test_nodes test_train_lm test_release test_grouped_layers
test_checkpoint_faults test_nodes_devices test_bounds test_quantize_compile test_gemm_twin test_low_precision_edges
test_loops test_peft test_transformers_example test_fsdp2_example test_timeline test_ownership test_types test_close
""".split()


# In this process, ranks and programs: what nobody has written is read as NaN.
os.environ.setdefault("SYMMOE_FILL_MEMORY", "1")

# The same cases in each run; `--hypothesis-profile search` draws others each time.
hypothesis.settings.register_profile(
    "search", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile(
    "repeatable", hypothesis.settings.get_profile("search"), derandomize=True
)
hypothesis.settings.load_profile("repeatable")

gc.disable()  # what is imported and collected stays: to look through it again and again takes nearly half of the time


def pytest_configure(config: pytest.Config) -> None:
    """Tests that are named by their ids run also if they are slow."""
    is_named = any("::" in argument for argument in config.args)
    if is_named and config.option.markexpr == "not gpu and not slow":
        config.option.markexpr = "not gpu"


def pytest_collection_finish() -> None:
    if "hf_cases" in sys.modules:  # of tests that each rank would import with all of transformers
        preload("trainer_cases")
    gc.freeze()
    gc.enable()


# Files whose cases of three and four ranks are cheap, or what they are there for; and those of one rank.
_OF_MANY_RANKS = ("test_ep_invariance", "test_protocol", "test_several_nodes")
_OF_ONE_RANK = (
    "test_heap_start",
    "test_layer",
    "test_peers",
    "test_schedules",
    "test_transformers_checkpoint",
)


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: index for index, name in enumerate(_FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(_FIRST)))
    for item in _repetitive(items):
        item.add_marker(pytest.mark.slow)
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(
                pytest.mark.skip(reason="needs a CUDA GPU, and torch sees none on this machine")
            )


def _repetitive(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Cases that `make test` leaves to `make test-all`: those of more than four ranks, those of three and four where
    there is one of fewer, those of one where there is one of two; in trainers all but a usual and an odd one, the first
    and the last of a test (of a model type)."""
    groups: dict[tuple[Any, ...], list[pytest.Item]] = {}
    of_few_ranks = {
        (item.path, item.originalname)
        for item in items
        if _parameters(item).get("num_ranks", 3) <= 2
    }
    of_two_ranks = {
        _without_ranks(item) for item in items if _parameters(item).get("num_ranks") == 2
    }
    for item in items:
        parameters = _parameters(item)
        if item.path.parent.name == "integrations":
            kind = str(parameters.get("function", parameters.get("model_type", "")))
            groups.setdefault((item.path, item.originalname, kind), []).append(item)
        elif parameters.get("num_ranks", 0) > 4:
            yield item
        elif parameters.get("num_ranks", 0) > 2 and item.path.stem not in _OF_MANY_RANKS:
            if (item.path, item.originalname) in of_few_ranks:
                yield item
        elif parameters.get("num_ranks") == 1 and item.path.stem not in _OF_ONE_RANK:
            if _without_ranks(item) in of_two_ranks:
                yield item
    for cases in groups.values():
        yield from cases[1:-1]


def _without_ranks(item: pytest.Item) -> tuple[Any, ...]:
    """Equal for cases that differ in the number of ranks alone, and both run or both are left out."""
    marks = [item.get_closest_marker(name) is None for name in ("gpu", "slow")]
    parameters = sorted(
        (name, repr(value)) for name, value in _parameters(item).items() if name != "num_ranks"
    )
    return item.path, item.originalname, *marks, *parameters


def _parameters(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _clusters() -> Iterator[Callable[..., Cluster]]:
    started: dict[tuple[int, str], Cluster] = {}

    def get(num_ranks: int, device: str = "cpu") -> Cluster:
        if device == "cuda" and are_too_few(num_ranks):
            pytest.skip(
                f"needs {num_ranks} CUDA GPUs, this machine has {torch.cuda.device_count()}"
            )
        key = (num_ranks, device)
        if key not in started or not started[key].alive:
            if key in started:
                started[key].close()
            started[key] = Cluster(num_ranks, device)
        return started[key]

    yield get
    for ranks in started.values():
        ranks.close()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Callable[..., Cluster]]:
    """`cluster(num_ranks, device="cpu")`: ranks that are started once per session, and again after a failure."""
    yield from _clusters()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[..., Cluster]]:
    """The same of a module alone: what it imports changes torch.cuda, or lets a process abort at its regular exit."""
    yield from _clusters()


@pytest.fixture
def heap() -> Iterator[SymmetricHeap]:
    """A heap of this process only."""
    from symmoe import SymmetricHeap

    with SymmetricHeap(num_bytes=4 << 20, backend="host") as heap:
        yield heap


@pytest.fixture(autouse=True)
def _numbers_are_of_the_test(request: pytest.FixtureRequest) -> None:
    seed_torch(request.node.nodeid)


@pytest.fixture(autouse=True)
def _no_graphs_are_left() -> Iterator[None]:
    yield
    forget_graphs()


@pytest.fixture(scope="session", autouse=True)
def _shared_memory_is_left_clean() -> Iterator[None]:
    before = shared_memory()
    yield
    assert not left_in_shared_memory(before)


@pytest.fixture
def inductor(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The backend's name. It compiles in this process, without a pool of workers that outlives the test."""
    from torch._inductor import config
    from torch.utils import cpp_extension

    # torch 2.13 and before put this path into the linker's command as it is, so that torch in a folder with a space in
    # its name is not found (pytorch/pytorch#191010).
    monkeypatch.setattr(cpp_extension, "TORCH_LIB_PATH", shlex.quote(cpp_extension.TORCH_LIB_PATH))
    with config.patch(compile_threads=1):
        yield "inductor"


@pytest.fixture
def shared_memory_before() -> frozenset[str]:
    """Names in /dev/shm when the test started."""
    return shared_memory()
