"""The arguments that take one of a few words: which words each takes, for a type checker and at run time."""

from __future__ import annotations

from typing import Literal, get_args

from symmoe.errors import ArgumentError

Overflow = Literal["raise", "drop"]
Order = Literal["rank", "slot", "node"]
Score = Literal["softmax", "sigmoid"]
Stash = Literal["all", "rows", "hidden", "none"]
Layout = Literal["auto", "packed", "expert-major"]
RouterKind = Literal["linear", "none"]
Schedule = Literal["serial", "overlapped", "always-overlapped"]
QuantizedWire = Literal["none", "forward", "backward", "both"]
AuxLoss = Literal["micro_batch", "sequence", "global"]
DropPolicy = Literal["probs", "position"]

# Words by the name of the argument that takes them. A name means the same everywhere.
CHOICES: dict[str, tuple[str, ...]] = {
    "overflow": get_args(Overflow),
    "order": get_args(Order),
    "score": get_args(Score),
    "stash": get_args(Stash),
    "layout": get_args(Layout),
    "router": get_args(RouterKind),
    "schedule": get_args(Schedule),
    "quantized_wire": get_args(QuantizedWire),
    "aux_loss": get_args(AuxLoss),
    "drop_policy": get_args(DropPolicy),
}


def is_choice(name: str, word: object) -> bool:
    """Whether `word` is one of the words that argument `name` takes."""
    # Only strings are compared: an array would compare with each element.
    return isinstance(word, str) and word in CHOICES[name]


def words_problem(**words: object) -> ArgumentError | None:
    """The error for the first argument whose word it does not take, or None."""
    for name, word in words.items():
        if not is_choice(name, word):
            return ArgumentError(f"{name} ({word!r}) must be one of {CHOICES[name]}")
    return None
