"""Trains a byte-level Mixture-of-Experts language model on the source code of Python's standard library.

    torchrun --nproc-per-node=2 examples/train_lm.py                 2 CPU processes, 4 minutes on 2 cores
    torchrun --nproc-per-node=4 examples/train_lm.py --preset gpu    1, 2 or 4 GPUs
    python examples/train_lm.py                                      one process with all experts

On several nodes, with EP groups inside a node (the same on each, with its own --node-rank), and on CPUs with one that
spans two virtual nodes:

    torchrun --nnodes=2 --node-rank=0 --master-addr=HOST --nproc-per-node=4 examples/train_lm.py --preset gpu --ep 4
    torchrun --nproc-per-node=4 examples/train_lm.py --ranks-per-node 2

Dense parameters are data-parallel over all ranks, experts are expert-parallel in each EP group. The batch, the
initial model and the data do not depend on the number of ranks, so neither does the training. `--resume`
continues from the newest checkpoint and ends in the same bits as an uninterrupted run. On another number of
ranks losses differ by rounding. With more `--steps` it extends a run, at the learning rates of a run of so many steps.

    torchrun --nproc-per-node=2 examples/train_lm.py --prompt "class "    a sample from the checkpoint in --out

Writes to --out: metrics.jsonl (one object per step), loss.png, experts.png, sample.txt, checkpoints/.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import time
from collections import deque
from pathlib import Path

import torch
from lm import report
from lm.data import Corpus, byte_frequency_bits, heldout_batch, load_corpus, train_batch
from lm.model import LanguageModel, ModelOutput, generate, heap_bytes, init_parameters
from lm.optimizers import make_optimizer
from lm.presets import PRESETS, Preset
from lm.ranks import Ranks, make_deterministic, open_ranks
from torch.nn import functional as F

import symmoe
from symmoe.checkpoint import load_checkpoint, read_manifest, save_checkpoint
from symmoe.precision import PRECISIONS
from symmoe.training.first_step import check_first_step
from symmoe.training.gradients import clip_grad_norm, reduce_gradients

PROMPT = b"def "
KEPT_CHECKPOINTS = 2


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=sorted(PRESETS), default="cpu")
    parser.add_argument(
        "--ep", type=int, help="ranks of an EP group, each with its balance loss (default: all)"
    )
    parser.add_argument(
        "--ranks-per-node",
        type=int,
        help="divide the machine into virtual nodes, on CPUs (default: no)",
    )
    parser.add_argument("--steps", type=int, help="optimizer steps (default: the preset's)")
    parser.add_argument(
        "--order", choices=("rank", "slot"), help="order of combine's sums (default: the preset's)"
    )
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        help="numbers that experts multiply (default: the working dtype)",
    )
    parser.add_argument(
        "--wire",
        action="store_true",
        help="send rows to experts as the numbers of --precision, too",
    )
    parser.add_argument(
        "--bf16", action="store_true", help="bf16 products with fp32 parameters, on CPUs too"
    )
    parser.add_argument(
        "--replicas",
        type=int,
        metavar="REPLICA_SLOTS",
        help="balance by replicas of hot experts, at most so many on a rank",
    )
    parser.add_argument(
        "--muon", action="store_true", help="the matrices of experts by Muon, the rest by AdamW"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/train_lm"))
    parser.add_argument(
        "--save-every", type=int, help="steps between checkpoints (default: the preset's)"
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue from the newest checkpoint in --out"
    )
    parser.add_argument(
        "--prompt", help="no training: continue this text with the newest checkpoint in --out"
    )
    arguments = parser.parse_args()
    if arguments.wire and not arguments.precision:
        parser.error("--wire needs a --precision")
    if arguments.replicas and arguments.precision:
        parser.error("--replicas takes no --precision")
    if arguments.prompt == "":
        parser.error("--prompt needs a text")
    for name in ("steps", "save_every", "ep", "ranks_per_node", "replicas"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} ({value}) must be at least 1")
    if PRESETS[arguments.preset].device == "cuda" and not torch.cuda.is_available():
        parser.error(f"--preset {arguments.preset} needs a CUDA GPU, and torch sees none")
    return arguments


def learning_rate(preset: Preset, *, step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    warmup = min(1.0, (step + 1) / preset.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return preset.learning_rate * warmup * (0.1 + 0.9 * cosine)


def predict(model: LanguageModel, batch: torch.Tensor) -> tuple[torch.Tensor, ModelOutput]:
    """Mean cross entropy in nats over this rank's batch [B, S + 1], and the model's output. Collective."""
    output = model(batch[:, :-1])
    return F.cross_entropy(output.logits.flatten(0, 1).float(), batch[:, 1:].flatten()), output


def train_step(
    model: LanguageModel, optimizer: torch.optim.Optimizer, batch: torch.Tensor, ranks: Ranks
) -> report.Record:
    """One optimizer step on this rank's part of the batch. Collective."""
    loss, output = predict(model, batch)
    (loss + output.aux_loss).backward()
    reduce_gradients(model, group=ranks.group)
    grad_norm = clip_grad_norm(model, 1.0, group=ranks.group)
    optimizer.step()
    optimizer.zero_grad()
    mean_loss, mean_aux_loss = ranks.mean(
        torch.stack([loss.detach(), output.aux_loss.detach()])
    ).tolist()
    # The loads already are those of the EP group: the plan exchanges them.
    expert_load = ranks.sum_of_replicas(
        torch.stack([m.expert_load for m in output.moe_metrics])
    ).tolist()
    record = {
        "loss": mean_loss,
        "train_bits_per_byte": mean_loss / math.log(2),
        "aux_loss": mean_aux_loss,
        "grad_norm": grad_norm.item(),
        "imbalance": statistics.fmean(max(load) / statistics.fmean(load) for load in expert_load),
        "expert_load": expert_load,
    }
    if output.moe_metrics[0].num_replicas is not None:
        rows = torch.stack([m.rows_per_rank[1] for m in output.moe_metrics])
        record["balanced_per_rank"] = ranks.sum_of_replicas(rows).tolist()
        counts = torch.stack([m.num_replicas for m in output.moe_metrics])
        record["num_replicas"] = ranks.sum_of_replicas(counts).tolist()
    return record


