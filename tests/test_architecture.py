"""The layout rules, read from the source: who may import whom, file length, docstrings."""

import ast
import configparser
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_LINES = 500
# What each room of moe_jax imports besides itself; every room not named here is a family.
ROOM_IMPORTS = {"core": set(), "training": {"core"}, "sharding": {"core"}}
FAMILY_IMPORTS = {"core", "training", "sharding"}
# Named differently in setup.cfg and in an import statement.
MODULE_OF_DISTRIBUTION = {"absl-py": "absl", "orbax-checkpoint": "orbax"}
NEVER_IMPORTED = {"torch", "transformers", "pytest", "hypothesis", "beartype"}
ABOVE = {"theory", "benchmarks", "colabs", "configs", "tests"}


def source_files(root: Path) -> list[Path]:
    return sorted(p for top in ("moe_jax", "theory") for p in (root / top).rglob("*.py"))


def imported_names(path: Path, root: Path, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything a file imports, wherever the statement stands."""
    package = path.relative_to(root).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            module = (*base, node.module) if node.module else base
            yield from ((node.lineno, ".".join((*module, alias.name))) for alias in node.names)


def module_level(tree: ast.AST) -> ast.Module:
    """The tree without function bodies and without what only a type checker reads."""

    class Pruned(ast.NodeTransformer):
        def visit_FunctionDef(self, node):
            return None

        visit_AsyncFunctionDef = visit_FunctionDef

        def visit_If(self, node):
            if "TYPE_CHECKING" in ast.unparse(node.test):
                return None
            return self.generic_visit(node)

    return Pruned().visit(tree)


def runtime_modules(root: Path) -> set[str]:
    setup = configparser.ConfigParser()
    setup.read(root / "setup.cfg")
    requirements = setup["options"]["install_requires"].split("\n")
    names = {re.split(r"[\[<>=!~; ]", line)[0] for line in requirements if line}
    return {MODULE_OF_DISTRIBUTION.get(name, name) for name in names}


def import_violations(root: Path) -> list[str]:
    """Imports that point up or sideways, or at a package that moe_jax may never need."""
    found = []
    for path in source_files(root):
        where = path.relative_to(root)
        top, *inner = where.with_suffix("").parts
        room = inner[0]
        for line, name in imported_names(path, root, ast.parse(path.read_text())):
            first, _, rest = name.partition(".")
            target = rest.partition(".")[0]
            if first in NEVER_IMPORTED or (top == "moe_jax" and first in ABOVE):
                found.append(f"{where}:{line} imports {name}")
            elif first == "moe_jax" == top:
                allowed = ROOM_IMPORTS.get(room, FAMILY_IMPORTS) | {room}
                if room == "__init__":
                    allowed = set()
                # Else the name is an attribute of moe_jax itself, such as its version.
                is_room = (root / "moe_jax" / target).is_dir()
                if target and is_room and target not in allowed:
                    found.append(f"{where}:{line} imports {name}")
    return found


def undeclared_imports(root: Path) -> list[str]:
    """Module-level imports of packages that a plain install does not bring."""
    allowed = runtime_modules(root) | set(sys.stdlib_module_names) | {"moe_jax", "theory"}
    found = []
    for path in source_files(root):
        tree = module_level(ast.parse(path.read_text()))
        for line, name in imported_names(path, root, tree):
            if name.partition(".")[0] not in allowed:
                found.append(f"{path.relative_to(root)}:{line} imports {name}")
    return found


def missing_docstrings(root: Path) -> list[str]:
    found = []
    for path in source_files(root):
        tree = ast.parse(path.read_text())
        where = path.relative_to(root)
        if not ast.get_docstring(tree):
            found.append(f"{where}")
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                if not node.name.startswith("_") and not ast.get_docstring(node):
                    found.append(f"{where}:{node.lineno} {node.name}")
    return found


def long_files(root: Path) -> list[str]:
    counts = {p: len(p.read_text().splitlines()) for p in source_files(root)}
    return [f"{p.relative_to(root)}: {n} lines" for p, n in counts.items() if n > MAX_LINES]


def paths_outside(root: Path) -> list[str]:
    """Files that name a folder called shared, which is no part of the package."""
    return [
        f"{path.relative_to(root)}"
        for path in source_files(root)
        if re.search(r"/shared\b", path.read_text())
    ]


CHECKS = (import_violations, undeclared_imports, missing_docstrings, long_files, paths_outside)


@pytest.mark.parametrize("check", CHECKS)
def test_source_keeps_the_rule(check):
    assert source_files(ROOT)
    assert check(ROOT) == []


SOUND_TREE = {
    "setup.cfg": "[options]\ninstall_requires =\n    absl-py>=2\n    jax>=0.10\n",
    "moe_jax/__init__.py": '"""Top."""\n\n__version__ = "1"\n',
    "moe_jax/core/routing.py": '"""Routing."""\n\nimport jax\nfrom absl import logging\n',
    "moe_jax/training/step.py": '"""Step."""\n\nfrom moe_jax.core import routing\n',
    "moe_jax/language/data.py": '"""Data."""\n\n\ndef _read():\n    import tokenizers\n',
    "moe_jax/language/model.py": (
        '"""Model."""\n\nimport math\nfrom typing import TYPE_CHECKING\n\n'
        "import moe_jax.training.step\nfrom moe_jax import __version__\nfrom . import data\n\n"
        "if TYPE_CHECKING:\n    import tokenizers\n"
    ),
    "moe_jax/symmetries/model.py": '"""Model."""\n',
    "theory/rates.py": '"""Rates."""\n\nfrom moe_jax.language import model\n',
}


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize("check", CHECKS)
def test_check_accepts_a_sound_tree(check, tmp_path):
    write_tree(tmp_path, SOUND_TREE)
    assert check(tmp_path) == []


@pytest.mark.parametrize(
    ("check", "path", "statement"),
    [
        (import_violations, "moe_jax/core/losses.py", "from moe_jax.training import step"),
        (import_violations, "moe_jax/core/losses.py", "from ..training import step"),
        (import_violations, "moe_jax/core/losses.py", "def _f():\n    import moe_jax.training"),
        (import_violations, "moe_jax/training/loop.py", "from moe_jax import language"),
        (import_violations, "moe_jax/symmetries/fit.py", "import moe_jax.language.model as m"),
        (import_violations, "moe_jax/symmetries/fit.py", "from moe_jax.language.model import f"),
        (import_violations, "moe_jax/__init__.py", "from moe_jax.core import routing"),
        (import_violations, "moe_jax/language/fit.py", "from theory import rates"),
        (import_violations, "moe_jax/language/fit.py", "import benchmarks.speed"),
        (import_violations, "moe_jax/language/fit.py", "def _f():\n    import torch.nn"),
        (import_violations, "theory/plots.py", "import hypothesis"),
        (undeclared_imports, "moe_jax/core/losses.py", "import tokenizers"),
        (undeclared_imports, "theory/plots.py", "try:\n    import numpy\nexcept Exception: ..."),
        (missing_docstrings, "moe_jax/core/losses.py", "def load_balance_loss(): ..."),
        (missing_docstrings, "theory/plots.py", "class Plot: ..."),
        (long_files, "moe_jax/core/losses.py", "\n" * MAX_LINES),
        (paths_outside, "moe_jax/core/losses.py", "DATA = '../shared/corpus'"),
    ],
)
def test_check_reports_a_violation(check, path, statement, tmp_path):
    write_tree(tmp_path, SOUND_TREE | {path: f'"""Module."""\n{statement}\n'})
    (violation,) = check(tmp_path)
    assert violation.startswith(path)


def test_a_module_without_docstring_is_reported(tmp_path):
    write_tree(tmp_path, SOUND_TREE | {"moe_jax/core/losses.py": "x = 1\n"})
    assert missing_docstrings(tmp_path) == ["moe_jax/core/losses.py"]
