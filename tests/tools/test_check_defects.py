"""`symmoe check` on a small model with all that a checkpoint has to keep: ways to train it that are right, and defects
that training code has had on several ranks: each is named, at its stage and tensor. All are planted where there are
several ranks: one is always right. What is said of tensors that differ is compared by tensors made by hand."""

import contextlib
import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import symmoe
from symmoe.errors import CheckpointError
from symmoe.tools.check import Context, Trained, runs
from symmoe.tools.check.command import judge
from symmoe.tools.check.compare import Compared, compare
from symmoe.tools.check.runs import (
    ACTIVATION,
    GRADIENT,
    LOADED,
    OPTION,
    SAVED,
    STAGES,
    START,
    UPDATE,
    Job,
    Tensors,
    run,
)
from symmoe.tools.ranks import Ranks

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
        own = []
        for norm, moe in zip(self.norms, self.moe, strict=True):
            y, metrics = moe(norm(x))
            x = x + self.scale * y
            own.append(metrics.aux_loss)
        self.running_mean += x.detach().mean((0, 1)).float()
        logits = (self.head(x) + self.shift).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        return loss, loss + sum(own)


def fill(model: Small, context: Context) -> Small:
    """Weights that do not depend on the number of ranks."""
    generator = torch.Generator().manual_seed(1)
    for name, its in model.named_parameters():
        is_expert = ".experts." in name
        shape = (its.shape[0] * context.num_ranks, *its.shape[1:]) if is_expert else its.shape
        whole = torch.randn(shape, generator=generator) / 4
        part = whole.chunk(context.num_ranks)[context.rank] if is_expert else whole
        model.load_state_dict({name: part.to(its.dtype)}, strict=False)
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


def trained(it: Training, **changes: Callable) -> Trained:
    """With parts of a training changed on several ranks."""
    parts = {"backward": it.backward, "step": it.step, "save": it.save, "load": it.load} | (
        changes if it.context.num_ranks > 1 else {}
    )
    return Trained(model=it.model, optimizer=it.optimizer, **parts)


def planted(part: str, change: Callable, context: Context) -> Trained:
    """A right training with `change` in the place of a part, or done at its start, on several ranks."""
    it = training(context)
    if part == "start" and context.num_ranks > 1:
        change(it)
    return trained(it, **({} if part == "start" else {part: partial(change, it)}))


def plants(part: str) -> Callable:
    """Makes what check is told to run of a defect, which gets the training and what the part gets."""
    return lambda change: partial(planted, part, change)


# -- right ------------------------------------------------------------------------------------------------------------


def plain(context: Context) -> Trained:
    return trained(training(context))


def from_meta(context: Context) -> Trained:
    """Made on the meta device, with what is loaded put in the place of it."""
    with torch.device("meta"):
        model = Small(context.heap)
    model.load_state_dict(Small(context.heap).to(context.dtype).state_dict(), assign=True)
    model.head.weight = model.embed.weight
    fill(model, context)
    model.frozen.requires_grad_(False)
    return trained(Training(context, model, adam(list(model.parameters()))))


def loads_by_assignment(context: Context) -> Trained:
    """Which makes new parameters; without state of the optimizer, which a resumed job makes after it."""
    it = training(context)

    def load(folder: str) -> None:
        stored = torch.load(Path(folder, f"{context.rank}.pt"))
        it.model.load_state_dict(stored["model"], assign=True)
        it.model.head.weight = it.model.embed.weight

    return dataclasses.replace(trained(it), optimizer=None, load=load)


class WithMasters(torch.optim.AdamW):
    """Steps fp32 copies of the model's weights, which it holds, and rounds them into the model."""

    def __init__(self, parameters: list[nn.Parameter], dtype: torch.dtype = torch.float32) -> None:
        self.weights = parameters
        copies = [nn.Parameter(its.detach().to(dtype).clone()) for its in parameters]
        super().__init__(copies, lr=RATE)

    def step(self) -> None:
        copies = self.param_groups[0]["params"]
        for copy, its in zip(copies, self.weights, strict=True):
            copy.grad = None if its.grad is None else its.grad.to(copy.dtype)
        super().step()
        with torch.no_grad():
            for copy, its in zip(copies, self.weights, strict=True):
                its.copy_(copy)


