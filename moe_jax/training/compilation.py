"""Compiled programs kept from one process to the next."""

import os
from pathlib import Path

import jax


def keep_compiled_programs() -> Path | None:
    """Points JAX at a compilation cache in the user's cache folder, unless one is set already.

    A second run of the same program then starts in seconds. JAX's own setting
    (`JAX_COMPILATION_CACHE_DIR` or `jax_compilation_cache_dir`) comes first, then
    `$XDG_CACHE_HOME/moe_jax/jax`, then `~/.cache/moe_jax/jax`.

    Returns:
        The folder in use; None if it cannot be written.
    """
    if chosen := jax.config.values["jax_compilation_cache_dir"]:
        return Path(chosen)
    try:
        # Its specification wants a path that is not absolute ignored.
        cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
        folder = (cache if cache.is_absolute() else Path.home() / ".cache") / "moe_jax" / "jax"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    if not os.access(folder, os.W_OK):
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return folder
