"""The cache: found again under the same content, never under other, and nothing edited passes for what was made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import weft
from tests.train.eager import mlp
from weft.capture import capture
from weft.compile import cache
from weft.errors import RunError
from weft.ir.graph import Tensor
from weft.plan import Plan, cut
from weft.plan.load import load_plan
from weft.runtime.operators.algorithms import REGISTRY
from weft.runtime.program.files import PARTS, PROGRAM, with_description


@pytest.fixture(scope="module")
def graph():
    return capture(*mlp())


def test_equal_content_has_an_equal_key(graph) -> None:
    again = capture(*mlp())
    assert cache.program_key(graph, load_plan("dp=2", graph)) == cache.program_key(again, load_plan("dp=2", again))


def with_constant(graph, value: float):
    tensors = {**graph.tensors, "c": Tensor("c", (2,), torch.float32)}
    return replace(graph, constants={"c": torch.full((2,), value)}, tensors=tensors)


def test_other_content_has_another_key(graph) -> None:
    plan = load_plan("dp=2", graph)
    keys = {
        cache.program_key(graph, plan),
        cache.program_key(graph, load_plan("tp=2", graph)),
        cache.program_key(graph, Plan(graph, 2)),
        cache.program_key(graph, Plan(graph, 3)),
        cache.program_key(graph, Plan(graph, 2).trans("up", cut("n", 2, axis="a"))),
        cache.program_key(with_constant(graph, 0.0), plan),
        cache.program_key(with_constant(graph, 1.0), plan),
        cache.program_key(replace(graph, name="other"), plan),
    }
    assert len(keys) == 8


def test_weft_itself_is_part_of_the_key(graph, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = load_plan("dp=2", graph)
    before = cache.program_key(graph, plan)
    monkeypatch.setattr(cache, "source_hash", lambda: "another weft")
    assert cache.program_key(graph, plan) != before


def test_what_a_user_says_of_an_operator_is_part_of_the_key(graph) -> None:
    plan, keys = load_plan("dp=2", graph), []

    def told(rule: str) -> None:
        weft.register_algorithm("keyed", op="aten.linear", rule=rule)(lambda x, w, b=None: x)

    keys.append(cache.program_key(graph, plan))
    for rule in ("b h, f h, f -> b f", "b h+, f h+, f -> b f"):
        told(rule)
        keys.append(cache.program_key(graph, plan))
    REGISTRY.remove("aten.linear", "keyed")
    assert len(set(keys)) == 3
    assert cache.program_key(graph, plan) == keys[0]


def files_of(key: str = "k") -> dict[str, bytes]:
    files = {"program.py": b"x = 1\n", PARTS: b"{}\n"}
    piece = {"folder": "", "class": "X", "files": ["program.py"], "ranks": [0]}
    about = {"batch": {}, "size_of": [0], "sizes": [{"pieces": [piece]}], "events": {}, "ties": [], "loans": []}
    return with_description(files, {"key": key, "devices": 1, **about})


def test_written_and_found(graph, tmp_path: Path) -> None:
    directory = cache.directory_of(tmp_path / "deep" / "er", Plan(graph, 2), "0123456789abcdef00")
    assert cache.look_up(directory, "k") is None
    assert not cache.write(directory, "k", files_of()).edited
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]
    found = cache.look_up(directory, "k")
    assert found is not None and not found.edited and found.complete() == files_of()


@pytest.mark.parametrize("edit", ["change", "remove"])
def test_edits_are_noticed_and_kept(tmp_path: Path, edit: str) -> None:
    directory = tmp_path / "program"
    cache.write(directory, "k", files_of())
    path = directory / "program.py"
    path.write_text("x = 2\n") if edit == "change" else path.unlink()
    found = cache.look_up(directory, "k")
    assert found is not None and found.edited
    assert cache.write(directory, "k", files_of()).edited
    assert path.exists() == (edit == "change") and (not path.exists() or path.read_text() == "x = 2\n")


def test_strangers_are_refused(tmp_path: Path) -> None:
    directory = tmp_path / "program"
    cache.write(directory, "k", files_of())
    with pytest.raises(RunError, match="another model, plan or version"):
        cache.look_up(directory, "other")
    (directory / PROGRAM).write_text("{")
    with pytest.raises(RunError, match="no program of weft's"):
        cache.look_up(directory, "k")


@pytest.mark.parametrize(
    ("recipe", "gist"),
    {
        "dp=2,tp=2": "dp2-tp2",
        "dp=2,zero=2": "dp2-zero2",
        "dp=2,zero=3,recompute=**": "dp2-zero3-recompute",
        "pp=2,microbatches=4": "pp2-mb4",
    }.items(),
)
def test_the_name_says_the_plan(graph, recipe: str, gist: str) -> None:
    plan = load_plan(recipe, graph)
    assert (
        cache.directory_of(Path("x"), plan, "0123456789abcdef00").name == f"{plan.graph.name}-{gist}-0123456789abcdef"
    )
