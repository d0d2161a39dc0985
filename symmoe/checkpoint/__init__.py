"""Checkpoints of models whose experts are spread over ranks: sharded, verified, readable with any number of ranks.

Needs safetensors: pip install '.[checkpoint]'. docs/checkpoints.md describes their use and guarantees.
"""

from symmoe.checkpoint.load import LoadedCheckpoint, load_checkpoint, read_manifest
from symmoe.checkpoint.manifest import Manifest, StoredFile, StoredGroup, StoredOptimizer
from symmoe.checkpoint.rng import get_rng_state, set_rng_state
from symmoe.checkpoint.save import save_checkpoint
from symmoe.checkpoint.tensors import ExpertShard, ModuleState

__all__ = [
    "ExpertShard",
    "LoadedCheckpoint",
    "Manifest",
    "ModuleState",
    "StoredFile",
    "StoredGroup",
    "StoredOptimizer",
    "get_rng_state",
    "load_checkpoint",
    "read_manifest",
    "save_checkpoint",
    "set_rng_state",
]
