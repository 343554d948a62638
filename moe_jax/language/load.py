"""A trained model, read back from the workdir of its run."""

import os
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from moe_jax.language.model import LanguageModel
from moe_jax.language.settings import (
    find_tokenizer,
    model_config,
    read_configuration,
    read_settings,
)
from moe_jax.language.tokenizer import Tokenizer
from moe_jax.training.checkpoints import Checkpoints
from moe_jax.training.state import split_variables


class LoadedModel(NamedTuple):
    """What `load_language_model` found.

    Attributes:
        model: the Flax module.
        variables: its parameters and state, for `model.apply` and `generate`.
        tokenizer: the one it was trained with.
        sequence_length: tokens of context it was trained with.
        step: step of the checkpoint.
    """

    model: LanguageModel
    variables: dict[str, PyTree]
    tokenizer: Tokenizer
    sequence_length: int
    step: int


def load_language_model(
    workdir: str | os.PathLike[str], step: int | Literal["best"] | None = None
) -> LoadedModel:
    """Loads the model of a run of `moe_jax.language.main`, finished or not.

    Reads the configuration, the tokenizer and the model's own part of a checkpoint, not the
    optimiser's state. Changes nothing, so that the run may go on meanwhile.

    Args:
        workdir: folder of the run.
        step: step of the checkpoint; "best" for the lowest bits per byte on held-out data; None for
            the newest that can be read.

    Raises:
        ValueError: if the folder holds no such run, no such checkpoint, or none that can be read.
    """
    folder = Path(workdir).expanduser()
    if not (folder / "config.json").exists():
        raise ValueError(f"workdir={str(workdir)!r} holds no run: no config.json is there")
    config = read_configuration(folder)
    try:
        settings = read_settings(config)
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'} is not of this version: {error}") from error
    tokenizer = find_tokenizer(folder, settings.data.tokenizer)
    model = LanguageModel(model_config(settings.model, tokenizer))
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)
    params, model_state = split_variables(shapes)
    checkpoints = Checkpoints(folder / "checkpoints")
    if checkpoints.latest_step() is None:
        raise ValueError(f"workdir={str(workdir)!r} holds no checkpoint yet")
    if step == "best":
        step = checkpoints.best_step()
        if step is None:
            raise ValueError(
                f"step='best': no checkpoint of workdir={str(workdir)!r} was evaluated"
            )
    part = {"params": params, "model_state": model_state}
    restored = checkpoints.restore(part, step=step, partial=True)
    if restored is None:
        raise ValueError(f"workdir={str(workdir)!r} lost its checkpoints while they were read")
    variables = {"params": restored.state["params"], **restored.state["model_state"]}
    return LoadedModel(model, variables, tokenizer, settings.data.sequence_length, restored.step)
