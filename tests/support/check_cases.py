"""Models for `symmoe check`: a right one, and others with one of the defects that trainers have had."""

import dataclasses
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hf_cases import random_model
from small_model import open_mesh

import symmoe
from symmoe.checkpoint import load_checkpoint, save_checkpoint
from symmoe.grouped.parameters import trainable
from symmoe.integrations.transformers import swap_moe
from symmoe.moe.router import RouterOutput
from symmoe.tools.check import Context, Trained
from symmoe.torch_internals import pytree
from symmoe.training.parallel import parallelize

if (
    RouterOutput not in pytree.SUPPORTED_NODES
):  # as after parallelize, which ranks of other numbers may have called
    pytree.register_dataclass(RouterOutput)


def right(context: Context) -> Trained:
    model = random_model("qwen3_moe", dtype=context.dtype, output_router_logits=False)
    return Trained(model=swap_moe(model, context.heap))


def spoilt(change, context: Context) -> Trained:
    """With something done to the gradients of experts."""
    trained = right(context)

    def backward(tokens: torch.Tensor) -> None:
        trained.model(input_ids=tokens, labels=tokens).loss.backward()
        symmoe.reduce_gradients(trained.model)
        for parameter in trainable(trained.model)[1]:
            change(parameter.grad, context.num_ranks)

    return dataclasses.replace(trained, backward=backward)


averaged = partial(
    spoilt, lambda grad, num_ranks: dist.all_reduce(grad.div_(num_ranks))
)  # as copies of one
not_divided = partial(spoilt, torch.Tensor.mul_)
divided_twice = partial(spoilt, torch.Tensor.div_)


def clipped_alone(context: Context) -> Trained:
    """By the norm over one rank's experts, as torch's function does."""
    trained = right(context)
    clip = torch.nn.utils.clip_grad_norm_
    return dataclasses.replace(
        trained, clip=lambda max_norm: clip(trained.model.parameters(), max_norm)
    )


def saved_alone(context: Context) -> Trained:
    """Rank 0 saves its own experts, for all."""
    trained = right(context)

    def save(folder: str) -> None:
        if context.rank == 0:
            torch.save(trained.model.state_dict(), Path(folder, "model.pt"))

    def load(folder: str) -> None:
        trained.model.load_state_dict(torch.load(Path(folder, "model.pt")))

    return dataclasses.replace(trained, save=save, load=load)


class Adapter(torch.nn.Module):
    """Of all experts, on their side of dispatch, and so taken for an expert's."""

    holds_experts = True

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (
            torch.nn.Parameter(torch.randn(*shape) / 4) for shape in ((16, 4), (4, 16))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x @ self.a @ self.b


def trained_by_squares(model: torch.nn.Module) -> Trained:
    def backward(tokens: torch.Tensor) -> None:
        y = model(tokens)
        (y[0] if isinstance(y, tuple) else y).square().mean().backward()
        symmoe.reduce_gradients(model)

    return Trained(model=model, backward=backward)


def shared_adapter(context: Context) -> Trained:
    """Each rank's copy of the adapter has the gradient of its own rows."""
    return trained_by_squares(torch.nn.Sequential(torch.nn.Embedding(128, 16), Adapter()))


def drawn_by_rank(context: Context, *, loads: bool = False) -> Trained:
    """A layer whose experts are drawn rank by rank; right if ranks load what one rank has saved."""
    config = symmoe.MoEConfig(hidden=16, ffn=24, num_experts=4, top_k=2)
    torch.manual_seed(context.rank)
    model = torch.nn.Sequential(torch.nn.Embedding(128, 16), symmoe.MoELayer(config, context.heap))
    if loads and context.num_ranks == 1:
        save_checkpoint(context.folder, 0, model=model)
    elif loads:
        load_checkpoint(context.folder, model=model)

    return trained_by_squares(model)


drawn_and_loaded = partial(drawn_by_rank, loads=True)


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


def raises_on_rank_1(context: Context) -> Trained:
    if context.rank == 1:
        torch.nn.Module()(1)  # which raises, in torch's file
    return right(context)


def leaves_no_gradient(context: Context) -> Trained:
    return dataclasses.replace(right(context), backward=lambda tokens: None)


def returns_nothing(context: Context) -> None:
    right(context)
