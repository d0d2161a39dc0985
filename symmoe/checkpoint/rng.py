"""The state of a rank's random number generators, as JSON values."""

from __future__ import annotations

import base64
import random
from typing import Any

import torch

from symmoe.errors import CheckpointError


def get_rng_state() -> dict[str, Any]:
    """States of Python's `random`, of torch's CPU generator and, if CUDA is in use, of its current device. Local."""
    version, words, gauss = random.getstate()
    state = {"python": [version, list(words), gauss], "torch": _to_text(torch.get_rng_state())}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = _to_text(torch.cuda.get_rng_state())
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restores a state of :func:`get_rng_state`. Local. CheckpointError: the state is invalid; generators before the
    invalid one were set."""
    try:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        torch.set_rng_state(_to_tensor(state["torch"]))
        if "cuda" in state:
            torch.cuda.set_rng_state(_to_tensor(state["cuda"]))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"this is no state of random number generators: {error!r}") from error


def _to_text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _to_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
