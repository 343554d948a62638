import dataclasses
import re

import jaxtyping
import pytest
from ml_collections import ConfigDict

from moe_jax.training.configs import check_known, from_mapping


@dataclasses.dataclass(frozen=True)
class Example:
    width: int
    rate: float = 0.5
    name: str = "a"
    tied: bool = False
    pattern: tuple[str, ...] = ("x",)

    def __post_init__(self):
        if self.width < 1:
            raise ValueError(f"width={self.width} must be at least 1")
        tuple(self.pattern)


@pytest.fixture(autouse=True)
def without_runtime_checks():
    """Outside the tests nothing checks annotations; the library's own errors are what users see."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("kind", [dict, ConfigDict])
def test_fields_are_taken_and_the_rest_are_defaults(kind):
    fields = kind({"width": 3, "pattern": ("y", "z")})
    assert from_mapping(Example, fields, "model") == Example(width=3, pattern=("y", "z"))


def test_list_serves_as_a_tuple():
    assert from_mapping(Example, {"width": 1, "pattern": ["y"]}, "model").pattern == ("y",)


def test_int_serves_as_a_float():
    assert from_mapping(Example, {"width": 1, "rate": 2}, "model").rate == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"wdith": 3}, "config.model.wdith is not a configuration key; did you mean width?"),
        (
            {"width": 3, "zzz": 1},
            "config.model.zzz is not a configuration key; known: width, rate, name, tied, pattern",
        ),
        ({"rate": 0.1}, "config.model.width is missing"),
        ({"width": 0}, "config.model: width=0 must be at least 1"),
        ({"width": "3"}, "config.model.width='3' must be of type int"),
        ({"width": 3.0}, "config.model.width=3.0 must be of type int"),
        ({"width": True}, "config.model.width=True must be of type int"),
        ({"width": None}, "config.model.width=None must be of type int"),
        ({"width": 1, "rate": "0.1"}, "config.model.rate='0.1' must be of type float"),
        ({"width": 1, "rate": True}, "config.model.rate=True must be of type float"),
        ({"width": 1, "tied": 1}, "config.model.tied=1 must be of type bool"),
        ({"width": 1, "name": 1}, "config.model.name=1 must be of type str"),
        ({"width": 1, "pattern": 1}, "config.model: 'int' object is not iterable"),
    ],
)
def test_key_at_fault_is_named(fields, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        from_mapping(Example, fields, "model")


def test_unknown_key_of_the_configuration_itself_has_no_section():
    with pytest.raises(ValueError, match="^config.modle is not .*; did you mean model?"):
        check_known({"modle": 1}, {"model": 0, "data": 0}, "")
    check_known({"model": 1}, {"model": 0, "data": 0}, "")
