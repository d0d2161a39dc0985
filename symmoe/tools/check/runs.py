"""One rank: a step of the model, and what it makes of every tensor on the way, in a file. `python -m
symmoe.tools.check.runs` is one."""

from __future__ import annotations

import json
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from symmoe.grouped.parameters import local_part
from symmoe.moe.ddp_and_fsdp import ExpertParallelModule
from symmoe.moe.ownership import named_parameters
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.tools.bench.ranks import Ranks
from symmoe.tools.check.model import Context, make
from symmoe.tools.doctor.self_test import be_rank
from symmoe.torch_internals import pytree
from symmoe.training.gradients import clip_grad_norm, reduce_gradients

START, ACTIVATION, GRADIENT, CLIPPED, UPDATE, LOADED = STAGES = (
    *("weights at start", "activation", "gradient"),
    *("gradient after clip", "update by the step", "weights after load"),
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NUMBERED = re.compile(r"(.*(?:weight|bias|local_experts\.))(\d+)(.*)")  # one of the experts of a rank
_MOST_OF_EXPERT, _MOST = 1 << 12, 1 << 20  # numbers that are kept of an expert's parameter, and of another one
_SEQUENCES, _VOCABULARY = 2, 128

Tensors = dict[str, torch.Tensor]
Found = dict[str, Tensors]  # by stage and name
_Parameters = Mapping[str, tuple[nn.Parameter, bool]]  # by name; whether it is an expert's


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What all ranks do; fields are options of the command. folder: for files."""

    target: str
    ranks: int
    dtype: str
    layers: int | None
    length: int
    heap_mib: int
    copy_weights: bool
    folder: str

    def found(self, dtype: str, num_ranks: int, rank: int, *, is_noisy: bool = False) -> Found:
        """What a rank has left, up to where it has come."""
        files = {stage: self.file(dtype, num_ranks, rank, stage, is_noisy) for stage in STAGES}
        return {stage: torch.load(file) for stage, file in files.items() if file.exists()}

    def file(self, dtype: str, num_ranks: int, rank: int, stage: str, is_noisy: bool) -> Path:
        """Where the tensors of a stage are."""
        return Path(self.folder, f"{dtype}-{num_ranks}-{rank}-{stage}-{is_noisy}.pt")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    return be_rank(argv, lambda ranks, wait_s, job: run(Job(**json.loads(job)), ranks, wait_s), text_of)


def text_of(rank: int, error: Exception) -> str:
    """An error with its rank and its place."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    return f"rank {rank}: {error} ({', '.join(f'{Path(at.filename).name}:{at.lineno} {at.name}' for at in frames)})"


def run(job: Job, ranks: Ranks, wait_s: float) -> dict[str, float]:
    """Steps of a rank in each dtype, written to files; of one rank also with weights off by a rounding. Collective."""
    for dtype in dict.fromkeys(["fp32", job.dtype]):
        for is_noisy in (False, True)[: 1 + (ranks.num_ranks == 1)]:
            with SymmetricHeap(num_bytes=job.heap_mib << 20, timeout_s=wait_s, start_timeout_s=wait_s) as heap:
                file = partial(job.file, dtype, ranks.num_ranks, ranks.rank, is_noisy=is_noisy)
                for stage, tensors in step(job, ranks, heap, dtype, is_noisy=is_noisy):
                    torch.save(tensors, file(stage=stage))
    return {}


def step(job: Job, ranks: Ranks, heap: SymmetricHeap, dtype: str, *, is_noisy: bool) -> Iterator[tuple[str, Tensors]]:
    """Stages, and what this rank makes of every tensor there. Collective."""
    torch.manual_seed(0)
    context = Context(rank=ranks.rank, num_ranks=ranks.num_ranks, device=heap.device, dtype=DTYPES[dtype], heap=heap)
    trained = make(job.target, context, job.layers)
    model, parameters = trained.model, _parameters(trained.model, ranks)
    if job.copy_weights:
        _copy_weights(Path(job.folder, f"{dtype}-whole.pt"), parameters, ranks)
    if is_noisy:
        _add_noise(model, torch.finfo(context.dtype).eps)
    trains = {name: its for name, its in parameters.items() if its[0].requires_grad}
    take_step = trained.step or torch.optim.AdamW([parameter for parameter, _ in trains.values()], lr=1e-3).step
    start = _values(parameters)
    yield START, start
    vocabulary = min(_VOCABULARY, getattr(getattr(model, "config", None), "vocab_size", _VOCABULARY))
    shape = (job.ranks * _SEQUENCES, job.length)  # however many ranks share them
    tokens = torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(0))
    with _recorded(model) as outputs:
        (trained.backward or partial(_backward, model))(tokens.chunk(ranks.num_ranks)[ranks.rank].to(heap.device))
    yield ACTIVATION, outputs
    yield GRADIENT, _values(trains, _gradient)
    (trained.clip or partial(clip_grad_norm, model))(_max_norm(trains))
    yield CLIPPED, _values(trains, _gradient)
    take_step()
    yield UPDATE, {name: value.float() - start[name].float() for name, value in _values(trains).items()}
    if not is_noisy:
        from symmoe.checkpoint import load_checkpoint, save_checkpoint  # safetensors need not be installed

        folder = Path(job.folder, f"{dtype}-{ranks.num_ranks}")
        folder.mkdir(exist_ok=True)
        (trained.save or partial(save_checkpoint, step=1, model=model))(str(folder))
        for parameter, _ in trains.values():
            local_part(parameter.detach()).fill_(torch.nan)  # what is not loaded shows
        ranks.barrier()
        (trained.load or partial(load_checkpoint, model=model))(str(folder))
    yield LOADED, _values(trains)