@torch.no_grad()
def evaluate(model: LanguageModel, corpus: Corpus, preset: Preset, ranks: Ranks) -> float:
    """Bits per byte on the held-out sequences, in batches of the size of training. Collective."""
    losses = []
    total = preset.eval_sequences
    for first in range(0, total, preset.sequences):
        share = ranks.share(preset.sequences)
        sequences = range(first + share.start, first + share.stop)
        batch = heldout_batch(corpus, sequences=sequences, total=total, context=preset.context)
        losses.append(predict(model, batch.to(ranks.device))[0])
    return ranks.mean(torch.stack(losses).mean()).item() / math.log(2)


def check_settings(folder: Path, settings: dict[str, str | int]) -> None:
    """Raises ValueError, with both settings, if the newest checkpoint belongs to a run with other settings."""
    saved = read_manifest(folder).extra
    for name, value in settings.items():
        if saved.get(name) != value:
            raise ValueError(
                f"{name} is {value!r}, but the checkpoint was made with {saved.get(name)!r}"
            )


def train(
    arguments: argparse.Namespace, preset: Preset, ranks: Ranks, heap: symmoe.SymmetricHeap
) -> None:
    """The whole run: model, data, optimizer, loop, sample. Collective."""
    corpus = load_corpus()
    model = LanguageModel(preset, heap, device=ranks.device)
    init_parameters(model, seed=arguments.seed, ep_rank=heap.rank)
    optimizer = make_optimizer(model, preset)
    check_first_step(model, optimizer)  # warns if ranks start to train different models
    folder, state = (
        arguments.out / "checkpoints",
        {"model": model, "optimizer": optimizer, "group": ranks.group},
    )
    settings = {"preset": repr(preset), "seed": arguments.seed, "corpus": corpus.digest}
    start = 0
    if arguments.resume:
        check_settings(folder, settings)
        start = load_checkpoint(folder, **state).step
        if ranks.is_main:
            num_remaining = max(0, arguments.steps - start)
            print(
                f"the checkpoint has {start} steps, --steps is {arguments.steps}: {num_remaining} to train",
                flush=True,
            )
    path = arguments.out / "metrics.jsonl"
    reporter = report.Reporter(path, steps=arguments.steps, start=start, enabled=ranks.is_main)
    byte_frequency = byte_frequency_bits(
        corpus, total=preset.eval_sequences, context=preset.context
    )
    seconds: deque[float] = deque(maxlen=20)  # of the last steps; their median is the speed
    for step in range(start, arguments.steps):
        began = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(preset, step=step, steps=arguments.steps)
        sequences = ranks.share(preset.sequences)
        batch = train_batch(
            corpus, seed=arguments.seed, step=step, sequences=sequences, context=preset.context
        )
        record = {"step": step + 1} | train_step(model, optimizer, batch.to(ranks.device), ranks)
        seconds.append(time.perf_counter() - began)

        record["tokens_per_s"] = preset.sequences * preset.context / statistics.median(seconds)
        last = step + 1 == arguments.steps
        if last or (step + 1) % preset.eval_every == 0:
            record["heldout_bits_per_byte"] = evaluate(model, corpus, preset, ranks)
            record["byte_frequency_bits_per_byte"] = byte_frequency
        reporter.record(record)
        if last or (step + 1) % arguments.save_every == 0:
            save_checkpoint(folder, step + 1, **state, extra=settings, keep_last=KEPT_CHECKPOINTS)
    reporter.close()

    if ranks.is_main:
        (arguments.out / "sample.txt").write_bytes(write_sample(model, PROMPT, arguments, preset))
    else:
        model.lend_experts(preset.sample_bytes)


