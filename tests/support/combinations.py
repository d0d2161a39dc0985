"""Cases that have all combinations of so many features."""

import itertools
from collections.abc import Iterable, Mapping


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

    uncovered = dict.fromkeys(
        frozenset(zip(names, values, strict=True))
        for names in itertools.combinations(features, strength)
        for values in itertools.product(*(features[name] for name in names))
        if fits(dict(zip(names, values, strict=True)))
    )
    cases = []
    while uncovered:
        case = dict(next(iter(uncovered)))
        for name in features:
            if name not in case:
                fitting = [value for value in features[name] if fits({**case, name: value})]
                case[name] = max(fitting, key=lambda value: _num_new(case, name, value, uncovered))
        cases.append({name: case[name] for name in features})
        for group in itertools.combinations(case.items(), strength):
            uncovered.pop(frozenset(group), None)
    return cases


def _num_new(
    case: Mapping[str, str],
    name: str,
    value: str,
    uncovered: Mapping[frozenset[tuple[str, str]], None],
) -> int:
    """How many groups that are left a value of one more feature covers."""
    size = len(next(iter(uncovered))) - 1
    groups = itertools.combinations(case.items(), size)
    return sum(frozenset((*group, (name, value))) in uncovered for group in groups)
