"""Sizes and shape of weft/: token budgets, short files, small folders, nothing for tests alone, all in the contract."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from collections import Counter
from collections.abc import Set
from pathlib import PurePosixPath

import pytest

from tests.house.budgets import (
    ALL,
    LARGE_FOLDERS,
    LONG_FILES,
    MAX_LINES,
    MAX_MODULES,
    NO_LAYER,
    NOT_FORBIDDEN,
    ONLY_TESTS,
    TOKENS,
)
from tests.house.imports import graph, unreached
from tests.house.tokens import ROOT, at, count, here, sizes, table, total

pytestmark = pytest.mark.smoke

DOORS = {"weft", "weft.cli", "weft.__main__"}
TEXT = '''"""A docstring is not code."""

import os
from sys import (
    argv,
    path,
)

LIMIT = 3  # nor is a comment
"""Nor what is said about a value."""


def twice(x: int) -> str:
    """Nor this."""
    return f"{x * 2} of {LIMIT}" "and more"
'''


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return dict(here())


def only_listed(offenders: Set[str], listed: Set[str]) -> None:
    """Nothing new breaks the rule, and what keeps it again is taken off the list."""
    assert offenders - listed == set(), "these break the rule"
    assert listed - offenders == set(), "these keep the rule: take them off their list in tests/house/budgets.py"


def test_names_operators_numbers_and_strings_count() -> None:
    value, head, body = ("LIMIT", "=", "3"), ("def", "twice", "(", "x", ":", "int", ")", "->", "str", ":"), 3
    assert count(TEXT) == len(value) + len(head) + body, "the body is return, an f-string and a string"


def test_packages_keep_their_budgets(sources: dict[str, str]) -> None:
    found = sizes(sources)
    assert set(found) == set(TOKENS), "tests/house/budgets.py has a budget for every package, and for no other"
    above = {name: f"{size.tokens} of {TOKENS[name]}" for name, size in found.items() if size.tokens > TOKENS[name]}
    assert not above, f"more tokens than tests/house/budgets.py allows: {above}"
    assert total(found).tokens <= ALL


def test_tables_tell_before_and_after(sources: dict[str, str]) -> None:
    now = sizes({"weft/a/one.py": "x = 1\n", "weft/two.py": "y = x + 1\n"})
    assert table(now).splitlines()[2:] == ["| (top) | 5 | 1 | 1 |", "| a | 3 | 1 | 1 |", "| all | 8 | 2 | 2 |"]
    before = sizes({"weft/b/one.py": "x = 1\n", "weft/two.py": "y = x\n"})
    assert table(now, before).splitlines()[2:] == [
        "| (top) | 3 | 5 | +2 | 1 | 1 | 1 | 1 |",
        "| a | 0 | 3 | +3 | 0 | 1 | 0 | 1 |",
        "| b | 3 | 0 | -3 | 1 | 0 | 1 | 0 |",
        "| all | 6 | 8 | +2 | 2 | 2 | 2 | 2 |",
    ]


@pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="not a clone")
def test_a_revision_is_read_without_checking_it_out() -> None:
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-tree", "-r", "--name-only", "HEAD", "weft"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert set(at("HEAD")) == {name for name in listed if name.endswith(".py")}


def test_files_are_short(sources: dict[str, str]) -> None:
    only_listed({path for path, text in sources.items() if text.count("\n") > MAX_LINES}, LONG_FILES)


def test_folders_are_small(sources: dict[str, str]) -> None:
    folders = Counter(str(PurePosixPath(path).parent) for path in sources)
    only_listed({folder for folder, number in folders.items() if number > MAX_MODULES}, LARGE_FOLDERS)


def test_no_module_is_for_tests_alone(sources: dict[str, str]) -> None:
    only_listed(set(unreached(graph(sources), DOORS)), ONLY_TESTS)


def test_modules_are_reached_by_imports_and_by_their_names() -> None:
    texts = {
        "weft/__init__.py": "LATE = {'one': 'weft.a.one'}\n",
        "weft/a/__init__.py": "",
        "weft/a/one.py": "from weft.b import two\nENTRY = 'weft.b.three:work'\n",
        "weft/b/__init__.py": "",
        "weft/b/two.py": "TEXT = 'from weft.b import four, five'\n",
        "weft/b/three.py": '"""Not like weft.b.six."""\n',
        "weft/b/four.py": "",
        "weft/b/five.py": "",
        "weft/b/six.py": "import weft.b.seven\n",
        "weft/b/seven.py": "import weft.b.six\n",
    }
    assert unreached(graph(texts), {"weft"}) == ["weft.b.seven", "weft.b.six"]


def test_the_import_contract_lists_every_package(sources: dict[str, str]) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = {contract["type"]: contract for contract in settings["tool"]["importlinter"]["contracts"]}
    packages = {f"weft.{path.split('/')[1]}" for path in sources if path.count("/") > 1}
    layers = {f"weft.{name.strip(' ()')}" for layer in contracts["layers"]["layers"] for name in layer.split("|")}
    only_listed(packages - layers, NO_LAYER)
    modules = {f"weft.{PurePosixPath(path).stem}" for path in sources if path.count("/") == 1}
    # errors imports nothing, and the runtime raises them too
    others = packages | modules - {"weft.__init__", "weft.__main__", "weft.errors"}
    only_listed(others - {"weft.runtime", *contracts["forbidden"]["forbidden_modules"]}, NOT_FORBIDDEN)
