"""Reading frozen dataclasses out of nested configuration mappings."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, TypeVar, get_origin, get_type_hints

T = TypeVar("T")


def from_mapping(cls: type[T], fields: Mapping[str, Any], section: str) -> T:
    """Builds the dataclass `cls` from a mapping such as an ml_collections.ConfigDict.

    Args:
        cls: dataclass whose `__post_init__` checks the values.
        fields: values by field name.
        section: name of the mapping within the configuration, for messages.

    Raises:
        ValueError: if a field is unknown or missing, or its value is of another type than the
            field's (an int serves as a float, a list as a tuple) or not accepted.
    """
    known = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    check_known(fields, known, section)
    for name, field in known.items():
        optional = (field.default, field.default_factory) != (dataclasses.MISSING,) * 2
        if name not in fields and not optional:
            raise ValueError(f"config.{section}.{name} is missing")
    types = get_type_hints(cls)
    for name, value in fields.items():
        _check_type(f"config.{section}.{name}", value, types[name])
    values = {
        # JSON has no tuples.
        name: tuple(value)
        if isinstance(value, list) and get_origin(types[name]) is tuple
        else value
        for name, value in fields.items()
    }
    try:
        return cls(**values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"config.{section}: {error}") from error


def check_known(fields: Mapping[str, Any], known: Mapping[str, Any], section: str) -> None:
    """Raises ValueError for the first key of `fields` that is not in `known`."""
    prefix = f"config.{section}." if section else "config."
    for name in fields:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
            raise ValueError(f"{prefix}{name} is not a configuration key; {hint}")


def _check_type(name: str, value: Any, expected: Any) -> None:
    scalars: dict[Any, Any] = {bool: bool, int: int, float: (int, float), str: str}
    accepted = scalars.get(expected, object)
    # bool is a subclass of int.
    if not isinstance(value, accepted) or (isinstance(value, bool) and expected in (int, float)):
        raise ValueError(f"{name}={value!r} must be of type {expected.__name__}")
