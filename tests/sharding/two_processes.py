"""Run by test_processes.py: forks the processes of every scenario, of a regression on a mesh.

One process imports the library, and forks the others: importing takes seconds.
"""

import json
import os
import sys
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from moe_jax.sharding import (
    GlobalBatches,
    MeshConfig,
    make_mesh,
    process_rows,
    replicated,
    state_shardings,
)
from moe_jax.training import (
    Checkpoints,
    Interrupts,
    LoopConfig,
    MetricWriter,
    Progress,
    exit_code,
    init_state,
    lock_workdir,
    make_train_step,
    prepare_workdir,
    restore_or_init,
    run_program,
    train,
)

ROWS, WIDTH, STEPS = 16, 8, 6


class Rows:
    """Random rows of a regression; those of this process alone, each kept in a file."""

    def __init__(self, rows, file):
        self.position, self.rows, self.file = 0, rows, file

    def __next__(self):
        x = np.random.default_rng(self.position).normal(size=(ROWS, WIDTH)).astype(np.float32)
        mine = x[self.rows]
        with self.file.open("a") as file:
            file.write(json.dumps([self.position, mine.tolist()]) + "\n")
        self.position += 1
        return {"x": mine, "y": np.sin(mine)}

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]


def loss_function(params, model_state, batch, share, key):
    loss = jnp.mean(jnp.square(batch["x"] @ params["head"] - batch["y"]))
    return loss * share, ({}, {})


def run(config, workdir):
    """Trains; `plan` names the step before which a process sends itself a signal."""
    folder = prepare_workdir(workdir)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, expert=2))
    optimizer = optax.adam(0.1)

    def init():
        params = {"head": jax.random.normal(jax.random.key(0), (WIDTH, WIDTH))}
        return init_state(jax.random.key(1), params, optimizer)

    shardings = state_shardings(jax.eval_shape(init), mesh)
    step = make_train_step(
        loss_function,
        optimizer,
        batch_weight=lambda batch: jnp.float32(ROWS),
        shardings=(shardings, replicated(mesh)),
    )

    def planned_step(state, batch):
        number, process, sent = config["plan"]
        if int(state.step) == number and jax.process_index() == process:
            if sent == "fault":
                raise ValueError("head is missing")
            os.kill(os.getpid(), sent)
        return step(state, batch)

    rows = Rows(process_rows(ROWS, mesh), folder / f"rows.{jax.process_index()}")
    batches = GlobalBatches(rows, ROWS, mesh)
    with (
        Interrupts() as interrupts,
        lock_workdir(folder),
        Checkpoints(folder / "checkpoints") as checkpoints,
    ):
        state = restore_or_init(checkpoints, init, batches, shardings)
        first = int(state.step)
        with MetricWriter(folder, resume_step=first or None) as writer:
            _, requested = train(
                state,
                batches,
                planned_step,
                lambda state: {"error": 0.0},
                LoopConfig(STEPS, log_every=1, checkpoint_every=2),
                checkpoints=checkpoints,
                writer=writer,
                progress=Progress(STEPS, first),
                interrupts=interrupts,
                per_step={},
            )
    return exit_code(requested)


def start(name, process, num_processes, port, workdir, plan):
    """Forks one process; its output goes to files by its name."""
    child = os.fork()
    if child:
        return child
    for stream, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(f"{name}.{process}.{stream}", os.O_CREAT | os.O_WRONLY), number)
    # Read when the first device is asked for.
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={8 // num_processes}"
    sys.argv[1:] = ["--config=config.py", f"--workdir={workdir}", f"--config.plan={plan}"]
    if num_processes > 1:
        sys.argv += ["--multihost", f"--coordinator=127.0.0.1:{port}"]
        sys.argv += [f"--num_processes={num_processes}", f"--process_id={process}"]
    run_program(run, "", multihost=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    results = {}
    for name, num_processes, port, workdir, plan in json.loads(Path("scenarios.json").read_text()):
        children = [
            start(name, process, num_processes, port, workdir, tuple(plan))
            for process in range(num_processes)
        ]
        ended = {}
        while len(ended) < num_processes:
            child, status = os.wait()
            ended[child] = (os.waitstatus_to_exitcode(status), time.monotonic())
        first = min(at for _, at in ended.values())
        results[name] = [(ended[child][0], ended[child][1] - first) for child in children]
    Path("results.json").write_text(json.dumps(results))
