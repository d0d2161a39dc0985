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
            hidden=16, ffn=24, num_experts=4, top_k=2, expert_bias=True, order="slot", z_loss_coef=1
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

    @property
    def is_one(self) -> bool:
        return self.context.num_ranks == 1

    def backward(self, tokens: torch.Tensor) -> None:
        reduce(self.model, tokens)

    def step(self) -> None:
        self.optimizer.step()
        symmoe.balance_step(self.model)
        self.model.num_steps += 1

    def state(self) -> dict:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def save(self, folder: str) -> None:
        torch.save(self.state(), Path(folder, f"{self.context.rank}.pt"))

    def load(self, folder: str) -> None:
        stored = torch.load(Path(folder, f"{self.context.rank}.pt"))
        self.model.load_state_dict(stored["model"])
        self.optimizer.load_state_dict(stored["optimizer"])


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE)


def training(context: Context, optimizer: Callable = adam, **options: bool) -> Training:
    model = fill(Small(context.heap).to(context.dtype), context, **options)
    return Training(context, model, optimizer(list(model.parameters())))


def trained(it: Training, **changes: Callable) -> Trained:
    """With parts of a training changed on several ranks."""
    parts = {"backward": it.backward, "step": it.step, "save": it.save, "load": it.load} | (
        changes if not it.is_one else {}
    )
    return Trained(model=it.model, optimizer=it.optimizer, **parts)


# -- right ------------------------------------------------------------------------------------------------------------


def plain(context: Context) -> Trained:
    return trained(training(context))


def from_meta(context: Context) -> Trained:
    """Made on the meta device, with what is loaded put in the place of it."""
    with torch.device("meta"):
        model = Small(context.heap)
    fresh = Small(context.heap).to(context.dtype)
    model.load_state_dict(fresh.state_dict(), assign=True)
    model.head.weight = model.embed.weight
    fill(model, context)
    model.frozen.requires_grad_(False)
    it = Training(context, model, adam(list(model.parameters())))
    return trained(it)


def loads_by_assignment(context: Context) -> Trained:
    """Which makes new parameters; without state of the optimizer, which a resumed job makes after it."""
    it = training(context)

    def load(folder: str) -> None:
        stored = torch.load(Path(folder, f"{context.rank}.pt"))
        it.model.load_state_dict(stored["model"], assign=True)
        it.model.head.weight = it.model.embed.weight

    right = trained(it)
    return dataclasses.replace(right, optimizer=None, load=load)


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


def statistics_of_rank_0(context: Context) -> Trained:
    """Loaded by all, as from a checkpoint with one copy of what is not an expert's."""
    it = training(context)

    def load(folder: str) -> None:
        it.load(folder)
        dist.broadcast(it.model.running_mean, src=0)

    return trained(it, load=load)


# -- at the start -----------------------------------------------------------------------------------------------------


def at_start(change: Callable[[Training], object], context: Context) -> Trained:
    it = training(context)
    if not it.is_one:
        with torch.no_grad():
            change(it)
    return trained(it)


def takes_turns(context: Context) -> Trained:
    return trained(training(context, takes_turns=True))


def _scalars_differ(it: Training) -> None:
    """By rank; their mean is right."""
    it.model.scale += (-1) ** it.context.rank / 8


def _unties(it: Training) -> None:
    it.model.head.weight = nn.Parameter(it.model.embed.weight.clone())


scalars_differ = partial(at_start, _scalars_differ)
counts_on = partial(at_start, lambda it: it.model.num_steps.add_(it.context.rank))
unties = partial(at_start, _unties)


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


def norm_of_other_dtype(context: Context) -> Trained:
    it = training(context)
    if not it.is_one:
        it.model.norms[0].double()
        it.model.norms[0].register_forward_pre_hook(lambda _, args: (args[0].double(),))
        it.model.norms[0].register_forward_hook(lambda _, args, y: y.to(context.dtype))
    return trained(it)


# -- forward and backward ---------------------------------------------------------------------------------------------


def with_backward(
    backward: Callable[[Training, torch.Tensor], object], context: Context
) -> Trained:
    it = training(context)
    return trained(it, backward=partial(backward, it))


def _tokens_of_the_next(it: Training, tokens: torch.Tensor) -> None:
    every = [torch.empty_like(tokens) for _ in range(it.context.num_ranks)]
    dist.all_gather(every, tokens.contiguous())
    reduce(it.model, every[(it.context.rank + 1) % it.context.num_ranks])


def _sees_all_tokens(it: Training, tokens: torch.Tensor) -> None:
    """A mixing of positions over the sequences of all ranks."""

    def mix(module: nn.Module, args: object, y: torch.Tensor) -> torch.Tensor:
        every = y.detach().clone()
        dist.all_reduce(every)
        return y + every / 8

    it.model.frozen.register_forward_hook(mix, prepend=True)
    reduce(it.model, tokens)


def _keeps_its_own(which: Callable[[Small], nn.Parameter], it: Training, tokens) -> None:
    """Gradient: it is not averaged over ranks."""
    it.model(tokens)[1].backward()
    its = which(it.model)
    own = its.grad.clone()
    symmoe.reduce_gradients(it.model)
    its.grad.copy_(own)


def _own_loss_twice(it: Training, tokens: torch.Tensor) -> None:
    """The layers' loss counts num_ranks times."""
    loss, whole = it.model(tokens)
    (loss + (whole - loss) * it.context.num_ranks).backward()
    symmoe.reduce_gradients(it.model)


