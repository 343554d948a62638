import bz2
import shutil
import subprocess

import numpy as np
import pytest

from benchmarks.language_quality import compressed_bits, interval, print_table

TEXTS = [b"def f(x):\n    return x\n" * 40, b"import os\n", b""]


@pytest.mark.parametrize("command", ["xz -9e", "bzip2 -9"])
def test_sizes_are_those_of_the_command_line_tools(command):
    tool, *options = command.split()
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    sizes = [
        len(subprocess.run([tool, *options], input=text, capture_output=True, check=True).stdout)
        for text in TEXTS
    ]
    np.testing.assert_array_equal(compressed_bits(TEXTS)[command], 8.0 * np.array(sizes))


def test_every_text_is_compressed_by_itself():
    bits = compressed_bits(TEXTS)["bzip2 -9"]
    assert bits.tolist() == [8.0 * len(bz2.compress(text, 9)) for text in TEXTS]


def test_interval_of_three_seeds():
    # Standard deviation 1, so half width 4.303 / sqrt(3); 4.303 is the t quantile, 2 degrees.
    mean, half = interval([1.0, 2.0, 3.0])
    assert (mean, half) == (2.0, pytest.approx(2.484, abs=1e-3))
    assert np.isnan(interval([1.0])[1])


def test_table_counts_files_won_by_their_bits(capsys):
    def run(bits, **rest):
        return {
            "bits_per_byte": sum(bits) / 30,
            "document_bits": bits,
            "steps": 7,
            "training_minutes": 6.0,
            "median_tokens_per_second": 1e4,
            **rest,
        }

    results = {
        "seeds": [0, 1],
        "document_bytes": [10, 20],
        "parameters": {"sparse": (4e6, 1e6), "dense": (1e6, 1e6)},
        "sparse": [
            run([10.0, 20.0], least_load_over_mean=[0.5, 0.4]),
            run([12.0, 22.0], least_load_over_mean=[0.6, 0.3]),
        ],
        "dense": [run([12.0, 20.0]), run([12.0, 20.0])],
        "compressors": {"xz -9e": [11.5, 30.0]},
    }
    print_table(results)
    table = capsys.readouterr().out
    # Means of the sparse runs: 11 and 21 bits.
    assert "| sparse, 7 steps | 4.00M (1.00M) | 1.067 ± 0.847 |  |" in table
    assert "| dense, 7 steps | 1.00M (1.00M) | 1.067 ± 0.000 | 1 of 2 |" in table
    assert "| xz -9e | | 1.383 | 2 of 2 |" in table
    assert "last ten records: 0.30" in table
