"""Tokens per second of transformers' Trainer: a swapped model with symmoe's Trainer, and the unmodified ones.

    torchrun --nproc-per-node=2 benchmarks/trainer.py --json trainer.json
    python benchmarks/trainer.py --layers 2                            one process

A Qwen3-MoE with the sizes of Qwen3-30B-A3B, fewer layers and random weights learns the source code of Python's standard
library, byte by byte, as a user would train it: fp32 parameters, bf16=True, AdamW, gradients clipped to 1. The ways:

    symmoe        swap_moe and symmoe.integrations.transformers.Trainer; experts lie on one rank each
    grouped_mm    transformers' Trainer and grouped GEMMs of torch (its default); DDP, all experts on every rank
    eager         the same with transformers' loop over experts

Each way has a fresh model of the same seed and the same batches, and comes up --repetitions times, in turn with the
others. Its first --warm-up steps are not counted. All ways have to have the same mean loss of the run within 2 %, or
nothing is written.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import torch
import transformers
from lm.data import VOCABULARY, load_corpus, train_batch
from suites.cases import names_of, run_program
from suites.records import measured_on, save
from suites.timing import now_s
from transformers import TrainerCallback, TrainingArguments

import symmoe
from symmoe.integrations.transformers import Trainer, swap_moe
from symmoe.tools.ranks import Ranks, join
from symmoe.tools.shapes import Options

SIZES = {
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
TINY = {
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
WAYS = ("symmoe", "grouped_mm", "eager")
LOSSES_NEAR = 0.02  # relative


OPTIONS: Options = {
    "--ways": {
        "default": "symmoe,grouped_mm",
        "help": f"of {', '.join(WAYS)}, or all (%(default)s)",
    },
    "--layers": {"type": int, "default": 4, "help": "of the model (%(default)s)"},
    "--context": {"type": int, "default": 2048, "help": "tokens of a sequence (%(default)s)"},
    "--sequences": {"type": int, "default": 4, "help": "per rank and step (%(default)s)"},
    "--steps": {"type": int, "default": 20, "help": "that are counted (%(default)s)"},
    "--warm-up": {"type": int, "default": 5, "help": "steps before them (%(default)s)"},
    "--repetitions": {"type": int, "default": 3, "help": "of every way (%(default)s)"},
    "--tiny": {"action": "store_true", "help": "small sizes, for a CPU"},
    "--json": {"type": Path, "metavar": "FILE", "help": "write results to FILE"},
}


class Clock(TrainerCallback):
    """Measures seconds from the end of the last warm-up step to the end of training, the GPU's work included; and
    losses by step, each the mean since the previous one."""

    def __init__(self, warm_up: int) -> None:
        self._warm_up = warm_up
        self._start = 0.0
        self.seconds = 0.0
        self.losses: dict[int, float] = {}

    def on_log(
        self, args: object, state: Any, control: object, logs: dict[str, float], **_: object
    ) -> None:
        if "loss" in logs:
            self.losses[state.global_step] = round(logs["loss"], 4)

    def on_step_end(
        self, args: object, state: transformers.TrainerState, control: object, **_: object
    ) -> None:
        if state.global_step == self._warm_up:
            self._start = now_s()
        elif state.global_step == state.max_steps:
            self.seconds = now_s() - self._start


def config_of(arguments: argparse.Namespace, way: str) -> transformers.Qwen3MoeConfig:
    return transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        num_hidden_layers=arguments.layers,
        max_position_embeddings=arguments.context,
        norm_topk_prob=True,
        experts_implementation="eager" if way == "eager" else "grouped_mm",
        **(TINY if arguments.tiny else SIZES),
    )


def data(num_sequences: int, context: int) -> list[dict[str, torch.Tensor]]:
    text = train_batch(
        load_corpus(), seed=0, step=0, sequences=range(num_sequences), context=context - 1
    )
    return [{"input_ids": row, "labels": row} for row in text]


def train(arguments: argparse.Namespace, way: str, ranks: Ranks, folder: str) -> dict[str, Any]:
    """Tokens per second of all ranks, the mean loss of the run, and its losses by step."""
    num_ranks, device = ranks.num_ranks, ranks.device
    torch.manual_seed(0)
    with device:
        model = transformers.Qwen3MoeForCausalLM(config_of(arguments, way))
    heap = None
    if way == "symmoe":
        heap = symmoe.SymmetricHeap(num_bytes=heap_bytes(arguments, num_ranks))
        swap_moe(model, heap)
    clock = Clock(arguments.warm_up)
    steps = arguments.warm_up + arguments.steps
    settings = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=arguments.sequences,
        bf16=True,
        use_cpu=device.type == "cpu",
        save_strategy="no",
        learning_rate=3e-4,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=min(20, steps // 2),
        logging_steps=max(1, steps // 10),
        report_to=[],
        disable_tqdm=True,
    )
    trainer = (Trainer if way == "symmoe" else transformers.Trainer)(
        model,
        settings,
        train_dataset=data(steps * arguments.sequences * num_ranks, arguments.context),
        callbacks=[clock],
    )
    loss = trainer.train().training_loss
    del trainer, model
    gc.collect()
    if heap is not None:
        heap.close()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    num_tokens = num_ranks * arguments.sequences * arguments.context * arguments.steps
    rate = round(num_tokens / clock.seconds)
    return {"tokens_per_s": rate, "loss": loss, "losses": clock.losses}


def heap_bytes(arguments: argparse.Namespace, num_ranks: int) -> int:
    sizes = TINY if arguments.tiny else SIZES
    shape = symmoe.MoEConfig(
        hidden=sizes["hidden_size"],
        ffn=sizes["moe_intermediate_size"],
        num_experts=sizes["num_experts"],
        top_k=sizes["num_experts_per_tok"],
    )
    return symmoe.plan_memory(
        shape,
        num_ranks=num_ranks,
        num_tokens=arguments.sequences * arguments.context,
        num_layers=arguments.layers,
        routing="worst",
    ).heap_bytes


def run(arguments: argparse.Namespace) -> None:
    """Trains all variants, prints and writes the results."""
    runs_by_way: dict[str, list[dict[str, Any]]] = {
        way: [] for way in names_of("way", arguments.ways, WAYS)
    }
    transformers.logging.set_verbosity_error()
    with join() as ranks, tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.repetitions):
            for way, runs in runs_by_way.items():
                runs.append(train(arguments, way, ranks, folder))
    if ranks.rank != 0:
        return
    shape = {name: getattr(arguments, name) for name in ("layers", "context", "sequences", "steps")}
    results = []
    for way, runs in runs_by_way.items():
        figures = {name: [run[name] for run in runs] for name in runs[0]}
        results.append({"way": way, "ranks": ranks.num_ranks} | figures | shape)
        rate = statistics.median(figures["tokens_per_s"])
        shown = f"{min(figures['loss']):10.4f} loss {figures['losses'][0]}"
        print(f"{way:12s}{rate:12,.0f} tokens/s{shown}", flush=True)
    every = [run["loss"] for runs in runs_by_way.values() for run in runs]
    if max(every) - min(every) > LOSSES_NEAR * min(every):
        sys.exit(f"the ways have different losses: {every}")
    if arguments.json is not None:
        env = measured_on(ranks) | {"transformers": transformers.__version__}
        save({"env": env, "results": results}, arguments.json)


if __name__ == "__main__":
    run_program(__doc__, OPTIONS, run)
