"""All combinations of parameters, for tests whose cases conftest.py divides into quick and slow ones."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def every_combination(**parameters: Iterable[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """Parametrises with every combination; the last parameter changes first. The keys of a mapping are ids."""
    tables = [
        list(values.items())
        if isinstance(values, Mapping)
        else [(str(value), value) for value in values]
        for values in parameters.values()
    ]
    cases = []
    for chosen in itertools.product(*tables):
        names, values = zip(*chosen, strict=True)
        cases.append(pytest.param(*values, id="-".join(names)))
    return pytest.mark.parametrize(tuple(parameters), cases)
