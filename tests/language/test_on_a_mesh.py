"""The program on meshes of simulated devices takes the steps of the program on one."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from moe_jax.training.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
OVERRIDES = {
    "data.batch_size": 8,
    "data.sequence_length": 16,
    "data.eval_tokens": 100,
    "data.held_out_fraction": 0.3,
    "model.model_dim": 16,
    "model.num_layers": 1,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "model.num_experts": 4,
    "model.expert_hidden_dim": 8,
    "model.router": "sigmoid",
    "model.dtype": "float32",
    "optimizer.warmup_steps": 1,
    "train.log_every": 1,
    "sample.num_tokens": 1,
}
# Runs in turn in one process: workdir, number of steps, sizes of the mesh.
RUNS = """
import sys
from absl import logging
from moe_jax.language.main import train_language_model
sys.path.insert(0, "configs/language")
import stdlib_moe

logging.use_absl_handler()
logging.set_verbosity(logging.INFO)
corpus, one, other, overrides = sys.argv[1], sys.argv[2], sys.argv[3], eval(sys.argv[4])
for workdir, num_steps, sizes in (
    (one, 4, (1, 1, 1, 1)),
    (other, 2, (2, 2, 2, 1)),
    (other, 4, (1, 1, 4, -1)),
):
    config = stdlib_moe.get_config()
    config.update_from_flattened_dict(overrides | {"data.source": corpus})
    config.train.num_steps = num_steps
    config.mesh.update(dict(zip(("data", "fsdp", "expert", "tensor"), sizes)))
    # The schedule must not depend on where the first run stops.
    config.optimizer.update({"schedule": "stable", "decay_fraction": 0.0, "final_fraction": 1.0})
    print(train_language_model(config.to_dict(), workdir))
"""


def test_steps_on_meshes_are_those_of_one_device_and_one_mesh_resumes_another(tmp_path):
    rng = np.random.default_rng(0)
    for index in range(6):
        text = " ".join(rng.choice(["def", "x", "=", "(", ")", "\n"], 60))
        (tmp_path / f"{index}.py").write_text(text)
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": str(ROOT),
    }
    one, other = tmp_path / "one", tmp_path / "other"
    process = subprocess.run(
        [sys.executable, "-c", RUNS, f"{tmp_path}/*.py", one, other, repr(OVERRIDES)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    assert "mesh data=2, fsdp=2, expert=2, tensor=1" in process.stderr
    assert "mesh data=1, fsdp=1, expert=4, tensor=2" in process.stderr
    assert "resuming at step 2" in process.stdout
    steps = [
        [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "train"]
        for folder in (one, other)
    ]
    assert [record["step"] for record in steps[0]] == [1, 2, 3, 4]
    for name in ("loss", "load_balance_loss", "gradient_norm", "load", "entropy", "dropped"):
        # Adam divides by the root of a moment, which raises the rounding of the first steps.
        found, expected = ([record[name] for record in records] for records in steps[::-1])
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5, err_msg=name)
