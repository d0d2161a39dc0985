"""benchmarks/torchtitan_trainer.py on CPUs, with what torchtitan_cases.py puts into torchtitan."""

import runpy
import sys
from dataclasses import replace
from pathlib import Path

from torchtitan_cases import parallelize  # isort: split

from torchtitan.models.qwen3 import config_registry

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "torchtitan_trainer.py"
debug = config_registry.qwen3_moe_debug


def debug_on_cpus():
    config = debug()
    config.model_spec = replace(config.model_spec, parallelize_fn=parallelize)
    return config


config_registry.qwen3_moe_debug = debug_on_cpus
sys.path.insert(0, str(SCRIPT.parent))
runpy.run_path(str(SCRIPT), run_name="__main__")
