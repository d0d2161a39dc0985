"""Fixtures of tests of kernels."""

import importlib.util

if importlib.util.find_spec("triton"):
    from fake_cuda import fake_cuda  # noqa: F401
