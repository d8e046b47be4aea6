"""Plans from recipe strings, Python functions and plan files; what is refused and how."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from tests.plan.graphs import gpt_graph, grouped_graph, layers, odd_graph
from weft.errors import PlanError
from weft.plan import Micro, Plan, algorithm, b, before, copy, cut, f, load_plan, recompute, save_plan, tp
from weft.plan.recipes.text import parse_recipe

GRAPH = layers()


def test_recipe_strings() -> None:
    recipe = parse_recipe(" dp = 2, tp=3,coshard=2 ,recompute=layers.*")
    assert (recipe.dp, recipe.tp, recipe.coshard, recipe.recompute, recipe.devices) == (2, 3, 2, "layers.*", 6)
    assert load_plan("dp=2,tp=2", GRAPH).devices == 4
    assert load_plan("dp=1", GRAPH).lines == ()
    assert load_plan("tp=2", GRAPH, 2) == tp(Plan(GRAPH, 2), 2)


def test_field_of_the_wrong_kind(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    save_plan(tp(Plan(GRAPH, 2), 2), file)
    content = yaml.safe_load(file.read_text())
    for key, value, kind in (("devices", "two", "whole number"), ("lines", 3, "list")):
        file.write_text(yaml.safe_dump(content | {key: value}))
        with pytest.raises(PlanError, match=f"'{key}' is {value!r}, which is no {kind}"):
            load_plan(str(file), GRAPH)


def test_recipe_that_recomputes_nothing_says_where() -> None:
    with pytest.raises(PlanError, match="matches no op") as caught:
        load_plan("tp=2,recompute=block", GRAPH)
    assert caught.value.place == "recipe setting recompute=block"


@pytest.mark.parametrize(
    ("text", "message", "remedy"),
    [
        ("dq=2", "'dq' is no setting", "did you mean 'dp'"),
        ("dp=2,dp=2", "dp is set twice", "once"),
        ("dp", "dp has no value", "dp=..."),
        ("dp=", "dp has no value", "dp=..."),
        ("dp=two", "dp=two is no degree", "whole number"),
        ("dp=0", "dp=0 is no degree", "at least 1"),
        ("tp=-1", "tp=-1 is no degree", "at least 1"),
        ("dp=2,", "a setting is empty", "available: dp, tp"),
        ("cp=2", "cp is not available in this version", "available: dp, tp"),
        ("dp=2,zero=4", "zero=4 is no stage", "zero=1, zero=2 or zero=3"),
        ("dp=2,zero", "zero has no value", "zero=..."),
        ("zero=3", "there is no dp", "dp=2,zero=3"),
        ("tp=2,zero=3", "there is no dp", "write dp=2,tp=2,zero=3"),
        ("pp=2,zero=2,recompute,microbatches=4", "there is no dp", "dp=2,zero=2,recompute,pp=2,microbatches=4"),
        ("megatron", "megatron has no number of parts", "megatron=2"),
        ("megatron=none", "megatron=none is no degree", "whole number"),
        ("tp=2,megatron=4", "tp=2 and megatron=4 both say", "tp=2,megatron or megatron=4"),
        ("dp=2,tp=2,megatron=4", "tp=2 and megatron=4 both say", "dp=2,tp=2,megatron or dp=2,megatron=4"),
        ("dp=2,megatron,sp", "megatron has no number", "dp=2,megatron=2,sp, or dp=2,tp=2,megatron,sp"),
        ("dp=2,schedule=1f1b", "there is no pp", "write dp=2,pp=2,schedule=1f1b"),
        ("sp", "neither tp nor megatron", "tp=2,sp"),
        ("dp=2,sp", "neither tp nor megatron", "write dp=2,tp=2,sp or dp=2,megatron=2,sp"),
        ("tp=2,sp=2", "sp=2: sp takes no value", "write sp"),
        ("tp=2,sp,sp", "sp is set twice", "once"),
        ("tp=2,recompute=selective", "recompute=selective is not available", "pattern"),
        ("megatorn=2", "'megatorn' is no setting", "did you mean 'megatron'"),
        ("", "the plan is empty", "recipe string"),
    ],
)
def test_refused_recipes(text: str, message: str, remedy: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        load_plan(text, GRAPH)
    assert remedy in caught.value.remedy


def test_device_arithmetic() -> None:
    with pytest.raises(PlanError, match=r"dp=2 \* tp=2 = 4 devices, but 8 were asked for"):
        load_plan("dp=2,tp=2", GRAPH, 8)


# --- functions ------------------------------------------------------------------------------------------------------

PLANS = """
from weft.plan import Plan, cut

