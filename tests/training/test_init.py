"""The example in the package's docstring runs, and every public name is there."""

import inspect
import re
import textwrap

import numpy as np

from moe_jax import training


def test_example_in_the_docstring_runs_as_printed(capsys):
    blocks = re.findall(r"(?:^    .*\n|^\n)+", inspect.getdoc(training), re.M)
    (code,) = [block for block in blocks if "import" in block]
    names = {"__name__": "example"}
    exec(compile(textwrap.dedent(code), "moe_jax.training", "exec"), names)
    # Adam at 0.1 comes within 0.05 of the weights that made the data in 100 steps.
    np.testing.assert_allclose(names["state"].params["w"], [1.0, -2.0, 0.5], atol=0.05)
    assert int(names["state"].step) == 100 and capsys.readouterr().out


def test_every_module_is_represented_and_every_name_exists():
    assert all(hasattr(training, name) for name in training.__all__)
    modules = {getattr(training, name).__module__ for name in training.__all__ if name[0].islower()}
    assert {f"moe_jax.training.{name}" for name in ("step", "state", "loop", "metrics")} <= modules
