"""A pytest plugin with which Megatron-LM's unit tests run on CPUs, as far as they can. It changes torch in its process.
Where torch sees a GPU it changes nothing."""

import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any

import megatron_shim
import pytest
import torch
import torch.distributed as dist
from packaging.version import Version

TIMEOUT = timedelta(seconds=60)  # of what waits for a rank whose test has failed


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    """Runs before the import of conftest.py and of the tests, and before symmoe replaces layers."""
    # conftest.py would download test data, which no MoE test reads.
    downloads = ModuleType("tests.test_utils.python_scripts.download_unit_tests_dataset")
    downloads.download_and_extract_asset = _download_nothing
    sys.modules[downloads.__name__] = downloads
    megatron_shim.install()
    from megatron.core import parallel_state, utils

    if utils.get_te_version() is None:  # which tests compare with others
        utils.get_te_version = lambda: Version("0")
    if torch.cuda.is_available():
        return
    torch.compiler.set_stance("force_eager")
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda device: None
    torch.cuda.manual_seed_all = lambda seed: (
        None
    )  # of what torch.manual_seed does, the part for GPUs
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    init_process_group = dist.init_process_group

    def over_gloo(backend: str | None = None, **kwargs: Any) -> None:
        init_process_group("gloo", **{"timeout": TIMEOUT, **kwargs})

    dist.init_process_group = over_gloo
    _end_groups_of(parallel_state)


def _end_groups_of(parallel_state: Any) -> None:
    """Destroys Megatron's groups, which Megatron only forgets: each gloo group keeps threads, thousands at the
    hundredth test."""
    destroy = parallel_state.destroy_model_parallel

    def destroy_groups() -> None:
        destroy()
        if dist.is_initialized():
            for group in list(dist.distributed_c10d._world.pg_map):
                if group is not dist.group.WORLD:
                    dist.destroy_process_group(group)

    parallel_state.destroy_model_parallel = destroy_groups


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Lets tests that query for a GPU at import find one."""
    is_available = torch.cuda.is_available
    torch.cuda.is_available = lambda: True
    try:
        return (yield)
    finally:
        torch.cuda.is_available = is_available


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """Creates on the CPU the tensors that a test creates on "cuda"."""
    with megatron_shim.CudaIsCpu():
        return (yield)


def _download_nothing(*args: Any, **kwargs: Any) -> Callable[..., Any]:
    raise ImportError("no test data is downloaded")
