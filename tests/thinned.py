"""Half of all combinations of parameters, for tests whose combinations take longer than they tell."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def thinned(**parameters: Iterable[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """Parametrises with every combination, of which every other one is slow: those whose places have an odd sum.

    No value is lost to the quick half, and of three parameters or more, no pair of values of two of them. The keys of
    a mapping are ids.
    """
    tables = [
        list(values.items()) if isinstance(values, Mapping) else [(str(value), value) for value in values]
        for values in parameters.values()
    ]
    cases = []
    for chosen in itertools.product(*map(enumerate, tables)):
        places, named = zip(*chosen, strict=True)
        names, values = zip(*named, strict=True)
        marks = [pytest.mark.slow] if sum(places) % 2 else []
        cases.append(pytest.param(*values, id="-".join(names), marks=marks))
    return pytest.mark.parametrize(tuple(parameters), cases)
