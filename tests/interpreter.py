"""When Triton's interpreter can run kernels on CPU tensors."""

import importlib.util
from importlib.metadata import version

import pytest


def _missing() -> str:
    """What the interpreter needs and does not find; "" if nothing."""
    if importlib.util.find_spec("triton") is None:
        return "needs triton"
    numpy = tuple(int(part) for part in version("numpy").split(".")[:2])
    if version("triton").startswith("3.6.") and numpy >= (2, 4):
        return f"the interpreter of triton {version('triton')} needs numpy < 2.4, this is {version('numpy')}"
    return ""


interpreter = pytest.mark.skipif(bool(_missing()), reason=_missing())
