"""A pytest plugin that puts symmoe into the MoE layers of Megatron-LM's own tests."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from recorder import Recorder, recorder_of

pytest_plugins = ["on_cpus"]
HEAP_BYTES = 64 << 20


def pytest_configure(config: pytest.Config) -> None:
    """Before the tests are imported: a new MoELayer becomes ours."""
    form = config.getoption("--symmoe-form")
    if form == "plain":
        return
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_layer import MoELayer

    heaps = _Heaps()
    MoELayer.__init__ = _swapped_init(MoELayer, form, heaps, recorder_of(config))
    destroy = parallel_state.destroy_model_parallel

    def close_and_destroy() -> None:
        heaps.close()
        destroy()

    parallel_state.destroy_model_parallel = close_and_destroy


class _Heaps:
    """The heaps of the process groups that a test has made."""

    def __init__(self) -> None:
        self._heaps: dict[dist.ProcessGroup, Any] = {}

    def of(self, groups: Any) -> Any:
        from symmoe.integrations.megatron import open_heap

        if groups.ep not in self._heaps:
            self._heaps[groups.ep] = open_heap(HEAP_BYTES, pg_collection=groups)
        return self._heaps[groups.ep]

    def close(self) -> None:
        """Closes them all; collective as the end of the groups is."""
        while self._heaps:
            self._heaps.popitem()[1].close()


def _swapped_init(
    layer_class: type, form: str, heaps: _Heaps, recorder: Recorder
) -> Callable[..., None]:
    """Makes an MoELayer one with our dispatcher (form "dispatcher") or our dispatcher and experts ("experts")."""
    from symmoe.integrations.megatron import DispatchOptions, SymmExperts, SymmMoELayer
    from symmoe.integrations.megatron.compat import process_groups

    init = layer_class.__init__

    def swapped_init(
        self,
        config,
        submodules: Any = None,
        layer_number: Any = None,
        pg_collection: Any = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(self, SymmMoELayer):  # whose own __init__ has come here
            init(self, config, submodules, layer_number, pg_collection, **kwargs)
            return
        if form == "experts":
            submodules = dataclasses.replace(submodules, experts=SymmExperts)
        groups = process_groups(pg_collection)
        options = {"heap": heaps.of(groups), "options": DispatchOptions(order="slot")}
        self.__class__ = SymmMoELayer
        self.__init__(config, submodules, layer_number, groups, **options, **kwargs)
        _count(
            self.token_dispatcher, "compute" if form == "experts" else "token_dispatch", recorder
        )

    return swapped_init


def _count(dispatcher: Any, name: str, recorder: Recorder) -> None:
    method = getattr(dispatcher, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        recorder.num_calls += 1
        return result

    setattr(dispatcher, name, counted)