def write_sample(
    model: LanguageModel, prompt: bytes, arguments: argparse.Namespace, preset: Preset
) -> bytes:
    """Prints and returns the model's continuation of the prompt. On rank 0; the others provide their experts."""
    sizes = {"num_bytes": preset.sample_bytes, "context": preset.context}
    sample = generate(model, prompt, **sizes, seed=arguments.seed)
    print(f"--- sample ---\n{sample.decode(errors='replace')}\n--------------")
    return sample


def sample_checkpoint(
    arguments: argparse.Namespace, preset: Preset, ranks: Ranks, heap: symmoe.SymmetricHeap
) -> None:
    """Prints the newest checkpoint's continuation of --prompt. Collective."""
    folder = arguments.out / "checkpoints"
    check_settings(folder, {"preset": repr(preset)})
    model = LanguageModel(preset, heap, device=ranks.device)
    load_checkpoint(folder, model=model, group=ranks.group)
    if ranks.is_main:
        write_sample(model, arguments.prompt.encode(), arguments, preset)
    else:
        model.lend_experts(preset.sample_bytes)


def main() -> None:
    arguments = parse_arguments()
    preset = PRESETS[arguments.preset]
    arguments.steps = arguments.steps or preset.steps
    arguments.save_every = arguments.save_every or preset.save_every
    if arguments.order:
        preset = preset.with_moe(order=arguments.order)
    if arguments.replicas:
        preset = preset.with_moe(balance="replicas", replicas_per_rank=arguments.replicas)
    if arguments.precision:
        wire = "both" if arguments.wire else "none"
        preset = preset.with_moe(precision=PRECISIONS[arguments.precision], quantized_wire=wire)
    preset = dataclasses.replace(
        preset, autocast=preset.autocast or arguments.bf16, muon=arguments.muon
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    if preset.device == "cuda":
        make_deterministic()
    with open_ranks(preset.device, arguments.ep) as ranks:
        if ranks.is_main and not arguments.prompt:
            print(
                f"trains a byte-level language model ({preset.layers} layers, {preset.moe.num_experts} experts) on "
                f"Python's standard library: {arguments.steps} steps on {ranks.size} "
                f"process{'es' * (ranks.size > 1)}, of preset {arguments.preset}; its {preset.steps} steps take "
                f"{preset.takes}; results in {arguments.out}",
                flush=True,
            )
        num_bytes = heap_bytes(preset, num_ranks=arguments.ep or ranks.size)
        backend = "nvshmem" if preset.device == "cuda" else "host"
        options = {
            "expert_group": ranks.expert_group,
            "num_bytes": num_bytes,
            "backend": backend,
            "ranks_per_node": arguments.ranks_per_node,
        }
        with symmoe.SymmetricHeap(ranks.ep_group, **options) as heap:
            (sample_checkpoint if arguments.prompt else train)(arguments, preset, ranks, heap)
    if ranks.is_main and not arguments.prompt:
        report.plot(arguments.out)
        final = report.read_records(arguments.out / "metrics.jsonl")[-1]
        print(
            f"held-out {final['heldout_bits_per_byte']:.3f} bits/byte"
            f" (byte frequencies {final['byte_frequency_bits_per_byte']:.3f}),"
            f" {final['tokens_per_s']:,.0f} tokens/s; see {arguments.out}"
        )


if __name__ == "__main__":
    main()
