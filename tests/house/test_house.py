"""House rules that no linter knows: sizes, the map, the runtime that stands alone, nothing half done."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.parsed import parsed

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "weft").rglob("*.py"))
SOURCES = MODULES + sorted(path for path in (ROOT / "tests").rglob("*.py"))
# A word of the rule itself, spelled in two halves so that this file passes it.
UNFINISHED = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" + "XX", "HA" + "CK")) + r")\b")
MAX_FILE, MAX_FUNCTION = 500, 70


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = parsed(path.read_text(encoding="utf-8"))
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.smoke
def test_files_are_short() -> None:
    lengths = {name_of(path): path.read_text(encoding="utf-8").count("\n") for path in SOURCES}
    assert not {name: length for name, length in lengths.items() if length >= MAX_FILE}


@pytest.mark.smoke
def test_functions_are_short() -> None:
    lengths = {
        f"{name_of(path)}:{function.lineno} {function.name}": (function.end_lineno or 0) - function.lineno + 1
        for path in MODULES
        for function in functions(path)
    }
    assert not {name: length for name, length in lengths.items() if length >= MAX_FUNCTION}


@pytest.mark.smoke
def test_modules_say_what_they_are_for() -> None:
    assert not [name_of(path) for path in MODULES if not ast.get_docstring(parsed(path.read_text("utf-8")))]


@pytest.mark.smoke
def test_map_lists_every_package() -> None:
    """ARCHITECTURE.md has a row for every package, and names no file that is gone."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"`(\w+)/`", text))
    packages = {path.parent.name for path in MODULES if path.parent.name not in ("weft", "runtime")}
    top = {name for name in packages if (ROOT / "weft" / name).is_dir() or (ROOT / "weft" / "runtime" / name).is_dir()}
    assert top - rows == set(), "ARCHITECTURE.md lacks packages"
    named = re.findall(r"`(weft/[\w/]+(?:\.py)?)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == [], "ARCHITECTURE.md names what is gone"


@pytest.mark.smoke
def test_nothing_half_done() -> None:
    found = [
        f"{name_of(path)}:{number}"
        for path in SOURCES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if UNFINISHED.search(line)
    ]
    assert not found


@pytest.mark.smoke
def test_no_bare_except_and_no_stub() -> None:
    found = []
    for path in MODULES:
        for node in ast.walk(parsed(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ExceptHandler) and node.type is None:
                found.append(f"{name_of(path)}:{node.lineno} bare except")
            if isinstance(node, ast.Name) and node.id == "NotImplemented" + "Error":
                found.append(f"{name_of(path)}:{node.lineno} {node.id}")
    assert not found


@pytest.mark.smoke
def test_every_silenced_rule_names_itself() -> None:
    """`noqa` and `type: ignore` without a code would silence everything on their line."""
    found = []
    for path in SOURCES:
        with path.open("rb") as file:
            comments = [token for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT]
        for token in comments:
            if re.search(r"noqa(?!: [A-Z]+\d)|type: ignore(?!\[)", token.string):
                found.append(f"{name_of(path)}:{token.start[0]} {token.string}")
    assert not found


@pytest.mark.smoke
def test_runtime_stands_alone() -> None:
    """A trained job must not carry the compiler: the runtime loads nothing of ours but itself and errors."""
    code = (
        "import importlib, pkgutil, sys, weft.runtime\n"
        "for found in pkgutil.walk_packages(weft.runtime.__path__, 'weft.runtime.'):\n"
        "    importlib.import_module(found.name)\n"
        "print(*[n for n in sys.modules if n.startswith('weft.') and not n.startswith('weft.runtime')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "weft.errors"


def test_help_does_not_load_torch() -> None:
    """`weft --help` answers at once."""
    code = "import sys, weft.cli; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout.strip() == "False", done.stderr
