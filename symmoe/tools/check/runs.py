"""One rank of a run: a step of the model, with every intermediate tensor written to files."""

from __future__ import annotations

import sys
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from symmoe.errors import ArgumentError
from symmoe.grouped.parameters import local_part, named_parameters
from symmoe.moe.ddp_and_fsdp import ExpertParallelModule
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.tools.check.model import BadTarget, Context, Trained, make
from symmoe.tools.doctor.self_test import be_rank
from symmoe.tools.ranks import Ranks
from symmoe.torch_internals import pytree
from symmoe.training.gradients import clip_grad_norm, reduce_gradients

START, ACTIVATION, GRADIENT, CLIPPED, UPDATE, SAVED, LOADED = STAGES = (
    *("state at start", "activation", "gradient", "gradient after clip"),
    *("update by the step", "state after the step", "state after load"),
)
OWN = " (a rank's own)"  # suffix of a buffer that may differ by rank
_EXTRAS = {"transformers": "transformers", "safetensors": "checkpoint"}  # of symmoe, by module
OPTION = torch.float64  # dtype of an optimizer's options as tensors, which must match bit for bit
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_VOCABULARY = 128
_MOST, _MOST_OF_ROW = (
    1 << 20,
    1 << 12,
)  # numbers kept per parameter, or per matrix of a stack (experts)

Tensors = Mapping[str, torch.Tensor]
_SaveOrLoad = Callable[[str], object]  # saves to or loads from a folder


class Job(NamedTuple):
    """The job of all ranks: options of the command, and the folder for files."""

    target: str
    ranks: int
    dtype: str
    layers: int | None
    length: int
    heap_mib: int
    folder: str

    def file(self, dtype: str, num_ranks: int, rank: int, stage: str) -> Path:
        """The file of a rank's tensors."""
        return Path(self.folder, f"{dtype}-{num_ranks}-{rank}-{stage}.pt")


def run(job: Job, ranks: Ranks, wait_s: float) -> dict[str, float]:
    """Runs a rank's steps in each dtype, and writes files. Collective."""
    for dtype in dict.fromkeys(["fp32", job.dtype]):
        with SymmetricHeap(
            num_bytes=job.heap_mib << 20, timeout_s=wait_s, start_timeout_s=wait_s
        ) as heap:
            for stage, tensors in _step(job, ranks, heap, dtype):
                torch.save(tensors, part := Path(job.folder, f"{ranks.rank}.part"))
                part.rename(
                    job.file(dtype, ranks.num_ranks, ranks.rank, stage)
                )  # whole: this process may be killed
    return {}


def _step(job: Job, ranks: Ranks, heap: SymmetricHeap, dtype: str) -> Iterator[tuple[str, Tensors]]:
    """The stages of a step, and this rank's tensors in each. Collective."""
    first, folder = (Path(job.folder, f"{dtype}-{name}") for name in ("start", ranks.num_ranks))
    first.mkdir(exist_ok=True)
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    context = Context(
        ranks.rank,
        ranks.num_ranks,
        heap.device,
        dtype=DTYPES[dtype],
        heap=heap,
        folder=str(first),
    )
    trained = make(job.target, context, job.layers)
    model = trained.model
    names = {id(tensor): name for name, tensor in model.named_parameters()}
    trains = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    start = _values(_state(trained, names))
    yield START, start
    optimizer = trained.optimizer
    if optimizer is None and trained.step is None:
        optimizer = torch.optim.AdamW(trains.values(), lr=1e-3)
    take_step = trained.step or cast("torch.optim.Optimizer", optimizer).step
    vocabulary = min(
        _VOCABULARY, getattr(getattr(model, "config", None), "vocab_size", _VOCABULARY)
    )
    # One sequence per rank of the largest run.
    tokens = torch.randint(
        0, vocabulary, (job.ranks, job.length), generator=torch.Generator().manual_seed(0)
    )
    with _recorded(model) as outputs:
        (trained.backward or partial(_backward, model))(
            tokens.chunk(ranks.num_ranks)[ranks.rank].to(heap.device)
        )
    yield ACTIVATION, outputs
    gradients, experts = _gradients(trains), _experts(model)
    if ranks.num_ranks == 1 and not any(tensor.any() for tensor in gradients.values()):
        raise ArgumentError(
            "backward has left no parameter a gradient, or only zeros: there is nothing to compare"
        )
    yield GRADIENT, gradients
    # Below the norm of all gradients: half the norm of the first replicated gradient.
    norms = (
        gradients[name].float().norm().item()
        for name, tensor in trains.items()
        if id(tensor) not in experts
    )
    (trained.clip or partial(clip_grad_norm, model))(
        next((norm / 2 for norm in norms if norm > 0), 1e-4)
    )
    yield CLIPPED, _gradients(trains)
    take_step()
    stepped = _values(dict(model.named_parameters()))
    yield (
        UPDATE,
        {
            name: stepped[name].float() - tensor.float()
            for name, tensor in start.items()
            if name in stepped
        },
    )
    yield SAVED, _values(_state(trained, names, optimizer))
    if trained.optimizer is None and (trained.save or trained.load):
        optimizer = None  # save and load do not use it
    save, load = _save_and_load(trained, optimizer)
    before = _state(trained, names, optimizer)
    bits = {name: _bits(tensor) for name, tensor in before.items()}
    save(str(folder))
    for tensor in before.values():  # shows tensors that load misses
        part = local_part(tensor.detach())
        part.copy_(spoilt(part))
    ranks.barrier()
    load(str(folder))
    after = _state(trained, names, optimizer)
    changed = [name for name in bits if name not in after or _bits(after[name]) != bits[name]]
    yield LOADED, _values({name: after.get(name, torch.empty(0)) for name in changed})


