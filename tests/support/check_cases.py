"""Models for `symmoe check`: a right one, and others with one of the defects that trainers have had."""

import dataclasses
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hf_cases import random_model
from small_model import open_mesh

import symmoe
from symmoe.checkpoint import load_checkpoint, save_checkpoint
from symmoe.integrations.parallel import parallelize
from symmoe.integrations.transformers import swap_moe
from symmoe.moe.ownership import trainable
from symmoe.tools.check import Context, Trained


def right(context: Context) -> Trained:
    model = random_model("qwen3_moe", dtype=context.dtype, output_router_logits=False)
    return Trained(model=swap_moe(model, context.heap))


def other_seed(context: Context) -> Trained:
    model = random_model("qwen3_moe", seed=context.rank, dtype=context.dtype)
    return Trained(model=swap_moe(model, context.heap))


def after_backward(trained: Trained, change) -> Trained:
    """With something done to the gradients of experts."""

    def backward(tokens: torch.Tensor) -> None:
        trained.model(input_ids=tokens, labels=tokens).loss.backward()
        symmoe.reduce_gradients(trained.model)
        for parameter in trainable(trained.model)[1]:
            change(parameter.grad)

    return dataclasses.replace(trained, backward=backward)


def averaged(context: Context) -> Trained:
    """Experts are taken for copies of one."""
    return after_backward(right(context), lambda grad: dist.all_reduce(grad.div_(context.num_ranks)))


def not_divided(context: Context) -> Trained:
    return after_backward(right(context), lambda grad: grad.mul_(context.num_ranks))


def divided_twice(context: Context) -> Trained:
    return after_backward(right(context), lambda grad: grad.div_(context.num_ranks))


def clipped_alone(context: Context) -> Trained:
    """By the norm over one rank's experts, as torch's function does."""
    trained = right(context)
    clip = torch.nn.utils.clip_grad_norm_
    return dataclasses.replace(trained, clip=lambda max_norm: clip(trained.model.parameters(), max_norm))


def step_without_experts(context: Context) -> Trained:
    """Of other ranks than the first."""
    trained = right(context)
    dense, experts = trainable(trained.model)
    return dataclasses.replace(trained, step=torch.optim.SGD(dense + experts * (context.rank == 0), lr=0.1).step)


def saved_alone(context: Context) -> Trained:
    """Rank 0 saves its own experts, for all."""
    trained = right(context)

    def save(folder: str) -> None:
        if context.rank == 0:
            torch.save(trained.model.state_dict(), Path(folder, "model.pt"))

    def load(folder: str) -> None:
        trained.model.load_state_dict(torch.load(Path(folder, "model.pt")))

    return dataclasses.replace(trained, save=save, load=load)


def loads_no_experts(context: Context) -> Trained:
    trained = saved_alone(context)

    def load(folder: str) -> None:
        names = {name for name, _ in trained.model.named_parameters() if ".experts." not in name}
        there = torch.load(Path(folder, "model.pt"))
        trained.model.load_state_dict({name: there[name] for name in names}, strict=False)

    return dataclasses.replace(trained, load=load)


class Adapted(torch.nn.Module):
    """Tokens through experts of [E, H, H] that share one adapter, as in docs/own_experts.md."""

    holds_experts = True

    def __init__(self, num_experts: int, num_local: int, start: int) -> None:
        super().__init__()
        whole = torch.randn(num_experts, 16, 16) / 4
        self.weight = torch.nn.Parameter(whole[start : start + num_local].clone())
        self.lora_a, self.lora_b = (torch.nn.Parameter(torch.randn(*shape) / 4) for shape in ((4, 16), (16, 4)))

    def forward(self, rows: torch.Tensor, splits: torch.Tensor) -> torch.Tensor:
        parts = zip(rows.split(splits.tolist()), self.weight, strict=True)
        return torch.cat([part @ weight for part, weight in parts]) + rows @ self.lora_a.T @ self.lora_b.T


class Layer(torch.nn.Module):
    def __init__(self, heap: symmoe.SymmetricHeap) -> None:
        super().__init__()
        self.heap, self.embedding = heap, torch.nn.Embedding(128, 16)
        self.router, num_local = torch.nn.Linear(16, 4), 4 // heap.num_ranks
        self.experts = Adapted(4, num_local, heap.rank * num_local)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens).flatten(0, 1)
        probs, topk_idx = self.router(x).softmax(-1).topk(2)
        plan = symmoe.make_plan(topk_idx, num_experts=4, heap=self.heap)
        rows, row_probs = symmoe.dispatch_tokens(x, plan, probs=probs)
        return symmoe.combine_tokens(self.experts(rows, plan.splits) * row_probs[:, None], plan)


def shared_adapter(context: Context) -> Trained:
    """Each rank's copy of the adapter has the gradient of its own experts' rows."""
    model = Layer(context.heap)

    def backward(tokens: torch.Tensor) -> None:
        model(tokens).square().mean().backward()
        symmoe.reduce_gradients(model)

    return Trained(model=model, backward=backward)


def drawn_by_rank(context: Context) -> Trained:
    """A layer whose experts are drawn rank by rank, as a MoELayer's are."""
    config = symmoe.MoEConfig(hidden=16, ffn=24, num_experts=4, top_k=2)
    torch.manual_seed(context.rank)
    model = torch.nn.Sequential(torch.nn.Embedding(128, 16), symmoe.MoELayer(config, context.heap))

    def backward(tokens: torch.Tensor) -> None:
        model(tokens)[0].square().mean().backward()
        symmoe.reduce_gradients(model)

    return Trained(model=model, backward=backward)


def drawn_by_rank_and_loaded(context: Context) -> Trained:
    """Right: ranks load what one rank, which comes first, has saved."""
    trained = drawn_by_rank(context)
    if context.num_ranks == 1:
        save_checkpoint(context.folder, 0, model=trained.model)
    else:
        load_checkpoint(context.folder, model=trained.model)
    return trained


def sharded(context: Context) -> Trained:
    """Right: under FSDP2, with experts and everything else in DTensors."""
    trained = drawn_by_rank_and_loaded(context)
    model = parallelize(trained.model, open_mesh(1, context.num_ranks))

    def backward(tokens: torch.Tensor) -> None:
        model(tokens)[0].square().mean().backward()

    return Trained(
        model=model,
        backward=backward,
        step=torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False).step,
        save=lambda folder: dcp.save(model.state_dict(), checkpoint_id=folder),
        load=lambda folder: dcp.load(model.state_dict(), checkpoint_id=folder),
    )


def raises_on_rank_1(context: Context) -> Trained:
    if context.rank == 1:
        raise ZeroDivisionError("on purpose")
    return right(context)
