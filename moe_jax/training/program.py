"""The frame of a command-line program: its flags, its log, one line for a fault of the user."""

import logging as python_logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from moe_jax.training.checkpoints import CheckpointSaveError
from moe_jax.training.compilation import keep_compiled_programs
from moe_jax.training.loop import TrainingDivergedError
from moe_jax.training.memory import keep_freed_memory
from moe_jax.training.processes import given_address, run_joined


def run_program(
    run: Callable[[Mapping[str, Any], str], int], workdir: str, *, multihost: bool = False
) -> NoReturn:
    """Runs `run(config, workdir)` on the flags `--config` and `--workdir`, and exits.

    Further flags are defined by the caller beforehand and read by `run`. The flags are defined
    here, not on import, so that several programs can be imported into one process.

    With `--multihost` the program is one of several processes, which each run it, see
    `moe_jax.training.processes`; all but the first log warnings alone.

    Args:
        run: the program on a configuration as a nested dict; returns the exit status. What a user
            can cause and mend (ValueError, OSError, a missing package, a checkpoint that could not
            be written, training that diverged) is printed as one line, with exit status 1; the
            traceback is in the debug log (`--verbosity=1`).
        workdir: default of `--workdir`.
        multihost: whether `run` splits its work over processes; else `--multihost` is refused.
    """
    config = config_flags.DEFINE_config_file("config", None, "Configuration file.")
    folder = flags.DEFINE_string("workdir", workdir, "Folder for all that the run writes.")
    is_joined = flags.DEFINE_bool("multihost", False, "One of several processes of a run.")
    coordinator = flags.DEFINE_string("coordinator", None, "host:port of process 0.")
    num_processes = flags.DEFINE_integer("num_processes", None, "Processes of the run.")
    process_id = flags.DEFINE_integer("process_id", None, "Number of this process, from 0.")
    flags.mark_flag_as_required("config")

    def main(argv: Sequence[str]) -> int:
        if len(argv) > 1:
            return _fail(f"unexpected argument {argv[1]!r}")
        keep_freed_memory()
        keep_compiled_programs()
        logging.get_absl_handler().setFormatter(
            python_logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S")
        )
        # Absl shows at INFO which accelerators JAX looked for and did not find.
        python_logging.getLogger("jax._src.xla_bridge").setLevel(python_logging.WARNING)
        try:
            fields = config.value.to_dict()
        except (AttributeError, ValueError, OSError) as error:
            return _fail(_last_line(error))
        try:
            address = given_address(coordinator.value, num_processes.value, process_id.value)
            if not is_joined.value:
                if address is not None:
                    return _fail(f"--coordinator={address.coordinator} needs --multihost")
                return attempt(fields)
            if not multihost:
                return _fail("--multihost: this program runs in one process")
            return run_joined(lambda: attempt(fields), address)
        except ValueError as error:
            return _fail(str(error))

    def attempt(fields: Mapping[str, Any]) -> int:
        if is_joined.value and jax.process_index() != 0:
            logging.set_verbosity(logging.WARNING)
        try:
            return run(fields, folder.value)
        except (
            ValueError,
            ImportError,
            OSError,
            CheckpointSaveError,
            TrainingDivergedError,
        ) as error:
            logging.debug("raised from here", exc_info=True)
            return _fail(str(error))

    app.run(main, flags_parser=_parse_flags)
    raise AssertionError("app.run exits")


def _fail(reason: str) -> int:
    print(f"error: {reason}", file=sys.stderr)
    return 1


def _parse_flags(argv: Sequence[str]) -> list[str]:
    try:
        return flags.FLAGS(list(argv))
    # ml_collections raises these for a key the configuration lacks or a file that is not there.
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        sys.exit(_fail(_last_line(error)))


def _last_line(error: BaseException) -> str:
    """What went wrong, according to ml_collections, which may put a whole traceback before it."""
    reason: Any = error
    # One raised from another holds it as its argument, and str of a KeyError is a repr.
    while isinstance(reason, BaseException) and reason.args:
        reason = reason.args[0]
    line = str(reason).strip().splitlines()[-1].strip()
    is_unknown_key = isinstance(error, KeyError | AttributeError)
    return f"unknown configuration key: {line}" if is_unknown_key else line