def with_masters(context: Context, *, dtype: torch.dtype = torch.float32) -> Trained:
    it = training(context, partial(WithMasters, dtype=dtype))

    def save(folder: str) -> None:
        masters = it.optimizer.param_groups[0]["params"]
        torch.save(it.state() | {"masters": masters}, Path(folder, f"{context.rank}.pt"))

    def load(folder: str) -> None:
        it.load(folder)
        stored = torch.load(Path(folder, f"{context.rank}.pt"), weights_only=False)
        with torch.no_grad():
            for its, old in zip(
                it.optimizer.param_groups[0]["params"], stored["masters"], strict=True
            ):
                its.copy_(old)

    return dataclasses.replace(trained(it), save=save, load=load)


@plants("load")
def statistics_of_rank_0(it: Training, folder: str) -> None:
    """Loaded by all, as from a checkpoint with one copy of what is not an expert's."""
    it.load(folder)
    dist.broadcast(it.model.running_mean, src=0)


# -- at the start -----------------------------------------------------------------------------------------------------


@plants("start")
def counts_on(it: Training) -> None:
    it.model.num_steps += it.context.rank


@plants("start")
def unties(it: Training) -> None:
    it.model.head.weight = nn.Parameter(it.model.embed.weight.detach().clone())


def freezes_on_rank_1(context: Context) -> Trained:
    it = training(context)
    norm = it.model.norms[1]
    norm.requires_grad_(context.rank == 0)

    def backward(tokens: torch.Tensor) -> None:
        it.model(tokens)[1].backward()
        norm.requires_grad_()  # ranks reduce the same
        symmoe.reduce_gradients(it.model)
        norm.requires_grad_(context.rank == 0)

    return trained(it, backward=backward)


# -- forward and backward ---------------------------------------------------------------------------------------------


@plants("backward")
def tokens_of_the_next(it: Training, tokens: torch.Tensor) -> None:
    every = [torch.empty_like(tokens) for _ in range(it.context.num_ranks)]
    dist.all_gather(every, tokens.contiguous())
    reduce(it.model, every[(it.context.rank + 1) % it.context.num_ranks])


def _keeps_its_own(name: str, it: Training, tokens: torch.Tensor) -> None:
    """Gradient: it is not averaged over ranks."""
    it.model(tokens)[1].backward()
    its = it.model.get_parameter(name)
    own = its.grad.clone()
    symmoe.reduce_gradients(it.model)
    its.grad.copy_(own)


scalar_not_averaged = plants("backward")(partial(_keeps_its_own, "scale"))


# -- the step ---------------------------------------------------------------------------------------------------------


@plants("step")
def decays_on_rank_1(it: Training) -> None:
    it.optimizer.param_groups[0]["weight_decay"] = 0.01 if it.context.rank == 0 else 0.0
    it.step()


@plants("step")
def rate_falls_twice(it: Training) -> None:
    it.step()
    it.optimizer.param_groups[0]["lr"] *= 0.999**it.context.num_ranks


# -- save and load ----------------------------------------------------------------------------------------------------


@plants("load")
def one_number_of_many(it: Training, folder: str) -> None:
    """Not one of those that are kept of large parameters."""
    it.load(folder)
    it.model.embed.weight.data[1, 1] += 1e-6


@plants("load")
def forgets_the_optimizer(it: Training, folder: str) -> None:
    it.model.load_state_dict(torch.load(Path(folder, f"{it.context.rank}.pt"))["model"])


@plants("load")
def unties_in_load(it: Training, folder: str) -> None:
    it.load(folder)
    it.model.head.weight = nn.Parameter(it.model.embed.weight.detach().clone())


def masters_in_bf16(context: Context) -> Trained:
    dtype = torch.float32 if context.num_ranks == 1 else torch.bfloat16
    return with_masters(context, dtype=dtype)


