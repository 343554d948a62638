"""Continues a prompt with a trained model, printing the text as it comes.

python -m moe_jax.language.decode --checkpoint=runs/stdlib_moe --prompt="def mean(values):"

The checkpoint is the workdir of a run of `moe_jax.language.main`, finished or not.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

import jax
from absl import app, flags

from moe_jax.language.generate import stream
from moe_jax.language.load import load_language_model
from moe_jax.language.tokenizer import Tokenizer
from moe_jax.training.compilation import keep_compiled_programs


def texts(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """What each token adds to the text; nothing while it ends inside a character."""
    ids: list[int] = []
    shown = text = ""
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):
            yield text[len(shown) :]
            shown = text
    yield text[len(shown) :]


def decode(
    checkpoint: str,
    prompt: str,
    max_new_tokens: int = 200,
    *,
    temperature: float = 0.7,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    step: int | None = None,
) -> Iterator[str]:
    """The prompt and its continuation, piece by piece, until the text ends.

    Args:
        checkpoint: workdir of a run.
        prompt: text to continue; may be empty.
        max_new_tokens, temperature, top_k, top_p: see `generate`.
        seed: of the random key.
        step: step of the checkpoint; None for the newest.

    Raises:
        ValueError: if there is no such model, or a number is out of range.
    """
    model, variables, tokenizer, _, _ = load_language_model(checkpoint, step)
    ids = [tokenizer.bos_id, *tokenizer.encode(prompt).tolist()]
    new = stream(
        jax.random.key(seed),
        model,
        variables,
        [ids],
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop=tokenizer.eos_id,
    )
    yield prompt
    yield from texts(tokenizer, (token for (row,) in new for token in row))


def run() -> NoReturn:
    """Entry point of the program; its flags are defined here, not on import."""
    checkpoint = flags.DEFINE_string("checkpoint", None, "Workdir of a run.", required=True)
    prompt = flags.DEFINE_string("prompt", "", "Text to continue.")
    max_new_tokens = flags.DEFINE_integer("max_new_tokens", 200, "Tokens drawn at most.")
    temperature = flags.DEFINE_float("temperature", 0.7, "0 takes the most likely token.")
    top_k = flags.DEFINE_integer("top_k", None, "Draw among the k most likely tokens.")
    top_p = flags.DEFINE_float("top_p", 1.0, "Draw among the most likely of this probability.")
    seed = flags.DEFINE_integer("seed", 0, "Of the random key.")
    step = flags.DEFINE_integer("step", None, "Step of the checkpoint; the newest if none.")

    def main(argv: Sequence[str]) -> int:
        if len(argv) > 1:
            return _fail(f"unexpected argument {argv[1]!r}")
        keep_compiled_programs()
        try:
            for piece in decode(
                checkpoint.value,
                prompt.value,
                max_new_tokens.value,
                temperature=temperature.value,
                top_k=top_k.value,
                top_p=top_p.value,
                seed=seed.value,
                step=step.value,
            ):
                print(piece, end="", flush=True)
            print(flush=True)
        except BrokenPipeError:
            # Whoever read has seen enough; Python would complain once more on closing the pipe.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except (ValueError, ImportError, OSError) as error:
            return _fail(str(error))
        return 0

    app.run(main)
    raise AssertionError("app.run exits")


def _fail(reason: str) -> int:
    print(f"error: {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    run()
