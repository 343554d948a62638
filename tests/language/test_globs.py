import glob
import os
from pathlib import Path

import pytest

from moe_jax.language.globs import matching_paths

FILES = ["a.txt", "b.py", "one/a.txt", "one/two/a.txt", "one/two/[x]/a.txt", "one/.hidden/a.txt"]


@pytest.fixture
def tree(tmp_path, monkeypatch):
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "pattern",
    [
        *(
            "*.txt",
            "**/*.txt",
            "one/**/*.txt",
            "./one/**/a.txt",
            "o*/**/two/**/*.txt",
            "nowhere/**/*",
        ),
        *(
            "**/**/a.txt",
            "one**/*.txt",
            "**/[[]x]/*",
            "**/*/a.txt",
            "**/.hidden/*",
            "one//**//a.txt",
        ),
    ],
)
@pytest.mark.parametrize("absolute", [False, True])
def test_without_links_paths_are_those_of_python(tree, pattern, absolute):
    pattern = f"{tree}/{pattern}" if absolute else pattern
    expected = {os.path.normpath(path) for path in glob.glob(pattern, recursive=True)}
    assert {os.path.normpath(path) for path in matching_paths(pattern)} == expected


def test_pattern_that_ends_in_two_stars_matches_all_files_below(tree):
    files = {path for path in matching_paths(f"{tree}/one/**") if os.path.isfile(path)}
    assert files == {
        f"{tree}/{name}" for name in ("one/a.txt", "one/two/a.txt", "one/two/[x]/a.txt")
    }


def test_links_in_circles_are_entered_once(tree):
    # Python's own glob has 2^40 paths to follow here, until the system refuses longer ones.
    for name in ("up", "again"):
        (tree / "one" / "two" / name).symlink_to(tree)
    (tree / "one" / "self").symlink_to(tree / "one" / "self")
    assert matching_paths(f"{tree}/**/*.txt") == {
        f"{tree}/{name}" for name in FILES if name.endswith("txt") and ".hidden" not in name
    }


def test_linked_folders_are_entered_and_named_by_their_own_path_where_they_have_one(tree):
    outside = tree.parent / f"{tree.name} outside"
    outside.mkdir()
    (outside / "c.txt").write_text("c")
    (tree / "0_link").symlink_to(outside)
    (tree / "0_alias").symlink_to(tree / "one" / "two")
    found = matching_paths(f"{tree}/**/*.txt")
    assert f"{tree}/0_link/c.txt" in found and f"{tree}/one/two/a.txt" in found
    assert not any("0_alias" in path for path in found)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everywhere")
def test_folder_that_cannot_be_read_is_passed_over(tree):
    folder = Path(tree / "one" / "two")
    folder.chmod(0)
    try:
        assert f"{tree}/one/a.txt" in matching_paths(f"{tree}/**/*.txt")
    finally:
        folder.chmod(0o755)
