"""What docs/plans.md and docs/expressiveness.md claim: collectives, sources, and that every plan equals one device."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from weft.compile.subject import capture_subject, make_subject
from weft.cost.links import default_links
from weft.ir.graph import Graph
from weft.lower import lower
from weft.lower.collectives import collectives
from weft.plan.load import load_plan
from weft.verify import verify

ROOT = Path(__file__).parents[2]
PLANS = ROOT / "docs" / "plans.md"
TABLE = ROOT / "docs" / "expressiveness.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| .* \| \[(\w+\.py)\]\(\.\./examples/plans/\1\) \| ([\w/]+) \| (\d) \|$", re.MULTILINE)
ROWS = ROW.findall(TABLE.read_text(encoding="utf-8"))
FENCES = FENCE.findall(PLANS.read_text(encoding="utf-8"))
CODE = [text for language, text in FENCES if language == "python"]
PRINTED = [
    (recipe, name, body.strip())
    for language, text in FENCES
    for head, _, body in [text.partition("\n")]
    for recipe, _, names in [head.partition(" on ")]
    for name in names.split(", ")
    if language == "collectives"
]
BY_HAND = {
    "data_parallel.py": "dp=4",
    "megatron.py": "megatron=4",
    "sequence_parallel.py": "megatron=4,sp",
    "zero3.py": "dp=4,zero=3",
    "recomputed.py": "dp=4,recompute",
}


SLOW = ("recycling.py",)


@cache
def graph() -> Graph:
    return capture_subject(make_subject(ROOT / "examples" / "gpt.py", None))


def measured(plan: str, links: str, devices: int | None = None) -> str:
    """The collectives that the compiler makes of a plan for examples/gpt.py."""
    return str(collectives(lower(load_plan(plan, graph(), devices), links=default_links(links))))


def test_there_is_something_to_compare() -> None:
    assert len(ROWS) >= 15 and len(PRINTED) >= 10


@pytest.mark.parametrize(("recipe", "links", "body"), PRINTED, ids=[f"{one[0]}-{one[1]}" for one in PRINTED])
def test_printed_collectives(recipe: str, links: str, body: str) -> None:
    assert measured(recipe, links) == body


@pytest.mark.parametrize("links", ["gloo", "nccl"])
@pytest.mark.parametrize(("file", "recipe"), BY_HAND.items(), ids=list(BY_HAND))
def test_by_hand_moves_what_the_recipe_does(file: str, recipe: str, links: str) -> None:
    assert measured(f"{ROOT / 'examples' / 'plans' / file}:plan", links, 4) == measured(recipe, links)


def test_printed_plans_are_those_of_the_examples() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "examples" / "plans").glob("*.py")]
    shown = [text for text in CODE if text.startswith("from weft import")]
    assert len(shown) >= 5
    assert [text for text in shown if not any(source.endswith(text) for source in sources)] == []


@pytest.mark.parametrize(
    ("file", "model", "devices"),
    # what moves as a recipe does is compared with one device as that recipe
    [pytest.param(*row, id=row[0], marks=[pytest.mark.full] * (row[0] in (*BY_HAND, *SLOW))) for row in ROWS],
)
def test_every_row_equals_one_device(file: str, model: str, devices: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    path = Path("examples") / "plans" / file
    assert path.read_text(encoding="utf-8").count("\n") <= 30
    result = verify(f"examples/{model}.py", plan=f"{path}:plan", devices=int(devices))
    assert result.equal, result


def test_every_plan_has_a_row() -> None:
    assert {path.name for path in (ROOT / "examples" / "plans").glob("*.py")} == {row[0] for row in ROWS}
