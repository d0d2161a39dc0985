"""Fixtures of tests of checkpoints."""

from pathlib import Path

import pytest
from checkpoint_cases import state

from symmoe.checkpoint import save_checkpoint


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory with steps 1 and 2."""
    for step in (1, 2):
        save_checkpoint(tmp_path, step, model=state(step))
    return tmp_path
