"""Fixtures of tests of kernels."""

import importlib.util

import pytest

if importlib.util.find_spec("triton"):
    from compiled_launches import GENERAL_MODULES, HOPPER_MODULES, catch_launches
    from fake_cuda import fake_cuda  # noqa: F401

    from symmoe.kernels import architectures
    from symmoe.kernels.low_precision.block_scaled import scaled


@pytest.fixture
def launches(monkeypatch):
    """The launches of all kernels, none of which happens."""
    return catch_launches(monkeypatch, *GENERAL_MODULES, *HOPPER_MODULES)


@pytest.fixture
def on(monkeypatch):
    """on(arch): the launchers choose as on a GPU of this architecture."""
    monkeypatch.setattr(scaled, "scaled_products", scaled.scaled_products.__wrapped__)
    return lambda arch: monkeypatch.setattr(
        architectures, "capability", lambda device: divmod(arch, 10)
    )
