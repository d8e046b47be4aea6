"""What the documents say is true: their commands and code run, their links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from weft.cli import main

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(ROOT.glob("*.md"))
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[tuple[str, str]]:
    """(document and position, text) of every code block in that language."""
    return [
        (f"{path.name}-{number}", match.group(2))
        for path in DOCUMENTS
        for number, match in enumerate(FENCE.finditer(path.read_text(encoding="utf-8")))
        if match.group(1) == language
    ]


PYTHON, COMMANDS = blocks("python"), [(n, line) for n, text in blocks("bash") for line in text.splitlines() if line]
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def test_there_is_something_to_run() -> None:
    assert PYTHON and len(COMMANDS) >= 2


@pytest.mark.parametrize("code", [text for _, text in PYTHON], ids=[name for name, _ in PYTHON])
def test_python(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # From a file, so that capture finds the source lines.
    path = tmp_path / "block.py"
    path.write_text(code, encoding="utf-8")
    monkeypatch.chdir(ROOT)
    exec(compile(code, str(path), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("command", [text for _, text in COMMANDS], ids=[text for _, text in COMMANDS])
def test_commands(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    name, *rest = shlex.split(command)
    if name == "make":
        assert set(rest) <= TARGETS, f"no such target: {rest}"
        return
    assert name == "weft", f"the documents show a command that no test runs: {command}"
    assert main(rest) == 0
    assert "equal to one device" in capsys.readouterr().out


@pytest.mark.smoke
@pytest.mark.parametrize("path", DOCUMENTS, ids=[path.name for path in DOCUMENTS])
def test_links_and_targets(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)\)", text) if "://" not in link]
    assert [link for link in links if not (ROOT / link).exists()] == []
    assert set(re.findall(r"`make ([\w-]+)`", text)) <= TARGETS
