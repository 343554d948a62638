"""Recursive globs that end even where links lead in circles."""

import glob
import os
import re
from collections.abc import Iterator

# One or more path components in a row that are exactly `**`.
_DOUBLE_STAR = re.compile(r"(?:^|(?<=/))(?:\*\*/+)*\*\*(?:/+|$)")


def matching_paths(pattern: str) -> set[str]:
    """What `glob.glob(pattern, recursive=True)` matches, except that `**` enters no folder twice.

    Python's follows links wherever they lead, so that two links to a folder above them give it a
    number of paths that doubles with each level. Of several paths to a folder the one without links
    below the place of the `**` is taken. As in Python, `**` passes over folders whose names begin
    with a dot.
    """
    found = _DOUBLE_STAR.search(pattern)
    if not found:
        return set(glob.glob(pattern))
    head, tail = pattern[: found.start()], pattern[found.end() :] or "*"
    roots = glob.glob(head) if head else [""]
    return {
        path
        for root in roots
        for folder in _folders(root)
        for path in matching_paths(os.path.join(glob.escape(folder), tail))
    }


def _folders(root: str) -> Iterator[str]:
    """The folder and those below it; links are followed after all else, and no folder is twice."""
    seen = set()
    folders: list[str] = [root]
    links: list[str] = []
    while folders or links:
        folder = folders.pop() if folders else links.pop(0)
        real = os.path.realpath(folder)
        if real in seen:
            continue
        seen.add(real)
        yield folder
        try:
            names = sorted(os.listdir(folder or "."), reverse=True)
        except OSError:
            continue
        for name in names:
            path = os.path.join(folder, name)
            if not name.startswith(".") and os.path.isdir(path):
                (links if os.path.islink(path) else folders).append(path)
