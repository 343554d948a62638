"""The reader on small modules written by hand, and on programs compiled for a TPU topology."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from moe_jax.sharding.hlo_schedule import bytes_by_kind, covered_share, read_schedule

ROOT = Path(__file__).parents[2]


def hlo(name):
    return (Path(__file__).parent / "data" / f"{name}.hlo").read_text()


def test_hand_written_module():
    report = read_schedule(hlo("overlap"))
    exchange, permute, reduction = report.collectives
    assert exchange == ("all-to-all-start", "all-to-all", 256, "{{0,1},{2,3}}", 1, True, 8192.0)
    # Nothing stands between the start and the done of the second, nor can beside the third.
    assert permute[1:] == ("collective-permute", 256, "{{0,1},{1,0}}", 1, True, 0.0)
    assert reduction[1:] == ("all-reduce", 512, "[2,2]<=[4]", 1, False, 0.0)
    assert report.flops == 2 * 2 * 8 * 16 * 32
    assert covered_share(report.collectives) == 256 / 1024
    # 8192 FLOPs beside 256 bytes cover half of them at 64 FLOPs a byte.
    assert covered_share(report.collectives, 64.0) == 128 / 1024
    assert covered_share([]) == 0.0
    assert bytes_by_kind(report.collectives) == {
        "all-to-all": 256,
        "collective-permute": 256,
        "all-reduce": 512,
    }


def test_loops_count_as_often_as_they_run_and_wrapped_collectives_by_what_they_wrap():
    report = read_schedule(hlo("loop"))
    assert report.collectives == (("start", "reduce-scatter", 64, "", 5, True, 128.0),)
    assert report.flops == 5 * 128 + 77
    assert bytes_by_kind(report.collectives) == {"reduce-scatter": 320}


def test_a_batched_product_written_as_a_dilated_convolution_counts_once():
    assert read_schedule(hlo("batched")).flops == 2 * 3 * 8 * 16 * 32


def test_flops_of_a_program_compiled_here_equal_the_compilers_count():
    def f(x, w):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x @ w, None, length=3)[0]

    x, w = jnp.ones((8, 16)), jnp.ones((16, 16))
    compiled = jax.jit(f).lower(x, w).compile()
    report = read_schedule(compiled.as_text())
    assert report.collectives == ()
    assert report.flops == 4 * 2 * 8 * 16 * 16


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("HloModule jit_f, entry_computation_layout={}", "is_scheduled=true"),
        ("HloModule jit_f, is_scheduled=true", "no ENTRY"),
        (hlo("overlap").replace("all-to-all-done(", "negate("), "never done"),
    ],
)
def test_what_cannot_be_read_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        read_schedule(text)


def test_a_negative_rate_is_refused():
    with pytest.raises(ValueError, match="flops_per_byte=-1.0"):
        covered_share([], -1.0)


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed: pip install 'moe_jax[tpu]'",
)
def test_parts_of_the_batch_give_a_tpu_schedule_something_to_run_beside_all_to_all(tmp_path):
    # In a process of its own: the TPU library takes over signals and prints as it loads.
    output = tmp_path / "compiled.json"
    command = [sys.executable, "-m", "benchmarks.compiled_overlap", f"--output={output}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = {(row["parts"], row["asynchronous"]): row for row in json.loads(output.read_text())}
    whole, parts, synchronous = rows[1, True], rows[2, True], rows[2, False]
    # Eight devices, 512 rows each: four products, and four exchanges of 512 x 1024 bfloat16.
    for report in (whole, parts, synchronous):
        assert report["flops"] == 4 * 2 * 512 * 1024 * 1024
        assert report["bytes"] == 4 * 512 * 1024 * 2
        assert report["argument_bytes"] == (512 + 1024) * 1024 * 2
        assert report["kinds"] == ["all-to-all along expert"]
    assert (whole["exchanges"], parts["exchanges"]) == (4, 8)
    assert parts["predicted_microseconds"] < whole["predicted_microseconds"]
    assert whole["covered"] == 0.0 and parts["covered"] >= 0.25
    assert synchronous["async"] == 0 and synchronous["covered"] == 0.0
