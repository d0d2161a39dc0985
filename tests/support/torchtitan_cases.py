"""torchtitan's Trainer on CPUs: what it is told, and what it did.

Trainer is torchtitan's own, with its start of the process group, parallelize function, FSDP2, optimizers, schedule,
checkpoints, activation checkpointing and validation. What is not, as it needs CUDA, or a torch, data or files that
are not here:

* Model, data, loss, attention and `spmd_backend` are those of benchmarks/torchtitan_trainer.py, with what
  torchtitan_stand_ins.py there puts into torchtitan's and torch's modules. The dataloader is torchtitan's, with
  torchdata's state. With "spmd_types" FSDP2 of torch 2.13 refuses parameters that are no DTensors.
* But for bf16, experts multiply in fp32. torchtitan's round to bf16 in any case, which would hide errors below 4e-3.
* All runs begin with one seed checkpoint of torchtitan's, because DTensors on CPUs draw other random numbers on every
  number of ranks.

Only processes of their own import this: one that has imported torchtitan may abort at its regular exit.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from launchers import environment_of
from torchtitan_trainer import TINY, Clock, Loader, small_qwen3  # before torchtitan's modules

# isort: split

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.validate import Validator
from torchtitan.config.override import derive
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.trainer import Trainer

STEPS, HALF = 20, 10
GLOBAL_BATCH, SEQ_LEN = 8, 16
MAX_NORM = 2.5  # of some steps, there is more
RECOMPUTE = {"full": FullAC, "selective": SelectiveAC}


class Fp32Experts(GroupedExperts):
    """GroupedExperts without the rounding to bf16."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        w1_EFD, w2_EDF, w3_EFD = (
            weight.to_local() if hasattr(weight, "to_local") else weight
            for weight in (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        )
        rows = x_RD.split(num_tokens_per_expert_E.tolist())
        return torch.cat(
            [
                F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)
                for x, w1, w2, w3 in zip(rows, w1_EFD, w2_EDF, w3_EFD, strict=True)
            ]
        )


@dataclass
class Run:
    """The reports of a Trainer: loss and norm of every step, losses of validations, and calls of our dispatch."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    validations: list[float] = field(default_factory=list)
    num_dispatches: int = 0


class Recorder(Clock):
    @dataclass(kw_only=True, slots=True)
    class Config(Clock.Config):
        pass

    def __init__(self, config: Config, **kwargs) -> None:
        super().__init__(config, **kwargs)
        self.run = Run(self.losses)

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        **kwargs,
    ) -> None:
        super().log(step, global_avg_loss, global_max_loss, grad_norm, **kwargs)
        self.run.norms.append(grad_norm)

    def log_validation(self, loss: float, *args, **kwargs) -> None:
        super().log_validation(loss, *args, **kwargs)
        self.run.validations.append(loss)


@dataclass(frozen=True)
class Job:
    """The work of a Trainer."""

    folder: str  # where it saves after half of the steps, and at the end
    seed_folder: str = (
        ""  # the checkpoint that it begins with; "": it makes one, and does not train
    )
    symmoe: bool = False  # dispatch and combine by symmoe, in place of torchtitan's all-to-all
    num_kept_layers: int | None = (
        None  # with symmoe, and the experts: all of it is a step, which keeps the rows of so many layers
    )
    accumulate: int = 1  # micro-batches of a step
    bf16: bool = False  # FSDP2's mixed precision
    recompute: str = ""  # activation checkpointing, "full" or "selective"; "": none
    saved_by: int = (
        0  # go on from what so many ranks have saved in `folder` after half of the steps; 0: begin
    )


def small() -> Trainer.Config:
    """The configuration of a small Qwen3-MoE, which records what it does."""
    config = small_qwen3(TINY, num_layers=2, sequences=4, context=SEQ_LEN, steps=STEPS)
    config.metrics = Recorder.Config(log_freq=1, disable_color_printing=True)
    config.optimizer = default_adamw(lr=1e-3, eps=1e-6)
    config.training = replace(config.training, max_norm=MAX_NORM, mixed_precision_param="float32")
    return config


def config_of(job: Job, num_ranks: int) -> Trainer.Config:
    config = small()
    batch_size = GLOBAL_BATCH // num_ranks // job.accumulate
    config.dump_folder = job.folder
    config.training.local_batch_size = batch_size
    config.training.global_batch_size = GLOBAL_BATCH
    config.training.disable_cuda_graphs = True
    config.training.mixed_precision_param = "bfloat16" if job.bf16 else "float32"
    config.parallelism.expert_parallel_degree = min(2, num_ranks)
    if not job.bf16 and job.num_kept_layers is None:
        for layer in config.model_spec.model.layers:
            experts = layer.moe.routed_experts
            experts.inner_experts = derive(experts.inner_experts, Fp32Experts.Config)
    config.activation_checkpoint = RECOMPUTE[job.recompute].Config() if job.recompute else None
    config.checkpoint = CheckpointManager.Config(
        enable=True,
        interval=HALF,
        last_save_model_only=False,
        initial_load_path=job.seed_folder or None,
        create_seed_checkpoint=not job.seed_folder,
    )
    if job.saved_by:
        config.checkpoint.load_step, config.checkpoint.load_only = HALF, True
    if job.saved_by not in (0, num_ranks):  # torchtitan's dataloader resumes on as many ranks only
        config.checkpoint.exclude_from_loading = ["dataloader"]
        config.dataloader.first_step = HALF
    config.validator = Validator.Config(
        enable=bool(job.seed_folder),
        freq=STEPS,
        steps=2,
        dataloader=Loader.Config(first_step=10_000),
    )
    if job.symmoe:
        sizes = {
            "hidden_dim": TINY["dim"],
            "num_max_tokens_per_rank": batch_size * SEQ_LEN,
            "num_kept_layers": job.num_kept_layers,
        }
        name = (
            "torchtitan.token_dispatcher"
            if job.num_kept_layers is None
            else "torchtitan_experts.routed_experts"
        )
        config.override.imports = [(f"symmoe.integrations.{name}", sizes)]  # the one line
    return config


@contextmanager
def launched(rank: int, num_ranks: int, port: int) -> Iterator[None]:
    """In a process that has no process group, and has none afterwards."""
    with environment_of(rank, num_ranks, MASTER_PORT=str(port)):
        _end_group()
        try:
            yield
        finally:
            _end_group()


def _end_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def train(rank: int, num_ranks: int, port: int, job: Job) -> Run:
    """The steps of `torchtitan.train`."""
    from symmoe.integrations.torchtitan import SymmoeTokenDispatcher
    from symmoe.moe.routed_experts import RoutedExperts

    owner, name = (
        (SymmoeTokenDispatcher, "dispatch")
        if job.num_kept_layers is None
        else (RoutedExperts, "run")
    )
    function = getattr(owner, name)
    with launched(rank, num_ranks, port), patch.object(owner, name, autospec=True) as counted:
        counted.side_effect = function
        trainer = config_of(job, num_ranks).build()
        if job.seed_folder:
            trainer.train()
        else:
            trainer.checkpointer.save(curr_step=0, last_step=True)
        trainer.close()
        if job.symmoe:
            dispatcher_of(trainer).close()
        trainer.metrics_processor.run.num_dispatches = counted.call_count
        return trainer.metrics_processor.run


def dispatcher_of(trainer: Trainer):
    """The dispatcher of the first layer."""
    return trainer.model_parts[0].layers["0"].moe.routed_experts.token_dispatcher
