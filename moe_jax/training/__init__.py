"""Training shared by every family: optimiser, step, loop, checkpoints, metrics, progress."""
