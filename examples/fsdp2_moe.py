"""The byte-level MoE language model on a device mesh: experts over EP and FSDP2, checkpoints for any other layout.

    torchrun --nproc-per-node=2 examples/fsdp2_moe.py                    EP over 2 CPU processes, under a minute
    torchrun --nproc-per-node=4 examples/fsdp2_moe.py --ep 2             2 replicas of EP groups of 2
    torchrun --nproc-per-node=2 examples/fsdp2_moe.py --ep 1 --resume    resumes from the checkpoint with other shards
    torchrun --nproc-per-node=2 examples/fsdp2_moe.py --steps 10         on GPUs the same commands train the gpu preset

Every rank holds E / ep experts of each layer, sharded over the replicas. Other parameters are sharded over all ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lm.data import load_corpus, train_batch
from lm.model import LanguageModel, heap_bytes, init_parameters
from lm.presets import PRESETS
from lm.ranks import make_deterministic, open_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

import symmoe
from symmoe.training.parallel import parallelize, parameter_groups


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "gpu" if torch.cuda.is_available() else "cpu"
    parser.add_argument(
        "--preset",
        choices=sorted(PRESETS),
        default=default,
        help="default: gpu if torch finds one",
    )
    parser.add_argument("--ep", type=int, help="ranks of an EP group (default: all)")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps in all")
    parser.add_argument(
        "--save-every", type=int, default=30, help="steps between checkpoints; 0: none"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/fsdp2_moe"), help="folder of the checkpoints"
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue from the newest checkpoint in --out"
    )
    return parser.parse_args()


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Every rank writes its shards. Collective."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Every rank reads the data of its shards from a checkpoint in any layout. Collective."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def main() -> None:
    arguments = parse_arguments()
    preset = PRESETS[arguments.preset]
    if preset.device == "cuda":
        make_deterministic()
    with open_ranks(preset.device) as ranks:
        ep = arguments.ep or ranks.size
        mesh = init_device_mesh(
            preset.device, (ranks.size // ep, ep), mesh_dim_names=("efsdp", "ep")
        )
        backend = "nvshmem" if preset.device == "cuda" else "host"
        num_bytes = heap_bytes(preset, num_ranks=ep)
        with symmoe.SymmetricHeap.from_mesh(
            mesh["ep"], expert_mesh=mesh["efsdp"], num_bytes=num_bytes, backend=backend
        ) as heap:
            # FSDP casts the parameters instead of autocast.
            policy = (
                MixedPrecisionPolicy(torch.bfloat16, torch.float32)
                if preset.autocast
                else MixedPrecisionPolicy()
            )
            model = LanguageModel(
                dataclasses.replace(preset, autocast=False), heap, device=ranks.device
            )
            init_parameters(
                model, seed=arguments.seed, ep_rank=heap.rank
            )  # the same in every replica
            parallelize(model, mesh, mp_policy=policy)
            optimizer = torch.optim.AdamW(
                parameter_groups(model), lr=preset.learning_rate, betas=(0.9, 0.95)
            )

            start, checkpoints = 0, sorted(arguments.out.glob("step-??????"))
            if arguments.resume:
                load(checkpoints[-1], model, optimizer)
                start = int(checkpoints[-1].name.removeprefix("step-"))
            corpus = load_corpus()
            for step in range(start, arguments.steps):
                batch = train_batch(
                    corpus,
                    seed=arguments.seed,
                    step=step,
                    sequences=ranks.share(preset.sequences),
                    context=preset.context,
                ).to(ranks.device)
                output = model(batch[:, :-1])
                loss = F.cross_entropy(output.logits.flatten(0, 1).float(), batch[:, 1:].flatten())
                (loss + output.aux_loss).backward()
                grad_norm = symmoe.training.clip_grad_norm(model, 1.0)
                for group in optimizer.param_groups:
                    group["lr"] = preset.learning_rate * min(1.0, (step + 1) / preset.warmup_steps)
                optimizer.step()
                optimizer.zero_grad()
                mean_loss = ranks.mean(loss.detach()).item()
                if ranks.is_main:
                    print(
                        f"step {step + 1}: loss {mean_loss:.6f}, gradient norm {grad_norm.item():.6f}",
                        flush=True,
                    )
                is_last = step + 1 == arguments.steps
                if arguments.save_every and (is_last or (step + 1) % arguments.save_every == 0):
                    save(arguments.out / f"step-{step + 1:06d}", model, optimizer)
            if ranks.is_main:
                weight = model.blocks[0].moe.experts.fc1.weight
                print(f"experts {list(weight.shape)} as {weight.placements} on {mesh}")
            dist.barrier()


if __name__ == "__main__":
    main()
