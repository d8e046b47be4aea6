"""What the documents say is true: their commands and code run and print what they show, their links lead somewhere."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.documents import ROOT, TARGETS, blocks, run
from weft.errors import WeftError

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
RUNNING = [path for path in DOCUMENTS if any(True for _ in blocks(path))]
LONG = [path for path in RUNNING if any(block.starts_many for block in blocks(path))]


def test_there_is_something_to_run() -> None:
    assert {"README.md", "tutorial.md", "errors.md", "training.md"} <= {path.name for path in RUNNING}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a page is run; what it imports from there is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    # tables are not squeezed
    monkeypatch.setenv("COLUMNS", "200")
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("path", RUNNING, ids=[path.name for path in RUNNING])
def test_page(path: Path, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(path, folder, lambda: "\n".join(capfd.readouterr()))


@pytest.mark.full
@pytest.mark.parametrize("path", LONG, ids=[path.name for path in LONG])
def test_page_with_many_processes(path: Path, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(path, folder, lambda: "\n".join(capfd.readouterr()), long=True)


def test_every_error_has_its_example() -> None:
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    for kind in WeftError.__subclasses__():
        assert f"\n## {kind.__name__}: " in page, f"docs/errors.md says nothing about {kind.__name__}"
    shown = "\n".join(block.shown or "" for block in blocks(ROOT / "docs" / "errors.md"))
    assert {"CaptureError", "PlanError", "RuleError", "LayoutError", "CheckError", "ModelFileError", "RunError"} <= set(
        re.findall(r"^(\w+Error): ", shown, re.MULTILINE)
    )


@pytest.mark.smoke
@pytest.mark.parametrize("path", DOCUMENTS, ids=[path.name for path in DOCUMENTS])
def test_links_and_targets(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text) if "://" not in link]
    assert [link for link in links if not (path.parent / link).exists()] == []
    assert set(re.findall(r"`make ([\w-]+)`", text)) <= TARGETS
