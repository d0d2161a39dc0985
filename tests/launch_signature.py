"""What a launch that a test has caught would compile: Triton's description of its arguments."""

from __future__ import annotations

from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor


def described(
    kernel: Any, constants: Any, args: list[Any], type_names: dict[torch.dtype, str]
) -> tuple[tuple[dict, dict, dict], dict]:
    """(signature, constexprs, attributes) of a source, and the options that are left, of launch(kernel, ..., *args).

    Tensors are of 16-byte alignment unless the kernel does not specialise on it; integers that it specialises on
    must be multiples of 16.
    """
    options, signature, constexprs, attributes = dict(constants.named), {}, {}, {}
    values = [*args, *[None] * (len(kernel.params) - len(args))]
    for i, (parameter, value) in enumerate(zip(kernel.params, values, strict=True)):
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constexprs[parameter.name] = "constexpr", options.pop(parameter.name, value)
        elif isinstance(value, TensorDescriptor):
            signature[parameter.name] = f"tensordesc<{type_names[value.base.dtype]}{list(value.block_shape)}>"
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + type_names[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                attributes[i,] = [["tt.divisibility", 16]]
        else:
            if not parameter.do_not_specialize:
                assert value % 16 == 0, parameter.name  # always: the JIT makes one variant
                attributes[i,] = [["tt.divisibility", 16]]
            signature[parameter.name] = "i32"
    return (signature, constexprs, attributes), options
