"""Tokens per second of torchtitan's Trainer: with symmoe in it, and with torchtitan's own all-to-all.

    torchrun --nproc-per-node=2 benchmarks/torchtitan_trainer.py --json FILE
    torchrun --nproc-per-node=2 benchmarks/torchtitan_trainer.py --way standard --json FILE

    step          symmoe.integrations.torchtitan_experts: routed experts as one step, which keeps the rows of all layers
    dispatcher    symmoe.integrations.torchtitan, and torchtitan's experts
    standard      torchtitan's own

One way in a process: torchtitan's Trainer ends with its process group. The model is torchtitan's Qwen3-MoE with the
sizes of Qwen3-30B-A3B and fewer layers, under FSDP2 and expert parallelism over all ranks, in bf16, AdamW, on the
source code of Python's standard library; --json adds a line to FILE. All ways have the same seed and see the same
tokens, so losses can be compared; `step` draws the experts' numbers in another order than the others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import torchtitan_stand_ins as stand_ins  # before torchtitan

# isort: split

import torch
import torch.distributed as dist
import torchtitan
from lm.data import VOCABULARY, load_corpus, train_batch
from suites.cases import parser_of
from suites.records import machine
from suites.timing import now_s
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.common import CosSinRoPE
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.qwen3 import _build_qwen3_moe_layers
from torchtitan.models.qwen3.config_registry import qwen3_moe_debug
from torchtitan.trainer import Trainer

from symmoe.tools.shapes import Options

SIZES = {
    "dim": 2048,
    "n_heads": 32,
    "n_kv_heads": 4,
    "head_dim": 128,
    "moe_hidden_dim": 768,
    "num_experts": 128,
    "top_k": 8,
}
TINY = {
    "dim": 64,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 16,
    "moe_hidden_dim": 48,
    "num_experts": 8,
    "top_k": 3,
}
WAYS = ("step", "dispatcher", "standard")
NUM_RANKS = int(os.environ.get("WORLD_SIZE", "1"))


class Text(IterableDataset):
    """Sequences of the corpus from a step on; the same global batches on any number of ranks."""

    def __init__(self, rank: int, batch_size: int, seq_len: int, first_step: int) -> None:
        self.corpus = load_corpus()
        self.seq_len = seq_len
        self.first_step = first_step
        self.mine = range(rank * batch_size, (rank + 1) * batch_size)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        positions = torch.arange(self.seq_len)
        for step in itertools.count(self.first_step):
            for row in train_batch(
                self.corpus, seed=0, step=step, sequences=self.mine, context=self.seq_len
            ):
                yield {"input": row[:-1], "positions": positions}, row[1:]


class Loader(ParallelAwareDataloader):
    """torchtitan's data loader over Text."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        first_step: int = 0
        infinite: bool = True  # which Validator sets

    def __init__(
        self,
        config: Config,
        *,
        dp_rank: int,
        dp_world_size: int,
        seq_len: int,
        local_batch_size: int,
        **_,
    ):
        text = Text(dp_rank, local_batch_size, seq_len, config.first_step)
        super().__init__(text, dp_rank, dp_world_size, batch_size=local_batch_size)


class Bytes(BaseTokenizer):
    """A tokenizer for text as bytes."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int], *_: Any, **__: Any) -> str:
        return bytes(tokens).decode(errors="replace")

    def get_vocab_size(self) -> int:
        return VOCABULARY


class Clock(MetricsProcessor):
    """Records loss and time of every step, the GPU's work included."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.losses: list[float] = []
        self.ends_s: list[float] = []

    def log(self, step: int, global_avg_loss: float, *args: Any, **kwargs: Any) -> None:
        super().log(step, global_avg_loss, *args, **kwargs)
        self.losses.append(global_avg_loss)
        self.ends_s.append(now_s())


OPTIONS: Options = {
    "--way": {"choices": WAYS, "default": "step"},
    "--layers": {"type": int, "default": 4, "help": "of the model (%(default)s)"},
    "--context": {"type": int, "default": 2048, "help": "tokens of a sequence (%(default)s)"},
    "--sequences": {"type": int, "default": 4, "help": "per rank and step (%(default)s)"},
    "--steps": {"type": int, "default": 200, "help": "(%(default)s)"},
    "--tiny": {"action": "store_true", "help": "small sizes, for a CPU"},
    "--json": {"type": Path, "metavar": "FILE", "help": "add a line with the results to FILE"},
}


