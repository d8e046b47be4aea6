"""The cache: found again under the same content, never under other, and nothing edited passes for what was made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.train.eager import mlp
from weft import cache
from weft.capture import capture
from weft.errors import RunError
from weft.plan import Plan, cut
from weft.plan.load import load_plan

FILES = {"program.py": "x = 1\n", "parts.json": "{}\n"}


@pytest.fixture(scope="module")
def graph():
    return capture(*mlp())


def test_equal_content_has_an_equal_key(graph) -> None:
    again = capture(*mlp())
    assert cache.program_key(graph, load_plan("dp=2", graph)) == cache.program_key(again, load_plan("dp=2", again))


def test_other_content_has_another_key(graph) -> None:
    plan = load_plan("dp=2", graph)
    keys = {
        cache.program_key(graph, plan),
        cache.program_key(graph, load_plan("tp=2", graph)),
        cache.program_key(graph, Plan(graph, 2)),
        cache.program_key(graph, Plan(graph, 3)),
        cache.program_key(graph, Plan(graph, 2).trans("up", cut("n", 2, axis="a"))),
        cache.program_key(replace(graph, constants={"c": torch.zeros(2)}), plan),
        cache.program_key(replace(graph, constants={"c": torch.ones(2)}), plan),
        cache.program_key(replace(graph, name="other"), plan),
    }
    assert len(keys) == 8


def test_weft_itself_is_part_of_the_key(graph, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = load_plan("dp=2", graph)
    before = cache.program_key(graph, plan)
    monkeypatch.setattr(cache, "source_hash", lambda: "another weft")
    assert cache.program_key(graph, plan) != before


def test_written_and_found(graph, tmp_path: Path) -> None:
    directory = cache.directory_of(tmp_path / "deep" / "er", graph, "0123456789abcdef00")
    assert cache.look_up(directory, "k") is None
    assert cache.write(directory, "k", FILES).edited == ()
    assert {path.name for path in directory.iterdir()} == {*FILES, cache.SEAL}
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]
    found = cache.look_up(directory, "k")
    assert found is not None and found.edited == ()


def test_edits_are_noticed_and_kept(tmp_path: Path) -> None:
    directory = tmp_path / "program"
    cache.write(directory, "k", FILES)
    (directory / "program.py").write_text("x = 2\n")
    (directory / "parts.json").unlink()
    found = cache.look_up(directory, "k")
    assert found is not None and found.edited == ("program.py", "parts.json")
    assert cache.write(directory, "k", FILES).edited == ("program.py", "parts.json")
    assert (directory / "program.py").read_text() == "x = 2\n"


def test_strangers_are_refused(tmp_path: Path) -> None:
    directory = tmp_path / "program"
    cache.write(directory, "k", FILES)
    with pytest.raises(RunError, match="another model, plan or version"):
        cache.look_up(directory, "other")
    (directory / cache.SEAL).write_text("{")
    with pytest.raises(RunError, match="no program of weft's"):
        cache.look_up(directory, "k")
