"""Two processes take the steps of one, end together, and resume; over loopback."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from moe_jax.training.metrics import read_metrics
from moe_jax.training.processes import Address, given_address, jobset_address

ROOT = Path(__file__).parents[2]
STEPS = 6
NOTHING = (-1, 0, 0)
# Name, number of processes, workdir, and what a process does before a step: step, process, signal.
SCENARIOS = [
    ("one", 1, "one", NOTHING),
    ("two", 2, "two", NOTHING),
    ("killed", 2, "run", (5, 1, int(signal.SIGKILL))),
    ("resumed", 2, "run", NOTHING),
    ("first killed", 2, "other", (3, 0, int(signal.SIGKILL))),
    ("stopped", 2, "stopped", (3, 1, int(signal.SIGTERM))),
    ("failed", 2, "failed", (1, 1, "fault")),
]


def free_ports(number):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    (folder / "config.py").write_text(
        "import ml_collections\n\n"
        "def get_config():\n"
        "    return ml_collections.ConfigDict({'plan': ml_collections.config_dict.placeholder"
        "(object)})\n"
    )
    scenarios = [
        (name, number, port, workdir, plan)
        for (name, number, workdir, plan), port in zip(
            SCENARIOS, free_ports(len(SCENARIOS)), strict=True
        )
    ]
    (folder / "scenarios.json").write_text(json.dumps(scenarios))
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "PYTHONPATH": str(ROOT),
    }
    script = Path(__file__).with_name("two_processes.py")
    subprocess.run(
        [sys.executable, str(script)], cwd=folder, env=environment, check=True, timeout=1200
    )
    return folder


def statuses(folder, name):
    return [status for status, _ in json.loads((folder / "results.json").read_text())[name]]


def errors(folder, name, process):
    return (folder / f"{name}.{process}.err").read_text()


def losses(folder, workdir):
    records = read_metrics(folder / workdir / "metrics.jsonl")
    return [
        (record["step"], record["loss"], record["gradient_norm"])
        for record in records
        if record["kind"] == "train"
    ]


def arrays(folder, workdir, step):
    path = (folder / workdir / "checkpoints" / str(step)).absolute()
    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(
            path / "state",
            restore_args=dict.fromkeys(
                checkpointer.metadata(path / "state").item_metadata.tree,
                ocp.RestoreArgs(restore_type=np.ndarray),
            ),
        )


def test_two_processes_take_the_steps_of_one(folder):
    assert statuses(folder, "one") == [0], errors(folder, "one", 0)
    assert statuses(folder, "two") == [0, 0], errors(folder, "two", 0)
    one, two = losses(folder, "one"), losses(folder, "two")
    assert [step for step, *_ in two] == list(range(1, STEPS + 1))
    # The same sums in another order; float32.
    np.testing.assert_allclose(two, one, rtol=1e-5)


def test_each_process_makes_its_own_rows_and_together_all(folder):
    def rows(workdir, process):
        lines = (folder / workdir / f"rows.{process}").read_text().splitlines()
        return dict(json.loads(line) for line in lines)

    whole, *parts = rows("one", 0), rows("two", 0), rows("two", 1)
    assert whole.keys() == parts[0].keys() == parts[1].keys() == set(range(STEPS))
    for position, expected in whole.items():
        assert len(parts[0][position]) == len(parts[1][position]) == len(expected) // 2
        assert parts[0][position] + parts[1][position] == expected


def test_a_killed_process_ends_the_other_which_names_it(folder):
    for name, killed in (("killed", 1), ("first killed", 0)):
        other = 1 - killed
        assert statuses(folder, name)[killed] == -signal.SIGKILL
        assert statuses(folder, name)[other] == 1
        assert f"error: process {killed} on " in errors(folder, name, other)
        assert "is gone: its connection closed" in errors(folder, name, other)
        ended = json.loads((folder / "results.json").read_text())[name]
        assert max(seconds for _, seconds in ended) < 60


def test_the_restarted_pair_ends_bit_identical(folder):
    assert statuses(folder, "resumed") == [0, 0], errors(folder, "resumed", 0)
    assert losses(folder, "run") == losses(folder, "two")
    resumed, whole = arrays(folder, "run", STEPS), arrays(folder, "two", STEPS)
    assert "params/head" in whole and resumed.keys() == whole.keys()
    for name, value in whole.items():
        np.testing.assert_array_equal(resumed[name], value, err_msg=name)


def test_sigterm_of_one_process_saves_and_ends_both(folder):
    assert statuses(folder, "stopped") == [0, 0]
    assert (folder / "stopped" / "checkpoints" / "4").is_dir()
    assert [step for step, *_ in losses(folder, "stopped")] == [1, 2, 3, 4]


def test_a_fault_of_one_process_ends_both(folder):
    assert statuses(folder, "failed") == [1, 1]
    assert "error: head is missing" in errors(folder, "failed", 1)
    assert "error: process 1 on " in errors(folder, "failed", 0)
    assert "failed, see its log" in errors(folder, "failed", 0)


def test_only_the_first_process_shows_progress(folder):
    assert "step 6/6" in errors(folder, "two", 0)
    assert "step 6/6" not in errors(folder, "two", 1)


JOBSET = {
    "JOBSET_NAME": "moe",
    "REPLICATED_JOB_NAME": "workers",
    "NUM_PROCESSES": "4",
    "JOB_COMPLETION_INDEX": "2",
}


def test_address_of_a_jobset_is_its_first_pod():
    assert jobset_address(JOBSET) == Address("moe-workers-0-0.moe:8476", 4, 2)
    assert jobset_address({}) is None
    with pytest.raises(ValueError, match="NUM_PROCESSES missing"):
        jobset_address({key: JOBSET[key] for key in JOBSET if key != "NUM_PROCESSES"})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("host:1", 2, None), "--process_id missing"),
        ((None, 2, None), "--coordinator, --process_id missing"),
        (("host", 2, 0), "--coordinator=host is not host:port"),
        (("host:1", 2, 2), r"--process_id=2 is not in \[0, 2\)"),
    ],
)
def test_flags_that_give_no_address_are_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        given_address(*flags)


def test_flags_give_an_address():
    assert given_address("host:1", 2, 0) == Address("host:1", 2, 0)
    assert given_address(None, None, None) is None