tokens_of_the_next = partial(with_backward, _tokens_of_the_next)
sees_all_tokens = partial(with_backward, _sees_all_tokens)
scalar_not_averaged = partial(with_backward, partial(_keeps_its_own, lambda model: model.scale))
router_not_averaged = partial(
    with_backward, partial(_keeps_its_own, lambda model: model.moe[1].router.weight)
)
own_loss_twice = partial(with_backward, _own_loss_twice)


# -- the step ---------------------------------------------------------------------------------------------------------


def with_step(step: Callable[[Training], object], context: Context) -> Trained:
    it = training(context)

    def stepped() -> None:
        with torch.no_grad():
            step(it)

    return trained(it, step=stepped)


def _without_a_bias(it: Training) -> None:
    it.model.norms[1].bias.grad = None
    it.step()


def _frozen_too(it: Training) -> None:
    it.step()
    it.model.frozen.weight += RATE


def _decays_on_rank_1(it: Training) -> None:
    it.optimizer.param_groups[0]["weight_decay"] = 0.01 if it.context.rank == 0 else 0.0
    it.step()


def _decays_no_experts_on_rank_1(it: Training) -> None:
    (group,) = it.optimizer.param_groups
    named = {name: its for name, its in it.model.named_parameters() if ".experts." in name}
    group["params"] = [its for its in group["params"] if not any(its is e for e in named.values())]
    decay = 0.01 if it.context.rank == 0 else 0.0
    it.optimizer.add_param_group({"params": list(named.values()), "weight_decay": decay})
    it.step()


def _bias_by_own_load(it: Training) -> None:
    it.step()
    it.model.moe[0].router.expert_bias += 1e-3 * it.context.rank


def _rate_falls_twice(it: Training) -> None:
    it.step()
    it.optimizer.param_groups[0]["lr"] *= 0.999**it.context.num_ranks


def _momentum_in_bf16(it: Training) -> None:
    it.step()
    for state in it.optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].bfloat16()


without_a_bias = partial(with_step, _without_a_bias)
frozen_too = partial(with_step, _frozen_too)
decays_on_rank_1 = partial(with_step, _decays_on_rank_1)
decays_no_experts_on_rank_1 = partial(with_step, _decays_no_experts_on_rank_1)
bias_by_own_load = partial(with_step, _bias_by_own_load)
rate_falls_twice = partial(with_step, _rate_falls_twice)
momentum_in_bf16 = partial(with_step, _momentum_in_bf16)
counts_ranks = partial(
    with_step, lambda it: (it.step(), it.model.num_steps.add_(it.context.num_ranks - 1))
)


# -- save and load ----------------------------------------------------------------------------------------------------


def with_load(change: Callable[[Training, State], object], context: Context) -> Trained:
    """With something done to the model's state on its way."""
    it = training(context)
    start = {name: its.clone() for name, its in it.model.state_dict().items()}

    def load(folder: str) -> None:
        stored = torch.load(Path(folder, f"{context.rank}.pt"))
        change(it, stored["model"], start)
        it.model.load_state_dict(stored["model"], strict=False)
        it.optimizer.load_state_dict(stored["optimizer"])

    return trained(it, load=load)


def _experts_in_turns(it: Training, state: State, start: State) -> None:
    ours = state[EXPERTS].contiguous()
    every = [torch.empty_like(ours) for _ in range(it.context.num_ranks)]
    dist.all_gather(every, ours)
    state[EXPERTS] = torch.cat(every)[it.context.rank :: it.context.num_ranks]


def _exchanges_norms(it: Training, state: State, start: State) -> None:
    first = state["norms.0.bias"]
    state["norms.0.bias"] = state["norms.1.bias"]
    state["norms.1.bias"] = first


def _one_number_of_many(it: Training, state: State, start: State) -> None:
    """Not one of those that are kept of large parameters."""
    state["embed.weight"] = state["head.weight"] = state["embed.weight"].clone()
    state["embed.weight"][1, 1] += 1e-6


one_number_of_many = partial(with_load, _one_number_of_many)
experts_in_turns = partial(with_load, _experts_in_turns)
exchanges_norms = partial(with_load, _exchanges_norms)
experts_of_before = partial(
    with_load, lambda it, state, start: state.update({EXPERTS: start[EXPERTS]})
)
saved_in_bf16 = partial(
    with_load, lambda it, state, start: state.update({EXPERTS: state[EXPERTS].bfloat16()})
)
forgets_an_integer = partial(with_load, lambda it, state, start: state.pop("num_steps"))
scalar_of_rank = partial(
    with_load, lambda it, state, start: state["scale"].add_(1e-6 * it.context.rank)
)


def forgets_the_optimizer(context: Context) -> Trained:
    it = training(context)

    def load(folder: str) -> None:
        stored = torch.load(Path(folder, f"{context.rank}.pt"))
        it.model.load_state_dict(stored["model"])

    return trained(it, load=load)


def unties_in_load(context: Context) -> Trained:
    it = training(context)

    def load(folder: str) -> None:
        it.load(folder)
        it.model.head.weight = nn.Parameter(it.model.embed.weight.detach().clone())

    return trained(it, load=load)


def masters_in_bf16(context: Context) -> Trained:
    is_one = context.num_ranks == 1
    return with_masters(context, dtype=torch.float32 if is_one else torch.bfloat16)
