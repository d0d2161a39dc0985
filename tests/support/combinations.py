"""All combinations of parameters, for tests whose cases conftest.py divides into quick and slow ones."""

import itertools
from collections.abc import Iterable, Mapping

import pytest


def every_combination(**parameters: Iterable | Mapping) -> pytest.MarkDecorator:
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


def covering(
    features: Mapping[str, Iterable[str]], strength: int, do_not_fit: Iterable[Mapping[str, str]]
) -> list[dict[str, str]]:
    """Cases, one value of each feature, so that every so many features are together with all their values in one case.
    The same ones every time; greedy, so nearly as few as possible.

    Args:
        do_not_fit: values of features that may not be in one case.
    """

    def fits(case: Mapping[str, str]) -> bool:
        return not any(wrong.items() <= case.items() for wrong in do_not_fit)

    left = dict.fromkeys(
        frozenset(zip(names, values, strict=True))
        for names in itertools.combinations(features, strength)
        for values in itertools.product(*(features[name] for name in names))
        if fits(dict(zip(names, values, strict=True)))
    )
    cases = []
    while left:
        case = dict(next(iter(left)))
        for name in features:
            if name not in case:
                fitting = [value for value in features[name] if fits({**case, name: value})]
                case[name] = max(fitting, key=lambda value: _num_new(case, name, value, left))
        cases.append({name: case[name] for name in features})
        for group in itertools.combinations(case.items(), strength):
            left.pop(frozenset(group), None)
    return cases


def _num_new(
    case: Mapping[str, str], name: str, value: str, left: Mapping[frozenset[tuple[str, str]], None]
) -> int:
    """How many groups that are left a value of one more feature covers."""
    size = len(next(iter(left))) - 1
    others = itertools.combinations(case.items(), size)
    return sum(frozenset((*group, (name, value))) in left for group in others)
