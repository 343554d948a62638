"""Matrix exponentials that stay finite, in closed form where there is one."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

MIN_EXPONENT, MAX_EXPONENT = -30.0, 8.0
"""Range of the exponent of growth: exp overflows float32 at 88.7, and squares must not."""

MAX_NORM = 1e3
"""Largest norm of t A that `expm` takes; a skew matrix loses orthogonality past it."""

_SQUARINGS = 11  # 2^11 / 2 > MAX_NORM
_TERMS = 9
_MAX_ENTRY = 1e15
_SERIES_BELOW = 1e-3


def expm(
    generator: Float[Array, "*batch d d"], time: Float[Array, "*batch"], *, skew: bool = False
) -> Float[Array, "*batch d d"]:
    """exp(t A) for each matrix: closed forms for d = 1, 2 and skew d = 3, else by squaring.

    Exponents of growth are clipped to [-30, 8] in the closed forms. Past |t| ||A|| = 1e3 the time
    is shortened to that norm, and entries beyond 1e9 are clipped, so that no result is infinite or
    NaN, where `jax.scipy.linalg.expm` gives NaN past 16 squarings.

    Args:
        generator: A, finite.
        time: t, of either sign.
        skew: whether A is skew-symmetric.
    """
    size = generator.shape[-1]
    # Products of two entries must not overflow.
    scaled = jnp.clip(generator * time[..., None, None], -_MAX_ENTRY, _MAX_ENTRY)
    if size == 1:
        return _bounded_exp(scaled)
    if size == 2:
        return _expm_plane(scaled)
    if size == 3 and skew:
        return _rodrigues(scaled)
    return _expm_by_squaring(scaled)


def expm_action(
    generator: Float[Array, "d d"], time: Float[Array, "*batch"], z: Float[Array, "*batch d"]
) -> Float[Array, "*batch d"]:
    """exp(t A) z of one matrix at many times, no exponential of which is formed.

    With h = 1 / (2 ||A||) and |t| = n h + r, the powers exp(+-h A)^(2^j) are squared once for all,
    those of n's binary digits applied to z, and exp(r A) z comes from its Taylor polynomial: as
    many products of a matrix with a vector as `expm` takes products of matrices, and as bounded.

    Args:
        generator: A, finite.
        time: t, of either sign.
        z: latents.
    """
    matrix = jnp.clip(generator, -_MAX_ENTRY, _MAX_ENTRY)
    norm = jnp.maximum(jax.lax.stop_gradient(jnp.linalg.norm(matrix)), 1e-30)
    limit = MAX_NORM / norm
    time = jnp.clip(time, -limit, limit)
    step = 0.5 / norm
    count = jnp.floor(jax.lax.stop_gradient(jnp.abs(time)) / step)
    is_forward = (time >= 0)[..., None]
    rest = (jnp.abs(time) - count * step)[..., None]
    direction = jnp.where(is_forward, 1.0, -1.0).astype(z.dtype)
    moved = z
    for term in range(_TERMS, 0, -1):
        moved = z + rest / term * direction * (moved @ matrix.T)

    identity = jnp.eye(matrix.shape[0], dtype=matrix.dtype)
    forward = backward = identity
    for term in range(_TERMS, 0, -1):
        forward = identity + step / term * matrix @ forward
        backward = identity - step / term * matrix @ backward
    digits = count.astype(jnp.int32)[..., None]
    for place in range(_SQUARINGS + 1):
        is_set = (digits >> place) & 1 == 1
        turned = jnp.where(is_forward, moved @ forward.T, moved @ backward.T)
        moved = jnp.where(is_set, jnp.clip(turned, -_MAX_ENTRY, _MAX_ENTRY), moved)
        forward = jnp.clip(forward @ forward, -1e9, 1e9)
        backward = jnp.clip(backward @ backward, -1e9, 1e9)
    return moved


def phi_1(x: Float[Array, "*batch planes 2"]) -> Float[Array, "*batch planes 2"]:
    """(exp(x) - 1) / x of complex numbers given as (real, imaginary), 1 + x/2 + x^2/6 near 0."""
    re, im = x[..., 0], x[..., 1]
    is_small = jnp.square(re) + jnp.square(im) < _SERIES_BELOW**2
    re_safe, im_safe = jnp.where(is_small, 1.0, re), jnp.where(is_small, 0.0, im)
    growth = jnp.exp(jnp.clip(re_safe, MIN_EXPONENT, MAX_EXPONENT))
    top_re, top_im = growth * jnp.cos(im_safe) - 1.0, growth * jnp.sin(im_safe)
    square = jnp.square(re_safe) + jnp.square(im_safe)
    far_re = (top_re * re_safe + top_im * im_safe) / square
    far_im = (top_im * re_safe - top_re * im_safe) / square
    near_re = 1.0 + re / 2.0 + (jnp.square(re) - jnp.square(im)) / 6.0
    near_im = im / 2.0 + re * im / 3.0
    return jnp.stack(
        [jnp.where(is_small, near_re, far_re), jnp.where(is_small, near_im, far_im)], axis=-1
    )


def _expm_plane(matrix: Float[Array, "*batch 2 2"]) -> Float[Array, "*batch 2 2"]:
    """e^a (C I + S B) for A = a I + B with tr B = 0, B^2 = q I (Cayley and Hamilton).

    C = cos r and S = sin(r) / r with r = sqrt(-q) for q < 0; else the eigenvalues a +- sqrt(q) are
    real, and each one's exponential is clipped by itself.
    """
    half_trace = (matrix[..., 0, 0] + matrix[..., 1, 1]) / 2.0
    identity = jnp.broadcast_to(jnp.eye(2, dtype=matrix.dtype), matrix.shape)
    traceless = matrix - half_trace[..., None, None] * identity
    q = jnp.square(traceless[..., 0, 0]) + traceless[..., 0, 1] * traceless[..., 1, 0]
    turn_even, turn_odd = _cos_and_sinc(jnp.minimum(q, _SERIES_BELOW))
    growth = _bounded_exp(half_trace)
    is_real = q >= _SERIES_BELOW
    root = jnp.sqrt(jnp.where(is_real, q, 1.0))
    high, low = _bounded_exp(half_trace + root), _bounded_exp(half_trace - root)
    even = jnp.where(is_real, (high + low) / 2.0, growth * turn_even)
    odd = jnp.where(is_real, (high - low) / (2.0 * root), growth * turn_odd)
    return even[..., None, None] * identity + odd[..., None, None] * traceless


def _bounded_exp(exponent: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    return jnp.exp(jnp.clip(exponent, MIN_EXPONENT, MAX_EXPONENT))


def _cos_and_sinc(
    q: Float[Array, "*batch"],
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    """cos(r) and sin(r) / r with r = sqrt(-q), of q <= 1e-3; by their series near 0."""
    is_small = q > -_SERIES_BELOW
    root = jnp.sqrt(jnp.where(is_small, 1.0, -q))
    near_even = 1.0 + q / 2.0 + jnp.square(q) / 24.0
    near_odd = 1.0 + q / 6.0 + jnp.square(q) / 120.0
    return (
        jnp.where(is_small, near_even, jnp.cos(root)),
        jnp.where(is_small, near_odd, jnp.sin(root) / root),
    )


def _rodrigues(matrix: Float[Array, "*batch 3 3"]) -> Float[Array, "*batch 3 3"]:
    """I + sin(a)/a W + (1 - cos a)/a^2 W^2, a the angle; (1 - cos a)/a^2 = (sin(a/2)/(a/2))^2/2."""
    square = matrix @ matrix
    minus_angle_squared = jnp.trace(square, axis1=-2, axis2=-1) / 2.0
    _, odd = _cos_and_sinc(minus_angle_squared)
    _, half = _cos_and_sinc(minus_angle_squared / 4.0)
    identity = jnp.broadcast_to(jnp.eye(3, dtype=matrix.dtype), matrix.shape)
    return (
        identity + odd[..., None, None] * matrix + jnp.square(half)[..., None, None] / 2.0 * square
    )


def _expm_by_squaring(matrix: Float[Array, "*batch d d"]) -> Float[Array, "*batch d d"]:
    """Taylor polynomial of A / 2^s, squared s times; s is the matrix's own, the loop's is fixed."""
    norm = jax.lax.stop_gradient(jnp.linalg.norm(matrix, axis=(-2, -1)))
    matrix = matrix * jnp.minimum(1.0, MAX_NORM / jnp.maximum(norm, 1e-30))[..., None, None]
    norm = jnp.clip(norm, 1e-30, MAX_NORM)
    squarings = jnp.clip(jnp.ceil(jnp.log2(norm / 0.5)), 0.0, _SQUARINGS)
    matrix = matrix * jnp.exp2(-squarings)[..., None, None]
    identity = jnp.broadcast_to(jnp.eye(matrix.shape[-1], dtype=matrix.dtype), matrix.shape)
    power = identity
    for term in range(_TERMS, 0, -1):
        power = identity + matrix @ power / term

    for count in range(_SQUARINGS):
        squared = jnp.clip(power @ power, -1e9, 1e9)
        power = jnp.where((squarings > count)[..., None, None], squared, power)
    return power
