"""Decoder language models with dense and sparse layers: data, training, evaluation, sampling.

Everything here takes a model's `variables`, a dict of its parameters under "params" and of the
state of its routers, if they have any: `model.init` gives them, `load_language_model` reads them
back, and `moe_jax.training.variables_of` takes them from a training state.
"""

import os
import signal
import sys

if {"moe_jax.language.main", "moe_jax.language.decode"} & {*sys.orig_argv} and signal.getsignal(
    signal.SIGINT
) is signal.default_int_handler:
    # The programs' imports take seconds, in which Ctrl-C would print where it struck. A program
    # itself is imported last, so that it cannot see to this.
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))

from moe_jax.language.config import LanguageModelConfig
from moe_jax.language.generate import generate
from moe_jax.language.load import LoadedModel, load_language_model
from moe_jax.language.model import LanguageModel

__all__ = [
    "LanguageModel",
    "LanguageModelConfig",
    "LoadedModel",
    "generate",
    "load_language_model",
]
