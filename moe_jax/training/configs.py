"""Reading frozen dataclasses out of nested configuration mappings."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def from_mapping(cls: type[T], fields: Mapping[str, Any], section: str) -> T:
    """Builds the dataclass `cls` from a mapping such as an ml_collections.ConfigDict.

    Args:
        cls: dataclass whose `__post_init__` checks the values.
        fields: values by field name.
        section: name of the mapping within the configuration, for messages.

    Raises:
        ValueError: if a field is unknown or missing, or its value is not accepted.
    """
    known = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    check_known(fields, known, section)
    for name, field in known.items():
        optional = (field.default, field.default_factory) != (dataclasses.MISSING,) * 2
        if name not in fields and not optional:
            raise ValueError(f"config.{section}.{name} is missing")
    try:
        return cls(**dict(fields.items()))
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
