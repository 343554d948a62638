"""Trains a language model on text.

python -m moe_jax.language.main --config=configs/language/stdlib_moe.py --workdir=runs/stdlib_moe

Started again with the same command, it goes on from the newest checkpoint in the workdir. Any entry
of the configuration can be set on the command line: --config.model.num_experts=16.

With --multihost it is one process of several, which share the workdir; see docs/pods.md.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging

from moe_jax.language.batches import make_batches
from moe_jax.language.corpus import Corpus, load_corpus
from moe_jax.language.counts import count_parameters, training_flops_per_token
from moe_jax.language.evaluate import Evaluation, make_evaluation, sample_documents
from moe_jax.language.fit import batch_weight, make_loss_function, make_model_state_update
from moe_jax.language.generate import generate
from moe_jax.language.model import LanguageModel
from moe_jax.language.plots import plot_expert_load, plot_loss
from moe_jax.language.settings import (
    Settings,
    check_configuration,
    model_config,
    read_settings,
    write_configuration,
)
from moe_jax.language.tokenizer import Tokenizer, load_tokenizer
from moe_jax.sharding import (
    AXES,
    ExpertParallel,
    GlobalBatches,
    make_mesh,
    process_rows,
    replicated,
    state_shardings,
)
from moe_jax.training.checkpoints import Checkpoints
from moe_jax.training.interrupts import Interrupts, exit_code
from moe_jax.training.loop import Batches, restore_or_init, train
from moe_jax.training.metrics import MetricWriter, read_metrics
from moe_jax.training.optimizer import make_optimizer
from moe_jax.training.program import run_program
from moe_jax.training.progress import Progress
from moe_jax.training.state import TrainState, init_state, split_variables, variables_of
from moe_jax.training.step import make_train_step
from moe_jax.training.workdir import lock_workdir, prepare_workdir

FIGURES = ("figures/loss.png", "figures/expert_load.png")


def train_language_model(config: Mapping[str, Any], workdir: str | Path) -> int:
    """Trains, evaluates, draws and samples; resumes if the workdir holds a checkpoint.

    Writes to the workdir: `config.json`, `checkpoints/`, `metrics.jsonl`, TensorBoard events,
    `evaluation.json` with the bits of every held-out document at its `step`, and `figures/`.
    `moe_jax.language.load_language_model` reads the model back. A run that takes further steps
    removes evaluation and figures first; the figures come back when it stops, the evaluation when
    it is complete.

    Returns:
        The exit status: 0 when the run is complete, and also after SIGTERM, which leaves it
        unfinished and to be resumed; 130 after Ctrl-C. Only a complete run has `evaluation.json`.

    Raises:
        ValueError: for a configuration, corpus, workdir or checkpoint that cannot be used.
        TrainingDivergedError: see `moe_jax.training.loop.train`.
    """
    settings = read_settings(config)
    folder = prepare_workdir(workdir)
    with Interrupts() as interrupts, lock_workdir(folder):
        changes = check_configuration(folder, config)
        tokenizer = load_tokenizer(settings.data.tokenizer)
        corpus = load_corpus(
            settings.data.source,
            tokenizer,
            held_out_fraction=settings.data.held_out_fraction,
            cache_dir=settings.data.cache_dir or folder / "cache",
            text_key=settings.data.text_key,
        )
        model = LanguageModel(model_config(settings.model, tokenizer), _parallel(settings))
        _describe(model, corpus)
        evaluate = make_evaluation(
            model,
            sequence_length=settings.data.sequence_length,
            batch_size=settings.data.batch_size // settings.data.accumulate,
            pad_id=tokenizer.pad_id,
        )

        def begin(first_step: int) -> None:
            if jax.process_index() != 0:
                return
            is_over = first_step >= settings.train.num_steps
            if changes:
                print(f"resuming at step {first_step} with another configuration than before:")
                print("".join(f"  {change}\n" for change in changes), end="")
            if is_over and changes:
                print("no steps are left to take with it: config.json stays as it is")
            if not (is_over and (folder / "config.json").exists()):
                write_configuration(folder, config)
            if not is_over:
                # They describe a state that the run now leaves behind.
                for stale in ("evaluation.json", *FIGURES):
                    (folder / stale).unlink(missing_ok=True)

        state = _train(settings, folder, tokenizer, corpus, model, evaluate, interrupts, begin)
        stopped = interrupts.agreed()
        if stopped is None:
            logging.info("scoring all %d held-out documents", len(corpus.held_out))
            evaluation = evaluate(variables_of(state), corpus.held_out)
            stopped = interrupts.agreed()
        is_first = jax.process_index() == 0
        if stopped is not None:
            if is_first:
                print(f"saved step {int(state.step)} of {settings.train.num_steps} in {folder}")
                print("to resume, run the same command again")
                _draw_figures(folder)
            return exit_code(stopped)
        if is_first:
            _write_evaluation(folder, int(state.step), corpus, evaluation)
            _draw_figures(folder)
            num_documents = len(corpus.held_out)
            print(
                f"step {int(state.step)}, held out: {evaluation.bits_per_byte:.4f} bits per byte, "
                f"{num_documents} documents"
            )
        _print_sample(settings, tokenizer, model, state)
    return 0


def _parallel(settings: Settings) -> ExpertParallel | None:
    """Where and how the model is split; None for one device."""
    if settings.mesh.sizes == (1,) * len(AXES) and jax.process_count() == 1:
        return None
    return ExpertParallel(make_mesh(settings.mesh), settings.mesh.exchange)


def _describe(model: LanguageModel, corpus: Corpus) -> None:
    devices = jax.devices()
    counts = count_parameters(model.config)
    sizes = {"data": 1} if model.mesh is None else model.mesh.shape
    logging.info(
        "devices %d x %s, mesh %s | parameters %s, active %s | corpus %s",
        len(devices),
        devices[0].device_kind,
        ", ".join(f"{axis}={size}" for axis, size in sizes.items()),
        f"{counts.total:,}",
        f"{counts.active:,}",
        corpus.report,
    )


def _train(
    settings: Settings,
    folder: Path,
    tokenizer: Tokenizer,
    corpus: Corpus,
    model: LanguageModel,
    evaluate: Callable[..., Evaluation],
    interrupts: Interrupts,
    begin: Callable[[int], None],
) -> TrainState:
    data = settings.data
    optimizer = make_optimizer(settings.optimizer, settings.train.num_steps)
    tokens_per_byte = corpus.report.train_tokens / corpus.report.train_bytes
    mesh = model.mesh

    def init() -> TrainState:
        init_key, run_key = jax.random.split(jax.random.key(settings.seed))
        # The values do not depend on the tokens; the mesh has no part in them either.
        variables = LanguageModel(model.config).init(init_key, jnp.zeros((1, 8), dtype=jnp.int32))
        params, model_state = split_variables(variables)
        return init_state(run_key, params, optimizer, model_state)

    shardings = None if mesh is None else state_shardings(jax.eval_shape(init), mesh)
    train_step = make_train_step(
        make_loss_function(model, settings.loss, tokens_per_byte=tokens_per_byte),
        optimizer,
        batch_weight=batch_weight,
        accumulate=data.accumulate,
        update_model_state=make_model_state_update(model.config, settings.loss),
        shardings=None if mesh is None else (shardings, replicated(mesh)),
    )
    batches: Batches = make_batches(
        corpus.train,
        batch_size=data.batch_size,
        sequence_length=data.sequence_length,
        seed=settings.seed,
        pad_id=tokenizer.pad_id,
        rows=None if mesh is None else process_rows(data.batch_size, mesh),
    )
    if mesh is not None:
        batches = GlobalBatches(batches, data.batch_size, mesh)
    sample = sample_documents(corpus.held_out, data.eval_tokens, seed=0)

    def score(state: TrainState) -> dict[str, float]:
        return {"bits_per_byte": evaluate(variables_of(state), sample).bits_per_byte}

    num_tokens = data.batch_size * data.sequence_length
    flops = num_tokens * training_flops_per_token(model.config, data.sequence_length)
    with Checkpoints(folder / "checkpoints", keep=settings.train.keep) as checkpoints:
        state = restore_or_init(checkpoints, init, batches, shardings)
        first_step = int(state.step)
        begin(first_step)
        with (
            MetricWriter(folder, resume_step=first_step or None) as writer,
            Progress(settings.train.num_steps, first_step) as progress,
        ):
            state, _ = train(
                state,
                batches,
                train_step,
                score,
                settings.train,
                checkpoints=checkpoints,
                writer=writer,
                progress=progress,
                interrupts=interrupts,
                per_step={"tokens": num_tokens, "model_flops": flops},
            )
    return state


def _write_evaluation(folder: Path, step: int, corpus: Corpus, evaluation: Evaluation) -> None:
    documents = [
        {"name": name, "bytes": int(num_bytes), "bits": float(bits)}
        for name, num_bytes, bits in zip(
            corpus.held_out.names, corpus.held_out.num_bytes, evaluation.bits, strict=True
        )
    ]
    record = {
        "step": step,
        "bits_per_byte": evaluation.bits_per_byte,
        "documents": documents,
    }
    # Its presence says that the run is complete, so it must not be seen half written.
    partial = folder / "evaluation.json.partial"
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(folder / "evaluation.json")


def _draw_figures(folder: Path) -> None:
    records = read_metrics(folder / "metrics.jsonl")
    figures = [folder / name for name in FIGURES]
    figures[0].parent.mkdir(exist_ok=True)
    plot_loss(records, figures[0])
    plot_expert_load(records, figures[1])
    print(f"figures in {figures[0].parent}")


def _print_sample(
    settings: Settings, tokenizer: Tokenizer, model: LanguageModel, state: TrainState
) -> None:
    prompt = settings.sample.prompt
    ids = [tokenizer.bos_id, *tokenizer.encode(prompt).tolist()]
    (new,) = generate(
        jax.random.key(settings.seed),
        model,
        variables_of(state),
        [ids],
        settings.sample.num_tokens,
        temperature=settings.sample.temperature,
        stop=tokenizer.eos_id,
    )
    if jax.process_index() == 0:
        print(f"sample at step {int(state.step)}, temperature {settings.sample.temperature}:\n")
        print(prompt + tokenizer.decode(new))


def run() -> None:
    """Entry point of the program."""
    run_program(train_language_model, "runs/language", multihost=True)


if __name__ == "__main__":
    run()
