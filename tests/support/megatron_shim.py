"""Megatron-Core on CPUs, for tests; the shim is the one that the example uses."""

from collections.abc import Callable

import torch
from example_runs import module_of
from torch.overrides import TorchFunctionMode


def install() -> None:
    """Makes megatron.core run on CPUs in this process; nothing where torch sees a GPU."""
    module_of("megatron_cpu").install()


class CudaIsCpu(TorchFunctionMode):
    """Within it, tensors that Megatron makes on "cuda" are on the CPU, and say that their type is one of GPUs."""

    def __torch_function__(
        self,
        func: Callable,
        types,
        args: tuple = (),
        kwargs: dict | None = None,
    ):
        kwargs = dict(kwargs or {})
        if torch.cuda.is_available():
            return func(*args, **kwargs)
        if func is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(
            result, str
        ):  # which the optimizers of Megatron look at
            return result.replace("torch.", "torch.cuda.")
        return result
