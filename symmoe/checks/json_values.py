"""JSON as dataclasses. Every field is checked: files may come from any source."""

from __future__ import annotations

import dataclasses
import math
import types
from typing import Any, get_args, get_origin, get_type_hints


def typed(kind: Any, value: Any, name: str, *, exactly: bool = True) -> Any:
    """A value of JSON as a dataclass, a list, a dict or a plain value, with the types of the annotations at every
    depth: texts are Unicode, floats finite. name: the value's name in errors. exactly: objects have exactly the fields
    of their dataclass; otherwise fields with defaults may be missing. ValueError: the value has another form; the text
    names the field."""
    arguments = get_args(kind)
    if kind is Any:
        return value
    if isinstance(kind, types.UnionType):  # with None
        return None if value is None else typed(arguments[0], value, name, exactly=exactly)
    if hasattr(kind, "__dataclass_fields__") and isinstance(value, dict):
        hints, fields = get_type_hints(kind), dataclasses.fields(kind)
        wrong = {
            field.name for field in fields if exactly or field.default is dataclasses.MISSING
        } - value.keys()
        if wrong := wrong | (value.keys() - hints.keys() if exactly else set()):
            raise ValueError(f"fields {sorted(wrong)} of {name} are missing or not known")
        return kind(
            **{
                field: typed(hint, value[field], f"{name}.{field}", exactly=exactly)
                for field, hint in hints.items()
                if field in value
            }
        )
    if get_origin(kind) is dict and isinstance(value, dict):
        return {
            key: typed(arguments[1], item, f"{name}[{key!r}]", exactly=exactly)
            for key, item in value.items()
        }
    if get_origin(kind) is list and isinstance(value, list):
        return [typed(arguments[0], item, name, exactly=exactly) for item in value]
    is_text = not isinstance(value, str) or not any("\ud800" <= char < "\ue000" for char in value)
    if (
        type(value) is not kind
        or not is_text
        or (isinstance(value, float) and not math.isfinite(value))
    ):
        raise ValueError(f"{name} is {str(value)[:80]!r}; it must be {kind}")
    return value
