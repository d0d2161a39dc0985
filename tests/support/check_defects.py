"""A small model for `symmoe check` with all that a checkpoint has to keep, ways to train it that are right, and defects
that training code has had on several ranks. All are planted where there are several: one rank is always right."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import symmoe
from symmoe.tools.check import Context, Trained

RATE = 1e-3
EXPERTS = "moe.0.experts.fc1.weight"
State = dict[str, torch.Tensor]


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


def fill(
    model: Small, context: Context, *, takes_turns: bool = False, assign: bool = False
) -> Small:
    """Weights that do not depend on the number of ranks. takes_turns: experts r, r + num_ranks, ... are rank r's."""
    generator = torch.Generator().manual_seed(1)
    for name, its in model.named_parameters():
        is_expert = ".experts." in name
        shape = (its.shape[0] * context.num_ranks, *its.shape[1:]) if is_expert else its.shape
        whole = torch.randn(shape, generator=generator) / 4
        part = whole
        if is_expert and takes_turns:
            part = whole[context.rank :: context.num_ranks]
        elif is_expert:
            part = whole.chunk(context.num_ranks)[context.rank]
        model.load_state_dict({name: part.to(its.dtype)}, strict=False, assign=assign)
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

    def load(self, folder: str, change: Callable = lambda it, state: None) -> None:
        """With something done to the model's state on its way."""
        stored = torch.load(Path(folder, f"{self.context.rank}.pt"))
        change(self, stored["model"])
        self.model.load_state_dict(stored["model"], strict=False)
        self.optimizer.load_state_dict(stored["optimizer"])


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE)


def training(context: Context, optimizer: Callable = adam, **options: bool) -> Training:
    model = fill(Small(context.heap).to(context.dtype), context, **options)
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


def on_the_way(change: Callable[[Training, State], object]) -> Callable:
    """The same of a change of the model's state between saving and loading."""
    return plants("load")(partial(Training.load, change=change))


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


def takes_turns(context: Context) -> Trained:
    return trained(training(context, takes_turns=True))


@plants("start")
def scalars_differ(it: Training) -> None:
    """By rank; their mean is right."""
    it.model.scale.data += (-1) ** it.context.rank / 8


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


@plants("start")
def norm_of_other_dtype(it: Training) -> None:
    norm = it.model.norms[0].double()
    norm.register_forward_pre_hook(lambda _, args: (args[0].double(),))
    norm.register_forward_hook(lambda _, args, y: y.to(it.context.dtype))


# -- forward and backward ---------------------------------------------------------------------------------------------


@plants("backward")
def tokens_of_the_next(it: Training, tokens: torch.Tensor) -> None:
    every = [torch.empty_like(tokens) for _ in range(it.context.num_ranks)]
    dist.all_gather(every, tokens.contiguous())
    reduce(it.model, every[(it.context.rank + 1) % it.context.num_ranks])


@plants("backward")
def sees_all_tokens(it: Training, tokens: torch.Tensor) -> None:
    """A mixing of positions over the sequences of all ranks."""

    def mix(module: nn.Module, args: object, y: torch.Tensor) -> torch.Tensor:
        every = y.detach().clone()
        dist.all_reduce(every)
        return y + every / 8

    it.model.frozen.register_forward_hook(mix, prepend=True)
    reduce(it.model, tokens)


def _keeps_its_own(name: str, it: Training, tokens: torch.Tensor) -> None:
    """Gradient: it is not averaged over ranks."""
    it.model(tokens)[1].backward()
    its = it.model.get_parameter(name)
    own = its.grad.clone()
    symmoe.reduce_gradients(it.model)
    its.grad.copy_(own)


scalar_not_averaged = plants("backward")(partial(_keeps_its_own, "scale"))


@plants("backward")
def own_loss_twice(it: Training, tokens: torch.Tensor) -> None:
    """The layers' loss counts num_ranks times."""
    loss, whole = it.model(tokens)
    (loss + (whole - loss) * it.context.num_ranks).backward()
    symmoe.reduce_gradients(it.model)


# -- the step ---------------------------------------------------------------------------------------------------------


@plants("step")
def without_a_bias(it: Training) -> None:
    it.model.norms[1].bias.grad = None
    it.step()


@plants("step")
def decays_on_rank_1(it: Training) -> None:
    it.optimizer.param_groups[0]["weight_decay"] = 0.01 if it.context.rank == 0 else 0.0
    it.step()


@plants("step")
def decays_no_experts_on_rank_1(it: Training) -> None:
    (group,) = it.optimizer.param_groups
    experts = [its for name, its in it.model.named_parameters() if ".experts." in name]
    group["params"] = [its for its in group["params"] if all(its is not e for e in experts)]
    decay = 0.01 if it.context.rank == 0 else 0.0
    it.optimizer.add_param_group({"params": experts, "weight_decay": decay})
    it.step()


@plants("step")
def bias_by_own_load(it: Training) -> None:
    it.step()
    it.model.moe[0].router.expert_bias += 1e-3 * it.context.rank


@plants("step")
def rate_falls_twice(it: Training) -> None:
    it.step()
    it.optimizer.param_groups[0]["lr"] *= 0.999**it.context.num_ranks


@plants("step")
def counts_ranks(it: Training) -> None:
    it.step()
    it.model.num_steps += it.context.num_ranks - 1


# -- save and load ----------------------------------------------------------------------------------------------------


@on_the_way
def experts_in_turns(it: Training, state: State) -> None:
    ours = state[EXPERTS].contiguous()
    every = [torch.empty_like(ours) for _ in range(it.context.num_ranks)]
    dist.all_gather(every, ours)
    state[EXPERTS] = torch.cat(every)[it.context.rank :: it.context.num_ranks]


@on_the_way
def exchanges_norms(it: Training, state: State) -> None:
    first = state["norms.0.bias"]
    state["norms.0.bias"] = state["norms.1.bias"]
    state["norms.1.bias"] = first


@on_the_way
def one_number_of_many(it: Training, state: State) -> None:
    """Not one of those that are kept of large parameters."""
    state["embed.weight"] = state["head.weight"] = state["embed.weight"].clone()
    state["embed.weight"][1, 1] += 1e-6


@on_the_way
def experts_of_before(it: Training, state: State) -> None:
    state[EXPERTS] = training(it.context).model.state_dict()[EXPERTS]


saved_in_bf16 = on_the_way(lambda it, state: state.update({EXPERTS: state[EXPERTS].bfloat16()}))
forgets_an_integer = on_the_way(lambda it, state: state.pop("num_steps"))
scalar_of_rank = on_the_way(lambda it, state: state["scale"].add_(1e-6 * it.context.rank))


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
