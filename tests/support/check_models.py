"""Models for `symmoe check`: a small one with all that a checkpoint has to keep, ways to train it that are right, and
defects that training code has had on several ranks, all planted where there are several ranks: one is always right."""

import contextlib
import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from small_model import open_mesh
from torch import nn

import symmoe
from symmoe.checkpoint import load_checkpoint, save_checkpoint
from symmoe.errors import CheckpointError
from symmoe.moe.router import RouterOutput
from symmoe.tools.check import Context, Trained, runs
from symmoe.tools.check.runs import Job, run
from symmoe.tools.ranks import Ranks
from symmoe.torch_internals import pytree
from symmoe.training.parallel import parallelize

if (
    RouterOutput not in pytree.SUPPORTED_NODES
):  # as after parallelize, which ranks of other numbers may have called
    pytree.register_dataclass(RouterOutput)

RATE = 1e-3


class Small(nn.Module):
    """Two layers with a router's bias; a tied weight, a frozen part, a scalar, an integer buffer, statistics."""

    def __init__(self, heap: symmoe.SymmetricHeap) -> None:
        super().__init__()
        config = symmoe.MoEConfig(
            hidden=16,
            ffn=24,
            num_experts=4,
            top_k=2,
            router=symmoe.RouterConfig(expert_bias=True, z_loss_coef=1),
            order="slot",
        )
        self.embed = nn.Embedding(128, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.moe = nn.ModuleList(symmoe.MoELayer(config, heap) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.shift = nn.Parameter(torch.tensor(0.5))  # of all logits: its gradient is rounding
        self.head = nn.Linear(16, 128, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("num_steps", torch.tensor(0))
        self.register_buffer("running_mean", torch.zeros(16))  # of this rank's tokens, read by none

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss without and with the layers' own."""
        x = self.embed(tokens)
        x = x + self.frozen(x)
        aux_losses = []
        for norm, moe in zip(self.norms, self.moe, strict=True):
            y, metrics = moe(norm(x))
            x = x + self.scale * y
            aux_losses.append(metrics.aux_loss)
        self.running_mean += x.detach().mean((0, 1)).float()
        logits = (self.head(x) + self.shift).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        return loss, loss + sum(aux_losses)


def fill(model: Small, context: Context) -> Small:
    """Weights that do not depend on the number of ranks."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        is_expert = ".experts." in name
        shape = (
            (parameter.shape[0] * context.num_ranks, *parameter.shape[1:])
            if is_expert
            else parameter.shape
        )
        full = torch.randn(shape, generator=generator) / 4
        part = full.chunk(context.num_ranks)[context.rank] if is_expert else full
        model.load_state_dict({name: part.to(parameter.dtype)}, strict=False)
    return model


def reduce(model: Small, tokens: torch.Tensor) -> None:
    model(tokens)[1].backward()
    symmoe.reduce_gradients(model)


@dataclasses.dataclass
class Training:
    """The parts of a right training of Small; defects replace some."""

    context: Context
    model: Small
    optimizer: torch.optim.Optimizer

    def backward(self, tokens: torch.Tensor) -> None:
        reduce(self.model, tokens)

    def step(self) -> None:
        self.optimizer.step()
        symmoe.training.balance_step(self.model)
        self.model.num_steps += 1

    def state(self) -> dict:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def save(self, folder: str) -> None:
        torch.save(self.state(), Path(folder, f"{self.context.rank}.pt"))

    def load(self, folder: str) -> None:
        stored = torch.load(Path(folder, f"{self.context.rank}.pt"))
        self.model.load_state_dict(stored["model"], strict=False)
        self.optimizer.load_state_dict(stored["optimizer"])


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE)


def training(context: Context, optimizer: Callable = adam) -> Training:
    model = fill(Small(context.heap).to(context.dtype), context)
    return Training(context, model, optimizer(list(model.parameters())))


def trained(job: Training, **changes: Callable) -> Trained:
    """With parts of a training changed on several ranks."""
    parts = {"backward": job.backward, "step": job.step, "save": job.save, "load": job.load} | (
        changes if job.context.num_ranks > 1 else {}
    )
    return Trained(model=job.model, optimizer=job.optimizer, **parts)


def planted(part: str, change: Callable, context: Context) -> Trained:
    """A right training with `change` in the place of a part, or done at its start, on several ranks."""
    job = training(context)
    if part == "start" and context.num_ranks > 1:
        change(job)
    return trained(job, **({} if part == "start" else {part: partial(change, job)}))


def plants(part: str) -> Callable:
    """Makes what check is told to run of a defect, which gets the training and what the part gets."""
    return lambda change: partial(planted, part, change)


# -- right ------------------------------------------------------------------------------------------------------------


def plain(context: Context) -> Trained:
    return trained(training(context))


def loads_by_assignment(context: Context) -> Trained:
    """A training whose load makes new parameters, without state of the optimizer: a resumed job makes it afterwards."""
    job = training(context)

    def load(folder: str) -> None:
        stored = torch.load(Path(folder, f"{context.rank}.pt"))
        job.model.load_state_dict(stored["model"], assign=True)
        job.model.head.weight = job.model.embed.weight

    return dataclasses.replace(trained(job), optimizer=None, load=load)


class WithMasters(torch.optim.AdamW):
    """Steps fp32 copies of the model's weights, which it holds, and rounds them into the model."""

    def __init__(self, parameters: list[nn.Parameter], dtype: torch.dtype = torch.float32) -> None:
        self.weights = parameters
        copies = [nn.Parameter(parameter.detach().to(dtype).clone()) for parameter in parameters]
        super().__init__(copies, lr=RATE)

    def step(self) -> None:
        copies = self.param_groups[0]["params"]
        for copy, weight in zip(copies, self.weights, strict=True):
            copy.grad = None if weight.grad is None else weight.grad.to(copy.dtype)
        super().step()
        with torch.no_grad():
            for copy, weight in zip(copies, self.weights, strict=True):
                weight.copy_(copy)


def with_masters(context: Context, *, dtype: torch.dtype = torch.float32) -> Trained:
    job = training(context, partial(WithMasters, dtype=dtype))

    def save(folder: str) -> None:
        masters = job.optimizer.param_groups[0]["params"]
        torch.save(job.state() | {"masters": masters}, Path(folder, f"{context.rank}.pt"))

    def load(folder: str) -> None:
        job.load(folder)
        stored = torch.load(Path(folder, f"{context.rank}.pt"), weights_only=False)
        with torch.no_grad():
            for master, stored_master in zip(
                job.optimizer.param_groups[0]["params"], stored["masters"], strict=True
            ):
                master.copy_(stored_master)

    return dataclasses.replace(trained(job), save=save, load=load)


@plants("load")
def statistics_of_rank_0(job: Training, folder: str) -> None:
    """Loaded by all, as from a checkpoint with one copy of what is not an expert's."""
    job.load(folder)
    dist.broadcast(job.model.running_mean, src=0)


# -- at the start -----------------------------------------------------------------------------------------------------


@plants("start")
def counts_on(job: Training) -> None:
    job.model.num_steps += job.context.rank


def freezes_on_rank_1(context: Context) -> Trained:
    job = training(context)
    norm = job.model.norms[1]
    norm.requires_grad_(context.rank == 0)

    def backward(tokens: torch.Tensor) -> None:
        job.model(tokens)[1].backward()
        norm.requires_grad_()  # ranks reduce the same
        symmoe.reduce_gradients(job.model)
        norm.requires_grad_(context.rank == 0)

    return trained(job, backward=backward)


# -- forward and backward ---------------------------------------------------------------------------------------------


@plants("backward")
def tokens_of_the_next(job: Training, tokens: torch.Tensor) -> None:
    every = [torch.empty_like(tokens) for _ in range(job.context.num_ranks)]
    dist.all_gather(every, tokens.contiguous())
    reduce(job.model, every[(job.context.rank + 1) % job.context.num_ranks])


def _keeps_its_own(name: str, job: Training, tokens: torch.Tensor) -> None:
    """Gradient: it is not averaged over ranks."""
    job.model(tokens)[1].backward()
    parameter = job.model.get_parameter(name)
    local_grad = parameter.grad.clone()
    symmoe.reduce_gradients(job.model)
    parameter.grad.copy_(local_grad)


scalar_not_averaged = plants("backward")(partial(_keeps_its_own, "scale"))


@plants("clip")
def clipped_alone(job: Training, max_norm: float) -> None:
    """By a norm of this rank's own."""
    nn.utils.clip_grad_norm_(job.model.parameters(), max_norm / (1 + job.context.rank))


# -- the step ---------------------------------------------------------------------------------------------------------


@plants("step")
def rate_falls_twice(job: Training) -> None:
    job.step()
    job.optimizer.param_groups[0]["lr"] *= 0.999**job.context.num_ranks


# -- save and load ----------------------------------------------------------------------------------------------------


@plants("load")
def one_number_of_many(job: Training, folder: str) -> None:
    """Not one of those that are kept of large parameters."""
    job.load(folder)
    job.model.embed.weight.data[1, 1] += 1e-6


@plants("load")
def forgets_the_optimizer(job: Training, folder: str) -> None:
    job.model.load_state_dict(torch.load(Path(folder, f"{job.context.rank}.pt"))["model"])


@plants("load")
def unties_in_load(job: Training, folder: str) -> None:
    job.load(folder)
    job.model.head.weight = nn.Parameter(job.model.embed.weight.detach().clone())


def masters_in_bf16(context: Context) -> Trained:
    dtype = torch.float32 if context.num_ranks == 1 else torch.bfloat16
    return with_masters(context, dtype=dtype)


# -- what has a run on one rank of its own ----------------------------------------------------------------------------


def drawn_and_loaded(context: Context) -> Trained:
    """Right: a layer whose experts are drawn rank by rank; ranks load what one rank has saved."""
    config = symmoe.MoEConfig(hidden=16, ffn=24, num_experts=4, top_k=2)
    torch.manual_seed(context.rank)
    model = nn.Sequential(nn.Embedding(128, 16), symmoe.MoELayer(config, context.heap))
    if context.num_ranks == 1:
        save_checkpoint(context.folder, 0, model=model)
    else:
        load_checkpoint(context.folder, model=model)

    def backward(tokens: torch.Tensor) -> None:
        model(tokens)[0].square().mean().backward()
        symmoe.reduce_gradients(model)

    return Trained(model=model, backward=backward)


def sharded(context: Context) -> Trained:
    """Right: under FSDP2, with experts and everything else in DTensors."""
    model = parallelize(drawn_and_loaded(context).model, open_mesh(1, context.num_ranks))

    def backward(tokens: torch.Tensor) -> None:
        model(tokens)[0].square().mean().backward()

    return Trained(
        model=model,
        backward=backward,
        save=lambda folder: dcp.save(model.state_dict(), checkpoint_id=folder),
        load=lambda folder: dcp.load(model.state_dict(), checkpoint_id=folder),
    )


# -- what cannot be compared ------------------------------------------------------------------------------------------


def raises_on_rank_1(context: Context) -> Trained:
    if context.rank == 1:
        nn.Module()(1)  # which raises, in torch's file
    return plain(context)


def returns_nothing(context: Context) -> None:
    """No model."""


# -- runs -------------------------------------------------------------------------------------------------------------


def job_of(target: str, folder: Path, dtype: str = "fp32") -> Job:
    return Job(target, 2, dtype, None, 32, 16, str(folder))


def run_job(rank: int, num_ranks: int, job: Job) -> None:
    """A few numbers are kept of a parameter."""
    with (
        mock.patch.object(runs, "_MOST", 256),
        contextlib.suppress(CheckpointError),  # of what differs already
    ):
        run(job, Ranks(torch.device("cpu")), 60.0)