def _backward(model: nn.Module, tokens: torch.Tensor) -> None:
    model(input_ids=tokens, labels=tokens).loss.backward()
    reduce_gradients(model)


def _parameters(model: nn.Module, ranks: Ranks) -> _Parameters:
    """By names that they have on one rank, where each expert has its own."""
    named = {name.replace("_orig_mod.", ""): (each, is_expert) for name, each, is_expert in named_parameters(model)}
    matches = {name: match for name, its in named.items() if its[1] and (match := _NUMBERED.fullmatch(name))}
    counts = Counter((match[1], match[3]) for match in matches.values())
    its_name = {
        name: f"{match[1]}{int(match[2]) + ranks.rank * counts[match[1], match[3]]}{match[3]}"
        for name, match in matches.items()
    }
    return {its_name.get(name, name): its for name, its in named.items()}


def _values(
    parameters: _Parameters, of: Callable[[nn.Parameter], torch.Tensor] = torch.Tensor.detach
) -> dict[str, torch.Tensor]:
    """Copies; of large tensors every k-th number, the same of an expert on any rank."""
    values = {}
    for name, (parameter, is_expert) in parameters.items():
        value = _whole(of(parameter)).detach().cpu()
        rows, most = (len(value), _MOST_OF_EXPERT) if is_expert else (1, _MOST)
        if (size := value.numel() // max(1, rows)) > most:
            value = value.reshape(rows, -1)[:, :: size // most | 1]  # odd, so that it sees many columns
        values[name] = value.clone()
    return values


def _whole(tensor: Any) -> torch.Tensor:
    """All of a DTensor; collective."""
    whole: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "device_mesh") else tensor
    return whole


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    main = getattr(parameter, "main_grad", None)  # Megatron's
    gradient: torch.Tensor | None = parameter.grad if main is None else main
    return torch.zeros_like(parameter) if gradient is None else gradient


def _max_norm(trains: _Parameters) -> float:
    """Less than the norm of all gradients: half of that of the first that all ranks have."""
    norms = (_whole(_gradient(its)).float().norm().item() for its, is_expert in trains.values() if not is_expert)
    return next((norm / 2 for norm in norms if norm > 0), 1e-4)


@torch.no_grad()
def _add_noise(model: nn.Module, eps: float) -> None:
    generator = torch.Generator().manual_seed(1)
    for local in map(local_part, model.parameters()):
        sign = torch.randint(0, 2, local.shape, generator=generator) * 2 - 1
        local.mul_((1 + eps * sign).to(local.device, local.dtype))


@torch.no_grad()
def _copy_weights(file: Path, parameters: _Parameters, ranks: Ranks) -> None:
    """Gives parameters the values that they have on one rank, an expert its own."""
    if ranks.num_ranks == 1:
        torch.save({name: parameter.detach() for name, (parameter, _) in parameters.items()}, file)
        return
    there = torch.load(file, mmap=True)
    for name, (parameter, _) in parameters.items():
        value = there[name]
        for dim, size in enumerate(parameter.shape):
            if value.shape[dim] == ranks.num_ranks * size:
                value = value.narrow(dim, ranks.rank * size, size)
        parameter.copy_(value)


@contextmanager
def _recorded(model: nn.Module) -> Iterator[Tensors]:
    """What modules return in their first call, in the order in which they return. Not what is within experts, where
    rows lie as the ranks have them."""
    outputs: Tensors = {}
    experts = {id(parameter) for _, parameter, is_expert in named_parameters(model) if is_expert}
    hidden: list[str] = []
    hooks = []

    def note(path: str, module: nn.Module, args: object, output: object) -> None:
        for key, each in pytree.tree_flatten_with_path(output)[0]:
            if isinstance(each, torch.Tensor):
                outputs.setdefault(f"{path or 'the model'}{pytree.keystr(key)}", each.detach().cpu().clone())

    for path, module in model.named_modules():
        ids = {id(parameter) for parameter in module.parameters()}
        if ids and ids <= experts and path and not isinstance(module, ExpertParallelModule):
            hidden.append(f"{path}.")
        if not f"{path}.".startswith(tuple(hidden)):
            hooks.append(module.register_forward_hook(partial(note, path)))
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


if __name__ == "__main__":
    sys.exit(main())
