"""What the layers of a group are, by number: a plan's barrier compares numbers, and texts are only looked up for an
error. They lie in the store of the process group, so that no rank waits for another to name what differs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta

from symmoe.errors import ConfigMismatch
from symmoe.kernels import control
from symmoe.symm_mem.bootstrap import Bootstrap

_LOOK_UP = timedelta(seconds=2)  # who has the number has stored its text before


class Configurations:
    """Of one group. Local."""

    def __init__(self, bootstrap: Bootstrap) -> None:
        self._bootstrap = bootstrap
        self._texts: dict[int, str] = {}

    def number(self, fields: Mapping[str, object]) -> int:
        """The number of a configuration, the same for equal ones on all ranks; not 0. Numbers that are equal, as 1 and
        1.0, are written in the same way."""
        text = json.dumps({name: _shown(value) for name, value in fields.items()})
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[: control.CONFIG_BITS // 8], "little") or 1
        if number not in self._texts:
            self._texts[number] = text
            with suppress(RuntimeError, ValueError):  # no store any more
                if self._bootstrap.num_ranks > 1:
                    self._bootstrap.store.set(_key(number), text)
        return number

    def mismatch(self, first: int, number: int, peer: int, other: int) -> ConfigMismatch:
        """The error of two ranks, `first` and `peer`, whose layers have these numbers; 0: of make_plan."""
        if not (number and other):
            one, two = ("that of a layer" if each else "make_plan" for each in (number, other))
            return ConfigMismatch(f"ranks are in different calls: rank {first} in {one}, rank {peer} in {two}")
        here, there = self._fields(number), self._fields(other)
        name = next((name for name in here if name in there and here[name] != there[name]), None)
        if name is None:
            return ConfigMismatch(f"the configurations of a layer differ on rank {first} and rank {peer}")
        return ConfigMismatch(f"{name} differs: rank {first} has {here[name]}, rank {peer} has {there[name]}")

    def _fields(self, number: int) -> dict[str, str]:
        """The fields of a configuration that some rank has; none if they cannot be found."""
        text = self._texts.get(number)
        with suppress(RuntimeError, ValueError):
            if text is None:
                self._bootstrap.store.wait([_key(number)], _LOOK_UP)
                text = self._bootstrap.store.get(_key(number)).decode()
        return {} if text is None else dict(json.loads(text))


def _key(number: int) -> str:
    return f"symmoe/configuration/{number:x}"


def _shown(value: object) -> str:
    if isinstance(value, float):  # or a kind of it, e.g. numpy's
        value = int(value) if value.is_integer() else float(value)
    return "none" if value is None else repr(value)
