"""Fixtures of tests of kernels."""

import importlib.util

import pytest

if importlib.util.find_spec("triton"):
    from compiled_launches import catch_launches
    from fake_cuda import fake_cuda  # noqa: F401


@pytest.fixture
def launches(request, monkeypatch):
    """The launches of the kernels of the test file's MODULES, none of which happens."""
    return catch_launches(monkeypatch, *request.module.MODULES)
