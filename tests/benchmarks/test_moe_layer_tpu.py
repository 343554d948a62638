import numpy as np
import pytest

from benchmarks.moe_layer_tpu import _bundles, heights
from moe_jax.core.pallas_tiles import Tiles, pallas_flops


def test_heights_by_hand():
    # Rows 0-4, 5-22 and 23-29 in tiles of 16: steps of 4 rounded out, cut where a tile ends.
    assert list(heights(np.array([5, 18, 0, 7]), Tiles(16, 4, 1, 1))) == [8, 12, 8, 12]


@pytest.mark.parametrize("tiles", [Tiles(16, 4, 1, 1), Tiles(8, 8, 1, 1)])
def test_heights_are_the_rows_of_the_work(tiles):
    rng = np.random.default_rng(0)
    for _ in range(20):
        sizes = rng.multinomial(100, np.full(6, 1 / 6))
        assert 2 * sum(heights(sizes, tiles)) == pallas_flops(100, 1, 1, sizes, tiles)


def test_bundles_of_each_stretch_that_multiplies():
    schedule = """
     0   :  { %1 = scalar }
   0x1   :  { sbr.rel @!p0 target }
   0x2 PB: > { %2 = vmatmul.mubr }
   0x3   : > { %3 = vmatmul.mubr ;; %4 = vmatmul.mubr }
 /* a comment */
   0x4 PF: > { %5 = vst }
   0x5 PB: > { %6 = vmatmul.mubr }
   0x6   : > { sbr.rel @p1 target }
"""
    assert list(_bundles(schedule, 32)) == [(32, 2), (64, 1)]