# -- the tests --------------------------------------------------------------------------------------------------------
def run_job(rank: int, num_ranks: int, job: Job) -> None:
    """A few numbers are kept of a parameter."""
    with (
        mock.patch.object(runs, "_MOST", 256),
        contextlib.suppress(CheckpointError),  # of what differs already
    ):
        run(job, Ranks(torch.device("cpu")), 60.0)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of the run on one rank, which is made once for all."""
    return tmp_path_factory.mktemp("one")


def against_one(cluster, one_rank: Path, target: str, dtype: str = "fp32") -> list[Compared]:
    """All tensors of a model of this file on two ranks, and of the right one on one rank."""
    job = Job(f"test_check_defects:{target}", 2, dtype, None, 32, 16, str(one_rank))
    if not job.file(dtype, 1, 0, LOADED).exists():
        cluster(1).run(run_job, job._replace(target="test_check_defects:plain"))
    for stale in one_rank.glob("*-2-*.pt"):
        stale.unlink()
    cluster(2).run(run_job, job)
    return judge(job)


TIE = "tie of head.weight to embed.weight"
PLANTED = [
    ("counts_on", START, "num_steps", "on rank 1"),
    ("unties", START, TIE, "on 0 of the ranks, and has shape [] on one rank"),
    ("tokens_of_the_next", ACTIVATION, "embed", "rank 0 has the part of rank 1"),
    ("scalar_not_averaged", GRADIENT, "scale", "their mean is the one-rank value: nothing"),
    (
        "freezes_on_rank_1",
        GRADIENT,
        "norms.1.bias",
        "has shapes [[16]] on 1 of the ranks, and has shape [16] on one rank: often it is frozen",
    ),
    (
        "decays_on_rank_1",
        UPDATE,
        "moe.1.router.weight",
        "on rank [1] another than on rank 0, by less than is allowed",
    ),
    ("rate_falls_twice", SAVED, "lr of scale", "0.998 times the one-rank value on all ranks"),
    ("masters_in_bf16", UPDATE, "moe.1.experts.fc2.weight", "master weights of another dtype"),
    ("one_number_of_many", LOADED, "embed.weight", "has other bits, of numbers that are not kept"),
    ("forgets_the_optimizer", LOADED, "step of scale", "was not loaded on rank 0, 1"),
    ("unties_in_load", LOADED, TIE, "is not there any more on rank 0"),
]
WELL_TRAINED = ["plain", "from_meta", "loads_by_assignment", "with_masters", "statistics_of_rank_0"]


@pytest.mark.parametrize(
    ("target", "stage", "name", "text"), PLANTED, ids=[defect[0] for defect in PLANTED]
)
def test_what_is_planted_is_named(
    cluster, one_rank: Path, target: str, stage: str, name: str, text: str
):
    first = next(each for each in against_one(cluster, one_rank, target) if each.text)
    assert (first.stage, first.name) == (stage, name)
    assert text in first.text


@pytest.mark.parametrize("target", WELL_TRAINED)
def test_what_is_well_trained_passes(cluster, one_rank: Path, target: str):
    found = against_one(cluster, one_rank, target, "bf16")
    assert [each for each in found if each.text] == []
    assert {each.stage for each in found} == set(STAGES)
    assert {each.name for each in found if each.note} <= {"running_mean (a rank's own)"}


W = torch.tensor([[1.0, -2.0, 3.0], [4.0, 0.5, -1.0], [-3.0, 2.0, 5.0], [0.25, 7.0, -6.0]])
OTHER = W.roll(1, 1)
LOW, HIGH = W.chunk(2)
ONE = torch.tensor(1)
DECAY = torch.tensor(0.01, dtype=OPTION)
DIFFERENCES = [  # stage; what one rank has, and what two have, the same or their parts; what is said of it
    (START, W, (W[0::2], W[1::2]), "experts are in another order: [0, 2, 1, 3]"),
    (START, W, (1.125 * W, 0.875 * W), "ranks have factors of their own: 1.125 on rank 0"),
    (START, W, (W.double(), W), "has torch.float64 on rank 0, torch.float32 on the last, and"),
    (START, W, (W, W[:2]), "has shapes [[4, 3], [2, 3]] on 2 of the ranks, and has shape [4, 3]"),
    (ACTIVATION, W, (HIGH, LOW), "rank 0 has the part of rank 1"),
    (ACTIVATION, W, (LOW + HIGH / 8, HIGH + LOW / 8), "on rank 0, 1: often dropout, or a forward"),
    (GRADIENT, W, ((LOW + HIGH) / 2,) * 2, "the mean over ranks, of different experts"),
    (GRADIENT, W, (2 * LOW, 2 * HIGH), "2 times the one-rank value on all ranks: a factor of 1/"),
    (GRADIENT, W, (LOW / 2, HIGH / 2), "0.5 times the one-rank value on all ranks: a factor of n"),
    (GRADIENT, W, (0 * W, 0 * W), "0 times the one-rank value on all ranks: nothing computes it"),
    (GRADIENT, W, (W + OTHER, W - OTHER), "their mean is the one-rank value: nothing averages"),
    (GRADIENT, W, (OTHER, W - OTHER), "the sum is 1 times the one-rank value: nothing adds them"),
    (GRADIENT, W, (W + OTHER,) * 2, "the same on all ranks, and another on one rank: often a term"),
    (UPDATE, W, (W + OTHER,) * 2, "another on one rank: often another rate or decay, master"),
    (UPDATE, W, (W, W * 1.0001), "on rank [1] another than on rank 0, by less than is allowed"),
    (SAVED, W, (W, W + OTHER), "on rank 1: often a count or a statistic"),
    (SAVED, ONE, (2 * ONE,) * 2, "2 times the one-rank value on all ranks"),
    (SAVED, DECAY, (DECAY, 0 * DECAY), "ranks have factors of their own: 1 on rank 0, 0 on rank 1"),
]


@pytest.mark.parametrize(("stage", "one", "ranks", "text"), DIFFERENCES)
def test_what_is_said_of_a_difference(
    stage: str, one: torch.Tensor, ranks: tuple[torch.Tensor, ...], text: str
):
    def found(its: torch.Tensor) -> dict[str, Tensors]:
        before = STAGES[: STAGES.index(stage)]
        return {**{each: {} for each in before}, stage: {"w": its}}

    (told,) = compare("fp32", found(one), {}, [found(its) for its in ranks])
    assert text in told.text


LOADS = [  # what two ranks load instead of W, their parts of it or all of it; what is said of it
    ((W, W), (OTHER, OTHER), "is what other was: names are exchanged on rank 0, 1"),
    ((W, W), (-W, -W), "is as it was before the step: a checkpoint of an older step, on rank 0, 1"),
    (
        (W / 3, W / 3),
        ((W / 3).bfloat16().float(),) * 2,
        "was rounded to torch.bfloat16 on rank 0, 1",
    ),
    ((ONE, ONE), (~ONE, ~ONE), "was not loaded on rank 0, 1"),
    ((W, W), (W * torch.nan, W), "was not loaded on rank 0"),
    ((LOW, HIGH), (LOW, LOW), "is the part of rank 0: a checkpoint of one rank's, on rank 1"),
    ((LOW, HIGH), (W[0::2], W[1::2]), "has experts in another order: [0, 2] on rank 0"),
    ((W, W), (W, W + 1e-6), "has other bits on rank 1"),
    ((W, W), (W.double(), W), "is torch.float64 [4, 3], and was torch.float32 [4, 3], on rank 0"),
    ((W, W), (W[:0], W), "is not there any more on rank 0"),
]


@pytest.mark.parametrize(("saved", "loaded", "text"), LOADS)
def test_what_is_said_of_a_load(
    saved: tuple[torch.Tensor, ...], loaded: tuple[torch.Tensor, ...], text: str
):
    ranks = []
    for its, now in zip(saved, loaded, strict=True):
        found: dict[str, Tensors] = {each: {} for each in STAGES}
        found[START] = {"w": -its}
        found[SAVED] = {"w": its, "other": OTHER}
        found[LOADED] = {} if now is its else {"w": now}
        ranks.append(found)
    told = {
        each.name: each.text
        for each in compare("fp32", ranks[0], {}, ranks)
        if each.stage == LOADED
    }
    assert text in told["w"]
    assert told["other"] == ""
