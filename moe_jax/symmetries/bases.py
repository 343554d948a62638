"""Bases of matrix Lie algebras, and the quadratic forms that their groups leave alone."""

from typing import Any

import numpy as np
from jaxtyping import Float

BASES = ("so", "sl", "affine")


def basis_matrices(basis: Any, size: int) -> Float[np.ndarray, "matrices d d"]:
    """The basis that a name or nested tuples stand for.

    `so` has d (d-1)/2 skew matrices, `sl` the d^2 - 1 traceless ones, `affine` all maps of the
    first d - 1 coordinates that leave the last one, which stands for 1, alone.

    Args:
        basis: a name of `BASES`, or matrices [matrices, d, d].
        size: d.

    Raises:
        ValueError: for an unknown name, matrices that are not [matrices, d, d] or not finite.
    """
    if not isinstance(basis, str):
        matrices = np.asarray(basis, np.float64)
        if matrices.ndim != 3 or matrices.shape[1:] != (size, size) or not len(matrices):
            raise ValueError(f"basis {matrices.shape} must be [matrices, {size}, {size}]")
        if not np.isfinite(matrices).all():
            raise ValueError(f"basis={basis} must be finite")
        return matrices
    if basis not in BASES:
        raise ValueError(f"basis={basis!r} is not one of {BASES}, nor matrices")
    unit = np.eye(size * size).reshape(size, size, size, size)
    if basis == "so":
        pairs = [(i, j) for i in range(size) for j in range(i)]
        found = [unit[i, j] - unit[j, i] for i, j in pairs]
    elif basis == "affine":
        found = list(unit[: size - 1].reshape(-1, size, size))
    else:
        found = [unit[i, j] for i in range(size) for j in range(size) if i != j]
        found += [unit[i, i] - unit[i + 1, i + 1] for i in range(size - 1)]
    if not found:
        raise ValueError(f"basis={basis!r} is empty for {size} latent coordinates")
    return np.array(found)


def quadratic_invariants(
    matrices: Float[np.ndarray, "matrices d d"],
) -> Float[np.ndarray, "forms d d"]:
    """A basis of the symmetric Q with z^T Q z constant along exp(t L) z for every given L.

    d/dt z^T Q z = z^T (L^T Q + Q L) z, so that Q spans the null space of L^T Q + Q L = 0 over all
    L. Of `so` it is the identity, of `affine` the square of the last coordinate, of `sl` nothing:
    SL(d) carries any z to any other. The largest entry of each Q is 1.
    """
    size = matrices.shape[-1]
    rows, columns = np.triu_indices(size)
    forms = np.zeros((len(rows), size, size))
    index = np.arange(len(rows))
    forms[index, rows, columns] = forms[index, columns, rows] = 1.0
    scale = np.maximum(np.abs(matrices).max((-2, -1), keepdims=True), 1e-300)
    matrices = matrices / scale
    changes = np.einsum("cki,fkj->fcij", matrices, forms) + np.einsum(
        "fik,ckj->fcij", forms, matrices
    )
    system = changes.reshape(len(forms), -1).T
    _, singular, right = np.linalg.svd(system, full_matrices=False)
    rank = int((singular > 1e-9 * max(float(singular.max()), 1.0)).sum())
    found = np.einsum("nf,fij->nij", right[rank:], forms)
    flat = found.reshape(-1, size * size)
    largest = flat[np.arange(len(flat)), np.abs(flat).argmax(1)]
    return found / largest[:, None, None]
