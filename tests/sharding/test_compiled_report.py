"""Groups of devices as axes of a mesh, and what a chip needs, by hand."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from moe_jax.sharding.compiled_report import CHIPS, Chip, group_axes, report_compiled

MESH = {"data": 2, "fsdp": 1, "expert": 2, "tensor": 2}


@pytest.mark.parametrize(
    ("group", "axes"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ("tensor",)),
        ("{{0,2},{1,3},{4,6},{5,7}}", ("expert",)),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("data",)),
        ("{{0,2,4,6},{1,3,5,7}}", ("data", "expert")),
        # A ring along one axis, as pairs of a collective-permute.
        ("{{0,2},{2,0},{4,6},{6,4}}", ("expert",)),
        ("[4,2]<=[8]", ("tensor",)),
        ("[4,2]<=[4,2]T(0,1)", ("tensor",)),
        ("[4,2]<=[2,4]T(1,0)", ("data",)),
        ("[1,8]<=[8]", ("data", "expert", "tensor")),
        ("{}", ("data", "expert", "tensor")),
        ("", ("data", "expert", "tensor")),
        ("{{0},{1}}", ()),
    ],
)
def test_axes_of_groups(group, axes):
    assert group_axes(group, MESH) == axes


@pytest.mark.parametrize(
    ("group", "message"),
    [("{{0,8}}", "names device 8 of a mesh of 8"), ("whatever", "names no groups")],
)
def test_groups_that_do_not_fit_are_refused(group, message):
    with pytest.raises(ValueError, match=message):
        group_axes(group, MESH)


class Compiled:
    """The hand-written module with memory as a compiler states it."""

    def as_text(self):
        return (Path(__file__).parent / "data" / "overlap.hlo").read_text()

    def memory_analysis(self):
        return SimpleNamespace(
            argument_size_in_bytes=1000,
            output_size_in_bytes=500,
            temp_size_in_bytes=2000,
            alias_size_in_bytes=400,
        )


def test_report_by_hand():
    # The exchange's 256 bytes need 16,384 FLOPs beside them at 64 FLOPs a byte and have 8,192.
    chip = Chip(memory_bytes=3000.0, flops=6400.0, network=100.0)
    report = report_compiled(Compiled(), {"data": 2, "expert": 2}, chip)
    assert report.memory_bytes == 1000 + 100 + 2000
    assert report.missing_bytes == 100
    assert report.exchanged == {
        ("all-to-all", "expert"): 256,
        ("collective-permute", "expert"): 256,
        ("all-reduce", "expert"): 512,
    }
    assert report.covered == 128 / 1024
    assert report.flops == 16384
    assert report.step_seconds == pytest.approx(16384 / 6400 + (1024 - 128) / 100)
    assert report.utilisation(6400.0) == pytest.approx(1 / report.step_seconds)
    lines = str(report).split("\n")
    assert lines[1].startswith("does NOT fit") and "all-to-all along expert" in str(report)
    fits = report_compiled(Compiled(), {"data": 2, "expert": 2}, CHIPS["v5e"])
    assert fits.missing_bytes == 0 and "NOT" not in str(fits)