def good(plan):
    return plan.trans("layers.0.fc", cut("n", plan.devices, "tp"))

def graph_and_devices(graph, devices):
    return good(Plan(graph, devices))

def nothing(plan):
    pass

def breaks(plan):
    return plan.no_such_primitive

def refuses(plan):
    return plan.trans("layers.0.fc", cut("q", 2))

def other(plan):
    return Plan(plan.graph, plan.devices + 1)

def three(a, b, c):
    pass
"""


@pytest.fixture
def plans(tmp_path: Path) -> Path:
    path = tmp_path / "plans.py"
    path.write_text(PLANS)
    return path


def test_functions(plans: Path) -> None:
    expected = Plan(GRAPH, 2).trans("layers.0.fc", cut("n", 2, "tp"))
    assert load_plan(f"{plans}:good", GRAPH, 2) == expected
    assert load_plan(f"{plans}:graph_and_devices", GRAPH, 2) == expected


@pytest.mark.parametrize(
    ("function", "devices", "message"),
    [
        ("missing", 2, "has no function 'missing'"),
        ("good", None, "does not say how many devices"),
        ("nothing", 2, "returned NoneType, not a Plan"),
        ("other", 2, "for 3 devices, but 2 were asked for"),
        ("three", 2, "cannot be called with a plan"),
        ("refuses", 2, "has names b0 k n, not 'q'"),
    ],
)
def test_refused_functions(plans: Path, function: str, devices: int | None, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        load_plan(f"{plans}:{function}", GRAPH, devices)


def test_errors_of_user_code_keep_their_cause(plans: Path) -> None:
    with pytest.raises(PlanError, match="raised AttributeError") as caught:
        load_plan(f"{plans}:breaks", GRAPH, 2)
    assert isinstance(caught.value.__cause__, AttributeError)
    assert "line 14 of plans.py" in caught.value.place
    plans.write_text("import nothing_of_the_sort")
    with pytest.raises(PlanError, match="nothing_of_the_sort") as caught:
        load_plan(f"{plans}:good", GRAPH, 2)
    assert isinstance(caught.value.__cause__, ImportError)
    plans.write_text("def good(plan:")
    with pytest.raises(PlanError, match="SyntaxError"):
        load_plan(f"{plans}:good", GRAPH, 2)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="there is no file"):
        load_plan(f"{tmp_path}/no.py:plan", GRAPH, 2)
    with pytest.raises(PlanError, match="names no function"):
        load_plan(f"{tmp_path}/no.py", GRAPH, 2)
    with pytest.raises(PlanError, match="there is no plan file"):
        load_plan(f"{tmp_path}/no.yaml", GRAPH)


# --- files ----------------------------------------------------------------------------------------------------------


def everything() -> Plan:
    m = Micro()
    plan = Plan(GRAPH, 4).trans("layers.*.fc", cut("n", [3, 1], "tp", groups=[4, 4], units=4), cut("b0", 2))
    plan = plan.assign(plan.match(op="linear"), [[0, 1], [2, 3]])
    plan = plan.trans(plan.match("**") - plan.match("layers.*.fc"), copy(2, "dp"), recompute())
    plan = plan.trans(["layers.0.fc/linear", "layers.1.fc"], recompute())
    rows = cut(0, 2, "dp")
    plan = plan.store("layers.0.**", state=[rows]).store("layers.1.**", grad=rows, state=rows)
    plan = plan.store("layers.2.*.*", copy(2, "dp"))
    plan = plan.block("a", "layers.0.** | layers.1/relu").block("b b", "layers.2.**")
    return plan.order(before(f("a", m + 2), b("a", m)), before(f("a", 3), f("b b", 3)))


@pytest.mark.parametrize(
    "plan",
    [
        everything(),
        Plan(GRAPH, 1),
        Plan(odd_graph(), 2).trans("act@1", copy(2)).trans("/softmax", algorithm("default", "d1", 2, "tp")),
        *(load_plan(recipe, gpt_graph()) for recipe in ("dp=3", "tp=4", "dp=2,tp=2", "dp=2,coshard=2")),
        load_plan("tp=2,recompute=transformer.h.*", gpt_graph()),
        load_plan("tp=4", grouped_graph()),
    ],
    ids=lambda plan: f"{plan.graph.name}-{len(plan.lines)}",
)
def test_round_trip(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    save_plan(plan, path)
    loaded = load_plan(str(path), plan.graph)
    assert loaded == plan and loaded.decisions == plan.decisions and str(loaded) == str(plan)
    assert loaded.stores == plan.stores and loaded.orders == plan.orders and loaded.blocks == plan.blocks
    save_plan(loaded, path)
    assert load_plan(str(path), plan.graph) == plan
    assert [one.name for one in tmp_path.iterdir()] == ["plan.yaml"]


def test_files_are_addressed_by_wildcard(tmp_path: Path) -> None:
    save_plan(load_plan("tp=2", gpt_graph()), tmp_path / "plan.yaml")
    lines = yaml.safe_load((tmp_path / "plan.yaml").read_text())["lines"]
    assert {"trans": "transformer.h.*.attn.c_attn/linear", "do": [_fused()]} in lines
    assert not any(".0." in str(line) for line in lines)


def _fused() -> dict[str, object]:
    return {"cut": "n", "parts": 2, "axis": "tp", "groups": 3, "units": 4}


def test_a_plan_for_another_model(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    save_plan(Plan(GRAPH, 2).trans("layers.*.fc", cut("n", 2)), path)
    with pytest.raises(PlanError, match=r"for Layers, the model is GPT; the model has no op layers\.\*\.fc/linear"):
        load_plan(str(path), gpt_graph())
    with pytest.raises(PlanError, match=r"fc/linear was 3 x aten.linear.default -> 4x8, is 3 x .* -> 4x16"):
        load_plan(str(path), layers(width=16))
    with pytest.raises(PlanError, match=r"was 3 x .*, is 4 x"):
        load_plan(str(path), layers(num_layers=4))
    longer = dataclasses.replace(GRAPH, ops=GRAPH.ops[:1])
    save_plan(Plan(longer, 2), path)
    with pytest.raises(PlanError, match="another model"):
        load_plan(str(path), GRAPH)
    with pytest.raises(PlanError, match="for 2 devices, but 3"):
        save_plan(Plan(GRAPH, 2), path)
        load_plan(str(path), GRAPH, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not readable as YAML"),
        ("[]", "no plan file of version 1"),
        ("weft_plan: 2", "no plan file of version 1"),
        ("weft_plan: 1", "no fingerprint"),
        ("!!python/object/apply:os.system ['true']", "not readable as YAML"),
    ],
)
def test_damaged_files(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(PlanError, match=message):
        load_plan(str(path), GRAPH)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"trans": "layers.*.fc", "do": [{"cut": "q", "parts": 2, "axis": "tp"}]}, "not 'q'"),
        ({"trans": "layers.*.fc", "do": ["melt"]}, "no transform"),
        ({"trans": "layers.*.fc", "do": "recompute"}, "no list of transforms"),
        ({"trans": 3, "do": ["recompute"]}, "selects no ops"),
        ({"trans": "lairs.*.fc", "do": ["recompute"]}, "matches no op"),
        ({"dance": 1}, "no line of a plan"),
        ({"order": [[["f", "a", "m"], ["b", "a", "x"]]]}, "no event"),
        ({"order": [1]}, "relates no two events"),
    ],
)
def test_bad_lines_name_their_place(line: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    save_plan(Plan(GRAPH, 2).trans("layers.*", copy(2, "dp")), path)
    data = yaml.safe_load(path.read_text())
    data["lines"].append(line)
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(PlanError, match=message) as caught:
        load_plan(str(path), GRAPH)
    assert "line 2 of the plan" in caught.value.place


def test_saving_needs_a_directory(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no directory"):
        save_plan(Plan(GRAPH, 1), tmp_path / "none" / "plan.yaml")


def test_a_plan_is_saved_under_a_name_that_is_read(tmp_path: Path) -> None:
    for name in ("plan.json", "p.plan", "plan"):
        with pytest.raises(PlanError, match=r"end in .yaml or .yml"):
            save_plan(Plan(GRAPH, 2), tmp_path / name)
        assert not (tmp_path / name).exists()
    for text in ("plan.json", str(tmp_path / "p.plan")):
        with pytest.raises(PlanError, match=r"is no plan file: the names of plan files end in .yaml or .yml"):
            load_plan(text, GRAPH)
    save_plan(Plan(GRAPH, 2), tmp_path / "plan.yml")
    assert load_plan(str(tmp_path / "plan.yml"), GRAPH) == Plan(GRAPH, 2)