def _save_and_load(
    trained: Trained, optimizer: torch.optim.Optimizer | None
) -> tuple[_SaveOrLoad, _SaveOrLoad]:
    """The functions that save and load: of the target, or of symmoe.checkpoint."""
    if trained.save and trained.load:
        return trained.save, trained.load
    from symmoe import checkpoint  # needs safetensors, which is optional

    save = partial(checkpoint.save_checkpoint, step=1, model=trained.model, optimizer=optimizer)
    load = partial(checkpoint.load_checkpoint, model=trained.model, optimizer=optimizer)
    return trained.save or save, trained.load or load


def _backward(model: nn.Module, tokens: torch.Tensor) -> None:
    model(input_ids=tokens, labels=tokens).loss.backward()
    reduce_gradients(model)


def _experts(model: nn.Module) -> set[int]:
    """The ids of experts' parameters: in modules that hold experts, or with Megatron's mark."""
    return {
        id(param)
        for _, param, is_expert in named_parameters(model)
        if is_expert or not getattr(param, "allreduce", True)
    }


def _state(
    trained: Trained, names: Mapping[int, str], optimizer: torch.optim.Optimizer | None = None
) -> dict[str, torch.Tensor]:
    """The state in a checkpoint. Of the model: parameters, buffers, and True for tied parameters. Of the optimizer:
    tensors and numeric options, by parameter; and its own parameters, such as master weights. names: of the model's
    parameters, by id."""
    model = trained.model
    state: dict[str, torch.Tensor] = {}
    first: dict[int, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(param), name) == name:
            state[name] = param
        else:
            state[f"tie of {name} to {first[id(param)]}"] = torch.tensor(True)
    persistent = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in persistent:
            is_own = any(fnmatchcase(name, pattern) for pattern in trained.own_buffers)
            state[name + OWN * is_own] = buffer
    if optimizer is None:
        return state
    num_of_model = len(state)
    for group in optimizer.param_groups:
        options = {
            key: torch.tensor(value, dtype=OPTION)
            for key, value in group.items()
            if isinstance(value, float)
        }
        for param in group["params"]:
            name = names.get(id(param), f"weight {len(state) - num_of_model} of the optimizer")
            if id(param) not in names:
                state[name] = param
            state |= {
                f"{key} of {name}": value
                for key, value in (options | optimizer.state.get(param, {})).items()
                if isinstance(value, torch.Tensor)
            }
    return state


def spoilt(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that differs from the argument in every element."""
    is_of_floats = tensor.is_floating_point() or tensor.is_complex()
    return torch.full_like(tensor, torch.nan) if is_of_floats else ~tensor


def _bits(tensor: torch.Tensor) -> tuple[object, ...]:
    """A value that is equal for tensors whose dtype, shape and bits of this rank's part are equal."""
    part = local_part(tensor.detach()).cpu().contiguous()
    return part.dtype, part.shape, zlib.crc32(part.view(-1).view(torch.uint8).numpy().data)


def _values(tensors: Mapping[str, Any]) -> Tensors:
    """Copies of tensors on the host. DTensors are gathered. A large tensor is sampled: every k-th number, the same
    numbers of an expert on any rank."""
    values = {}
    for name, tensor in tensors.items():
        value = (tensor.full_tensor() if hasattr(tensor, "device_mesh") else tensor).detach().cpu()
        rows, limit = (len(value), _MOST_OF_ROW) if value.dim() > 2 else (1, _MOST)
        if (size := value.numel() // max(1, rows)) > limit:
            value = value.reshape(rows, -1)[:, :: size // limit | 1]  # odd, to sample many columns
        values[name] = value.clone()
    return values


def _gradients(params: Mapping[str, nn.Parameter]) -> Tensors:
    """The gradients: Megatron's `main_grad`, or `grad`, or zeros."""
    gradients = {}
    for name, param in params.items():
        main = getattr(param, "main_grad", None)
        gradient = param.grad if main is None else main
        gradients[name] = torch.zeros_like(param) if gradient is None else gradient
    return _values(gradients)


@contextmanager
def _recorded(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """A dict that receives the outputs of modules' first calls in the context, in the order of return. Excludes modules
    within experts, whose rows depend on the number of ranks."""
    outputs: dict[str, torch.Tensor] = {}
    experts = _experts(model)
    hidden = list[str]()

    def record(path: str, module: nn.Module, args: object, output: object) -> None:
        for key, value in pytree.tree_flatten_with_path(output)[0]:
            if isinstance(value, torch.Tensor):
                outputs.setdefault(
                    f"{path or 'the model'}{pytree.keystr(key)}", value.detach().cpu().clone()
                )

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            ids = set(map(id, module.parameters()))
            if ids and ids <= experts and path and not isinstance(module, ExpertParallelModule):
                hidden.append(f"{path}.")
            if not f"{path}.".startswith(tuple(hidden)):
                hooks.callback(module.register_forward_hook(partial(record, path)).remove)
        yield outputs


def text_of(rank: int, error: Exception) -> str:
    """The text of an error with the rank, the user's line and, for a missing package, the command that installs it."""
    if isinstance(error, BadTarget):
        return f"{error}"
    frames = traceback.extract_tb(error.__traceback__)[::-1]
    user_frame = next(
        (frame for frame in frames if "site-packages" not in frame.filename), frames[0]
    )  # the caller's, not torch's
    extra = _EXTRAS.get(error.name or "") if isinstance(error, ImportError) else None
    fix = f": pip install '.[{extra}]'" if extra else ""
    return f"rank {rank}: {error} ({user_frame.filename}:{user_frame.lineno}){fix}"


if __name__ == "__main__":
    sys.exit(
        be_rank(sys.argv[-1], lambda ranks, wait_s, job: run(Job(*job), ranks, wait_s), text_of)
    )
