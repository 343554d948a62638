"""Mixtures of experts in JAX: a gate decides, experts answer, a rule combines them.

This module imports nothing: take what you need from a subpackage, such as `moe_jax.core`.
"""

__version__ = "0.1.0"
