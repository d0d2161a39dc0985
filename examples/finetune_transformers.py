"""Fine-tunes a Mixture-of-Experts model of Hugging Face transformers with its experts spread over the ranks.

    torchrun --nproc-per-node=2 examples/finetune_transformers.py      2 CPU processes, under a minute
    torchrun --nproc-per-node=4 examples/finetune_transformers.py      1, 2 or 4 GPUs: the same command
    ... --checkpoint FOLDER                                            a local checkpoint of Qwen3-MoE, Mixtral, OLMoE,
                                                                       DeepSeek-V3 or gpt-oss

Without a checkpoint the program makes a small, randomly initialised Qwen3-MoE. The text is the source code of Python's
standard library, a token is a byte. Every rank reads its own experts from the checkpoint and writes them into a new
checkpoint with the same files. At the end plain transformers reads it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from lm.data import Corpus, heldout_batch, load_corpus, train_batch
from lm.ranks import Ranks, open_ranks

import symmoe
from symmoe.integrations.transformers import from_pretrained, save_checkpoint

HELDOUT_SEQUENCES = 16


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--checkpoint", type=Path, help="the model to fine-tune (default: a small random Qwen3-MoE)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/finetune_transformers"), help="a new folder"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--sequences", type=int, default=8, help="per rank and step")
    parser.add_argument("--context", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    arguments = parser.parse_args()
    if arguments.out.exists() and any(arguments.out.iterdir()):
        parser.error(f"--out: {arguments.out} is not empty")
    return arguments


def write_random_checkpoint(folder: Path) -> None:
    """A Qwen3-MoE of 5 million parameters in several files. The name of a file has the number of files."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        moe_intermediate_size=192,
        num_experts=16,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder, max_shard_size="8MB")


def heap_bytes(config: transformers.PretrainedConfig, *, num_ranks: int, num_tokens: int) -> int:
    """Symmetric memory for one forward and backward pass, for any routing."""
    shape = symmoe.MoEConfig(
        hidden=config.hidden_size,
        ffn=getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
        num_experts=config.num_local_experts,
        top_k=config.num_experts_per_tok,
    )
    plan = symmoe.plan_memory(
        shape,
        num_ranks=num_ranks,
        num_tokens=num_tokens,
        num_layers=config.num_hidden_layers,
        dtype=torch.float32,
        routing="worst",
    )
    return plan.heap_bytes


@torch.no_grad()
def heldout_loss(
    model: torch.nn.Module, corpus: Corpus, sequences: range, *, context: int
) -> torch.Tensor:
    """Mean cross entropy over some of the held-out sequences."""
    batch = heldout_batch(corpus, sequences=sequences, total=HELDOUT_SEQUENCES, context=context)
    batch = batch[:, :context].to(model.device)
    was_training = model.training
    loss = model.eval()(batch, labels=batch, output_router_logits=False).loss
    model.train(was_training)
    return loss.detach()


def finetune(
    model: torch.nn.Module, ranks: Ranks, corpus: Corpus, arguments: argparse.Namespace
) -> None:
    """Trains the model in place. Collective."""
    device, sequences = ranks.device, ranks.size * arguments.sequences
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, weight_decay=0.0)
    model.train()
    shown_step, shown_at = 0, time.perf_counter()
    for step in range(1, arguments.steps + 1):
        rank_rows = ranks.share(sequences)
        batch = train_batch(
            corpus, seed=0, step=step, sequences=rank_rows, context=arguments.context - 1
        ).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(batch, labels=batch).loss
        loss.backward()
        symmoe.reduce_gradients(model)  # dense averaged over ranks, experts scaled
        symmoe.training.clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 or step % 10 == 0 or step == arguments.steps:
            mean_loss = ranks.mean(loss.detach()).item()  # waits for the device
            now = time.perf_counter()
            rate = (step - shown_step) * sequences * arguments.context / (now - shown_at)
            if ranks.is_main:
                print(f"step {step:4d}  loss {mean_loss:.4f}  {rate:,.0f} tokens/s")
            shown_step, shown_at = step, now


def main() -> None:
    arguments = parse_arguments()
    corpus = load_corpus()
    context = arguments.context
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    with open_ranks(device_type) as ranks, tempfile.TemporaryDirectory() as scratch:
        source = arguments.checkpoint
        if source is None:
            where = [str(Path(scratch) / "checkpoint")]
            if ranks.is_main:
                write_random_checkpoint(Path(where[0]))
            if ranks.group is not None:
                dist.broadcast_object_list(
                    where
                )  # rank 0's folder, and the signal that it is complete
            source = Path(where[0])
        config = transformers.AutoConfig.from_pretrained(source)
        num_bytes = heap_bytes(
            config, num_ranks=ranks.size, num_tokens=arguments.sequences * context
        )

        with symmoe.SymmetricHeap(num_bytes=num_bytes) as heap:
            model = from_pretrained(source, heap, dtype=torch.float32)
            num_local_params = sum(parameter.numel() for parameter in model.parameters())
            if ranks.is_main:
                print(
                    f"{ranks.size} ranks on {heap.backend}, {num_local_params:,} parameters on each, "
                    f"heap {num_bytes >> 20} MiB"
                )
            finetune(model, ranks, corpus, arguments)
            rank_rows = ranks.share(HELDOUT_SEQUENCES)
            heldout = ranks.mean(heldout_loss(model, corpus, rank_rows, context=context)).item()
            save_checkpoint(model, arguments.out, like=source)
        if ranks.is_main:
            full_model = transformers.AutoModelForCausalLM.from_pretrained(arguments.out)
            plain = heldout_loss(
                full_model, corpus, range(HELDOUT_SEQUENCES), context=context
            ).item()
            print(
                f"held-out loss {heldout:.4f}; of {arguments.out} in plain transformers {plain:.4f}"
            )
        ranks.barrier()  # the source is deleted when rank 0 leaves


if __name__ == "__main__":
    main()
