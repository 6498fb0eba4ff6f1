"""Answers of a daemon, filled in as far as a test says and with nothing else."""

from __future__ import annotations

import types
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

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


def filled_everywhere(kind: Any, text: str, truth: bool = True) -> Any:
    """Make a value of a type with ``text`` in every place that takes text, and one of whatever there may be several."""
    origin = get_origin(kind)
    arguments = get_args(kind)
    if origin is Annotated:
        return filled_everywhere(arguments[0], text, truth)
    if origin in (Union, types.UnionType):
        return filled_everywhere(next(part for part in arguments if part is not type(None)), text, truth)
    if origin is Literal:
        return arguments[0]
    if origin in (tuple, list):
        parts = [part for part in arguments if part is not ...]
        return tuple(filled_everywhere(part, text, truth) for part in parts)
    if origin is dict:
        key, value = arguments
        return {filled_everywhere(key, text, truth): filled_everywhere(value, text, truth)}
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _struct_everywhere(kind, text, truth)
    return {str: text, int: 1, float: 1.5, bool: truth, bytes: b"\x01"}[kind]


def _struct_everywhere(kind: type[msgspec.Struct], text: str, truth: bool) -> Any:
    values = {}
    for spec in msgspec.structs.fields(kind):
        refers_to_itself = kind in get_args(spec.type)
        values[spec.name] = filled(kind) if refers_to_itself else filled_everywhere(spec.type, text, truth)
    return kind(**values)
