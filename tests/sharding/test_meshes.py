"""Sizes of meshes: inferred, refused with what fits, and refused by the network of a TPU."""

import jax
import pytest

from moe_jax.sharding import meshes
from moe_jax.sharding.meshes import MeshConfig, factorisations, infer_sizes, make_mesh


def test_one_size_is_inferred():
    assert infer_sizes(MeshConfig(data=-1, expert=2, tensor=2), 8) == (2, 1, 2, 2)
    assert infer_sizes(MeshConfig(expert=-1), 8) == (1, 1, 8, 1)
    assert infer_sizes(MeshConfig(2, 2, 2, 1), 8) == (2, 2, 2, 1)


def test_sizes_that_do_not_multiply_to_the_devices_are_refused_with_the_nearest_that_do():
    with pytest.raises(ValueError, match=r"data=3, fsdp=1.* does not fit 8 devices") as error:
        infer_sizes(MeshConfig(data=3), 8)
    assert "that fit: (8, 1, 1, 1)" in str(error.value)
    with pytest.raises(ValueError, match=r"data=-1.*expert=3.* does not fit 8 devices"):
        infer_sizes(MeshConfig(data=-1, expert=3), 8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data": 0}, "data=0 must be"),
        ({"fsdp": -2}, "fsdp=-2 must be"),
        ({"tensor": True}, "tensor=True must be"),
        ({"data": -1, "expert": -1}, "only one of"),
        ({"exchange": "ring"}, "exchange='ring' is not one of"),
    ],
)
def test_bad_fields_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        MeshConfig(**fields)


def test_factorisations_are_all_and_distinct():
    found = list(factorisations(12))
    # Ordered factorisations of 2^2 3 into 4: C(2 + 3, 3) ways to place the 2s times 4 for the 3.
    assert len(found) == len(set(found)) == 40
    assert all(a * b * c * d == 12 for a, b, c, d in found)


def test_mesh_has_the_four_axes_of_type_auto():
    mesh = make_mesh(MeshConfig(data=-1), jax.devices()[:1])
    assert mesh.axis_names == ("data", "fsdp", "expert", "tensor")
    assert all(kind == jax.sharding.AxisType.Auto for kind in mesh.axis_types)


def test_a_torus_without_such_axes_lists_those_it_has(monkeypatch):
    """A network of 2 x 4 x 1 that cannot be cut into an axis of 8 without splitting one."""
    of_torus = meshes.mesh_utils.create_device_mesh

    def create(sizes, devices):
        if 8 in sizes:
            raise NotImplementedError
        return of_torus(sizes, devices)

    monkeypatch.setattr(meshes.mesh_utils, "create_device_mesh", create)
    devices = jax.devices()[:1] * 8
    with pytest.raises(ValueError, match="data=8.* does not fit the network of 8 x") as error:
        make_mesh(MeshConfig(data=8), devices)
    fitting = str(error.value).partition("that fit: ")[2]
    assert "(4, 2, 1, 1)" in fitting and "8" not in fitting.partition(" and ")[0]