def small_qwen3(
    sizes: dict[str, int], *, num_layers: int, sequences: int, context: int, steps: int
) -> Trainer.Config:
    """torchtitan's debug configuration of Qwen3-MoE on bytes of the corpus, with these sizes of the model, on all
    ranks."""
    rope = CosSinRoPE.Config(dim=sizes["head_dim"], max_seq_len=context, theta=1e6)
    dim = sizes["dim"]
    layers = _build_qwen3_moe_layers(
        n_layers=num_layers, attn_backend="flex", moe_comm_backend="standard", rope=rope, **sizes
    )
    for layer in layers:  # FlexAttention has no backward pass on CPUs
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config = qwen3_moe_debug()
    model = config.model_spec.model
    model = replace(
        model,
        layers=layers,
        dim=dim,
        vocab_size=VOCABULARY,
        norm=replace(model.norm, normalized_shape=dim),
        tok_embeddings=replace(model.tok_embeddings, num_embeddings=VOCABULARY, embedding_dim=dim),
        lm_head=replace(model.lm_head, in_features=dim, out_features=VOCABULARY),
    )
    config.model_spec = replace(
        config.model_spec, model=model, parallelize_fn=stand_ins.parallelize
    )
    config.tokenizer = Bytes.Config()
    config.dataloader = Loader.Config()
    config.training = replace(
        config.training, local_batch_size=sequences, seq_len=context, steps=steps
    )
    config.activation_checkpoint = None
    config.checkpoint.enable = False
    config.debug.seed = 1
    if stand_ins.IS_OLDER or not torch.cuda.is_available():
        config.parallelism.spmd_backend = "partial_dtensor"
        config.loss = CrossEntropyLoss.Config(
            global_vocab_size=VOCABULARY
        )  # not in chunks, which need newer FSDP2s
    return config


def config_of(arguments: argparse.Namespace, folder: str) -> Trainer.Config:
    """The configuration of a Trainer."""
    sizes = TINY if arguments.tiny else SIZES
    config = small_qwen3(
        sizes,
        num_layers=arguments.layers,
        sequences=arguments.sequences,
        context=arguments.context,
        steps=arguments.steps,
    )
    config.dump_folder = folder
    config.metrics = Clock.Config(log_freq=1, disable_color_printing=True)
    config.optimizer = default_adamw(lr=3e-4)
    config.training.disable_cuda_graphs = True
    config.parallelism.expert_parallel_degree = NUM_RANKS
    token_limit = {"num_max_tokens_per_rank": arguments.sequences * arguments.context}
    if arguments.way == "step":
        step_options = {"num_kept_layers": arguments.layers, "load_factor": 2.0}
        config.override.imports = [
            ("symmoe.integrations.torchtitan_experts.routed_experts", token_limit | step_options)
        ]
    elif arguments.way == "dispatcher":
        token_limit["hidden_dim"] = sizes["dim"]
        config.override.imports = [("symmoe.integrations.torchtitan.token_dispatcher", token_limit)]
    return config


def main() -> None:
    arguments = parser_of(__doc__, OPTIONS).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trainer = config_of(arguments, folder).build()
        trainer.train()
        clock = trainer.metrics_processor
        is_main = dist.get_rank() == 0
        trainer.close()
    half = clock.ends_s[len(clock.ends_s) // 2 - 1 :]
    seconds = statistics.median(after - before for before, after in itertools.pairwise(half))
    rate = round(NUM_RANKS * arguments.sequences * arguments.context / seconds)
    if is_main:
        shown = {
            step: round(clock.losses[step - 1], 4)
            for step in (1, *range(20, arguments.steps + 1, 20))
        }
        print(f"{arguments.way:10s}{rate:12,d} tokens/s, losses {shown}", flush=True)
        if arguments.json is not None:
            result = {
                "way": arguments.way,
                "ranks": NUM_RANKS,
                "tokens_per_s": rate,
                "losses": shown,
                **machine(torch.device("cuda" if torch.cuda.is_available() else "cpu", 0)),
                "torchtitan": torchtitan.__version__,
                "command": " ".join(["torchrun", *sys.argv]),
                "layers": arguments.layers,
                "steps": arguments.steps,
            }
            with arguments.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
