import os
import subprocess
import sys

SHOW = "import jax; from moe_jax.training import keep_compiled_programs as keep; print(keep())"


def folder_in_use(**environment):
    kept = {name: value for name, value in os.environ.items() if "CACHE" not in name}
    done = subprocess.run(
        [sys.executable, "-c", SHOW], env=kept | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_cache_is_in_the_users_cache_folder(tmp_path):
    assert folder_in_use(XDG_CACHE_HOME=str(tmp_path)) == str(tmp_path / "moe_jax" / "jax")
    home = tmp_path / "home"
    home.mkdir()
    assert folder_in_use(HOME=str(home)) == str(home / ".cache" / "moe_jax" / "jax")


def test_a_folder_that_is_set_already_stays(tmp_path):
    assert folder_in_use(JAX_COMPILATION_CACHE_DIR=str(tmp_path)) == str(tmp_path)


def test_a_folder_that_cannot_be_made_is_done_without(tmp_path):
    (tmp_path / "file").write_text("")
    assert folder_in_use(XDG_CACHE_HOME=str(tmp_path / "file")) == "None"
