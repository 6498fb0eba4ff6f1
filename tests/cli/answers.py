"""Answers of a daemon, filled in as far as a test says and with nothing else."""

from __future__ import annotations

import types
from typing import Any, TypeVar, Union, get_args, get_origin

import msgspec

S = TypeVar("S", bound=msgspec.Struct)
EMPTY: dict[Any, Any] = {str: "", int: 0, float: 0.0, bool: False, dict: {}, tuple: ()}


def filled(kind: type[S], **values: Any) -> S:
    """Make a struct with ``values``; what else it must have is None where it may be, else empty."""
    for spec in msgspec.structs.fields(kind):
        if spec.required and spec.name not in values:
            values[spec.name] = _empty_of(spec.type)
    return kind(**values)


def _empty_of(annotation: Any) -> Any:
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return None if type(None) in get_args(annotation) else _empty_of(get_args(annotation)[0])
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return filled(annotation)
    if origin is tuple and ... not in get_args(annotation):
        return tuple(_empty_of(part) for part in get_args(annotation))
    return EMPTY[origin or annotation]
