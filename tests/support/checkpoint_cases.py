"""Models and optimizers whose bits follow from a number, whatever the ranks; what is in a directory of checkpoints."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from symmoe.checkpoint import ExpertShard, load_checkpoint
from symmoe.errors import SymmoeError

FILE = "rank-00000-0000.safetensors"
Bits = dict[str, bytes]


def draw(label: str, like: torch.Tensor) -> torch.Tensor:
    """Values that follow from the label alone."""
    generator = torch.Generator().manual_seed(
        int.from_bytes(hashlib.sha256(label.encode()).digest()[:6], "little")
    )
    return (torch.randn(like.shape, generator=generator) * 100).to(like.dtype)


@torch.no_grad()
def fill(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, seed: int) -> None:
    """Sets every tensor, and the moments of every parameter, to what they are in state `seed`; `first`: this rank's
    first expert."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        _draw_into(tensor, name, first, f"{seed}")
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {"step": torch.tensor(seed + 0.5)}
        for kind in ("exp_avg", "exp_avg_sq"):
            moment = optimizer.state[parameter][kind] = torch.empty_like(parameter)
            _draw_into(moment, name, first, f"{seed}/{kind}")
    for group in optimizer.param_groups:
        group.update(lr=seed / 7, betas=(0.5, seed / 9))


def _draw_into(tensor: torch.Tensor, name: str, first: int, label: str) -> None:
    for part_name, expert, part in parts_of(tensor, name, first):
        part.copy_(draw(f"{label}/{part_name}/{expert}", part))


def parts_of(
    tensor: torch.Tensor, name: str, first: int
) -> Iterator[tuple[str, int | None, torch.Tensor]]:
    """(name that it has whatever the ranks, global expert or None, tensor of that expert)."""
    layer, _, leaf = name.rpartition(".")
    digits = leaf.removeprefix("weight")
    if ".experts." not in name:
        yield name, None, tensor
    elif digits.isdigit():
        yield f"{layer}.weight", first + int(digits), tensor
    else:
        yield from ((name, first + g, part) for g, part in enumerate(tensor))


def bits(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Bits:
    """The state of this rank, byte for byte."""
    values = {name: raw(tensor) for name, tensor in model.state_dict().items()}
    if optimizer is not None:
        for name, parameter in model.named_parameters():
            for kind, value in optimizer.state[parameter].items():
                values[f"{name}/{kind}"] = raw(value)
        values["groups"] = repr(
            [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        ).encode()
    return values


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def state(seed: int = 0, rank: int = 0, num_ranks: int = 1) -> dict:
    """Tensors without a model, and four experts of each rank."""
    experts = draw(f"{seed}/e/{rank}", torch.empty(4, 2))
    return {
        "a": {"weight": draw(f"{seed}/a", torch.empty(5, 3)), "none": torch.empty(0, 3)},
        "experts": ExpertShard(tensor=experts, start=4 * rank, num_experts=4 * num_ranks),
        "scalar": torch.tensor(seed, dtype=torch.int64),
    }


def flat(tensors: dict) -> list[bytes]:
    return [
        raw(tensor)
        for tensor in (tensors["a"]["weight"], tensors["experts"].tensor, tensors["scalar"])
    ]


def load_state(rank: int, num_ranks: int, directory: str | Path, step: int | None = None) -> int:
    """The step that is loaded, of which every bit is right."""
    tensors = state(99, rank, num_ranks)
    result = load_checkpoint(directory, model=tensors, step=step)
    assert flat(tensors) == flat(state(result.step, rank, num_ranks))
    return result.step


def newest(directory: Path, step: int | None = None) -> int:
    """The same in this process."""
    return load_state(0, 1, directory, step)


def outcome_of(call: Callable[..., object], *arguments, **options) -> str:
    """How a call ended: "saved", or its error."""
    try:
        call(*arguments, **options)
    except (SymmoeError, KeyboardInterrupt, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def names(directory: Path) -> list[str]:
    """Everything in a directory of checkpoints but its lock."""
    return sorted(path.name for path in directory.iterdir() if path.name != ".lock")
