"""Schedules for pipelines that are no chain of stages, and orders that users write, on models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import weft
from tests.pieces import compile_pieces
from weft.compile.model_file import load_model_file
from weft.compile.pieces import InPieces
from weft.compile.subject import capture_subject, make_plan, make_subject
from weft.errors import PlanError
from weft.ir.graph import Graph
from weft.ir.schedule import Event, Micro, Pipeline, Schedule
from weft.order.names import make_schedule
from weft.plan.plan import Plan
from weft.plan.plan_file import read_plan, save_plan
from weft.plan.primitives import b, before, cut, f
from weft.plan.recipes.recycling import repeated
from weft.runtime.links.emulator import run_ranks
from weft.runtime.links.replicas import Replica
from weft.runtime.links.transport import Transport
from weft.runtime.training.load import load_pipeline
from weft.verify.api import verify

EXAMPLES = Path(__file__).parents[2] / "examples"
WIDTH, CLASSES, ROWS = 12, 10, 8
m = Micro()
full = partial(pytest.param, marks=pytest.mark.full)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 18), nn.Linear(18, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Words(nn.Module):
    """Words in, words out; the head is the table."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.table.weight

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.table(words)))
        return 2.0 * functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Recycled(nn.Module):
    """The same modules three times; only the last pass is trained. `prepared` runs once, before them."""

    def __init__(self, *, prepared: bool = False) -> None:
        super().__init__()
        self.prepare = nn.Linear(6, 6) if prepared else nn.Identity()
        self.enter, self.back = nn.Linear(6, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def trunk(self, x: Tensor, state: Tensor) -> Tensor:
        state = self.enter(x) + self.back(state)
        for block in self.blocks:
            state = block(state)
        return state

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x, state = self.prepare(x), torch.zeros(x.shape[0], WIDTH)
        with torch.no_grad():
            for _ in range(2):
                state = self.trunk(x, state)
        return functional.cross_entropy(self.head(self.trunk(x, state)), labels)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.second(torch.tanh(self.first(x))), labels)


def words() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Words(), (torch.randint(CLASSES, (ROWS, 4)), torch.randint(CLASSES, (ROWS, 4)))


def rows(model: Callable[[], nn.Module] = Chain) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return model(), (torch.randn(ROWS, 6), torch.randint(CLASSES, (ROWS,)))


def compiled(model: nn.Module, example: object, plan: str | Callable[[Graph], Plan]) -> InPieces:
    subject = make_subject(model, example)
    made = make_plan(plan, capture_subject(subject), subject, None)
    return compile_pieces(subject, made, partial(make_plan, plan, subject=subject, devices=None))


def two_stages(graph: Graph, *, first: tuple[int, ...] = (0,), second: tuple[int, ...] = (1,)) -> Plan:
    """Stages `a` and `b` of a Chain, 4 micro-batches."""
    plan = Plan(graph, len(first) + len(second))
    at = next(number for number, op in enumerate(graph.ops) if op.path == "second")
    plan = plan.stage("a", [op.name for op in graph.ops[:at]], first)
    return plan.stage("b", [op.name for op in graph.ops[at:]], second).cut_batch(4)


# --- interlaced -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [full("pp=4"), "pp=2,tp=2", full("pp=2,dp=2")])
def test_vocabulary_on_all_devices_interlaced(plan: str) -> None:
    result = verify(*words(), plan=f"{plan},schedule=interlaced,microbatches=4")
    assert result.equal, result
    everywhere = [one["name"] for one in result.summary["pieces"] if len(one["devices"]) == 4]
    assert everywhere == ["table", "head"]


@pytest.mark.full
def test_gpt_interlaced_with_four_stages() -> None:
    result = verify(EXAMPLES / "gpt.py", plan="pp=4,schedule=interlaced,microbatches=4")
    assert result.equal, result


def test_interlaced_weaves_shared_blocks_and_divides_their_work() -> None:
    made = compiled(*words(), "pp=4,schedule=interlaced,microbatches=8")
    parts = {part.piece.segment.name: part for part in made.sizes[0].parts}
    assert [part.piece.segment.devices for part in parts.values()] == [
        (0, 1, 2, 3),
        (0,),
        (1,),
        (2,),
        (3,),
        (0, 1, 2, 3),
    ]
    for name in ("table", "head"):
        held = parts[name].program.stored["table.weight"]
        assert [role.kind for role in held.roles] == ["split"]
    for row in made.schedule.events.values():
        heads = [at for at, event in enumerate(row) if event.segment == "head" and event.phase == "f"]
        inner = {event.segment for event in row[heads[2] : heads[3]]}
        assert len(inner) > 1, "between two heads a device works for its stage"


def test_interlaced_without_a_vocabulary_is_refused() -> None:
    class Regression(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(Block(), Block())

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x).square().mean()

    with pytest.raises(PlanError, match="has no classes of a loss that can be cut into 2 parts") as error:
        verify(Regression(), (torch.randn(4, WIDTH),), plan="pp=2,schedule=interlaced")
    assert "1f1b" in error.value.remedy


# --- recycling ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prepared", "plan"),
    [
        (False, "pp=2,tp=2"),
        *(full(False, plan) for plan in ("pp=4", "pp=2,stages=blocks.1")),
        *(full(True, plan) for plan in ("pp=4", "pp=2,tp=2", "pp=2,stages=blocks.1")),
    ],
)
def test_recycling_passes_under_nf1b(plan: str, prepared: bool) -> None:
    model, example = rows(partial(Recycled, prepared=prepared))
    result = verify(model, example, plan=f"{plan},schedule=nf1b,microbatches=4")
    assert result.equal, result


@pytest.mark.full
def test_evoformer_with_three_passes() -> None:
    subject = load_model_file(EXAMPLES / "models" / "evoformer.py")
    tokens, labels, bins = (torch.cat((one, one.flip(0))) for one in subject.example)
    result = verify(subject.model, (tokens, labels, bins), plan="pp=4,schedule=nf1b,microbatches=4")
    assert result.equal, result
    assert [one["devices"] for one in result.summary["pieces"]] == [(0,), (1,), (2,), (3,)] * 3


def test_stages_of_every_pass_live_together() -> None:
    made = compiled(*rows(Recycled), "pp=3,schedule=nf1b,microbatches=4")
    segments = made.pipeline.segments
    assert [one.devices[0] for one in segments] == [0, 1, 2] * 3
    assert [one.trains for one in segments] == [False] * 6 + [True] * 3
    assert segments[3].reads == (segments[2].name,), "the first stage of a pass reads the last of the one before"
    weights = [{op.path for op in part.piece.ops} for part in made.sizes[0].parts]
    assert weights[0] == weights[3] == weights[6] and weights[1] == weights[4] == weights[7]


def test_passes_on_one_device_read_one_weight(tmp_path: Path) -> None:
    made = compiled(*rows(Recycled), "pp=3,schedule=nf1b,microbatches=4")
    assert not made.sizes[0].ties
    for name, content in made.files().items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)

    def load(transport: Transport) -> tuple[int, int]:
        rank = load_pipeline(tmp_path, Replica(transport, transport.num_ranks))
        held = {id(parameter) for module in rank.modules for parameter in module.parameters()}
        return len(held), sum(len(list(module.trained())) for module in rank.modules)

    found = run_ranks(3, load)
    assert all(held == trained for held, trained in found)
    assert sum(held for held, _ in found) == len(list(Recycled().parameters()))


def test_passes_are_trained_as_on_one_device() -> None:
    def losses(plan: str) -> list[float]:
        model, batch = rows(Recycled)
        parallel = weft.parallelize(model, batch, plan, emulate=True, cache=None)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.5)
        return [parallel.train_step(batch, optimizer).item() for _ in range(3)]

    assert losses("pp=3,schedule=nf1b,microbatches=4") == pytest.approx(losses("microbatches=4"), rel=1e-4)


def test_repeats_are_found_in_words() -> None:
    found = repeated("xyabcabcabcz", 2)
    assert found is not None and (found.start, found.length, found.count) == (2, 3, 3)
    assert repeated("abcdef", 1) is None
    assert repeated("aabbcc", 2) is None


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        ("pp=2,schedule=nf1b", "no run of at least 2 operators"),
        ("pp=2,schedule=nf1b,virtual=2", "one stage on each set of devices"),
    ],
)
def test_nf1b_without_passes_is_refused(plan: str, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        verify(*rows(), plan=plan)


def test_a_stage_that_begins_outside_the_passes_is_refused() -> None:
    with pytest.raises(PlanError, match="none of the modules that run again"):
        verify(*rows(Recycled), plan="pp=2,stages=head,schedule=nf1b")


# --- stages of different sizes --------------------------------------------------------------------------------------


def test_a_stage_cut_in_two_before_one_that_is_whole() -> None:
    def plan(graph: Graph) -> Plan:
        made = two_stages(graph, first=(0, 1), second=(2,))
        return made.trans(made.match("first", op="linear"), cut("n", 2, axis="tp"))

    result = verify(*rows(), plan=plan)
    assert result.equal, result


def test_from_three_devices_to_two() -> None:
    def plan(graph: Graph) -> Plan:
        made = two_stages(graph, first=(4, 2, 0), second=(1, 3))
        made = made.trans(made.match("first", op="linear"), cut("n", 3, axis="three"))
        return made.trans(made.match("second", op="linear"), cut("k", 2, axis="two"))

    result = verify(*rows(), plan=plan)
    assert result.equal, result
    assert [one["devices"] for one in result.summary["pieces"]] == [(0, 2, 4), (1, 3)]


def _cut_layers(plan: Plan, layers: str, degree: int) -> Plan:
    """Heads and hidden units of some layers of a Llama."""
    for names, way in (("[qkvg]*_proj", "n"), ("up_proj", "n"), ("o_proj", "k"), ("down_proj", "k")):
        linears = plan.match(f"model.layers.{layers}.**.{names}", op="linear")
        plan = plan.trans(linears, cut(way, degree, axis=f"tp{degree}"))
    return plan


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_from_two_ways_of_tensor_parallelism_to_four(schedule: str) -> None:
    def plan(graph: Graph) -> Plan:
        at = next(number for number, op in enumerate(graph.ops) if op.path.startswith("model.layers.1"))
        made = _cut_layers(_cut_layers(Plan(graph, 6), "0", 2), "1", 4)
        made = made.stage("two", [op.name for op in graph.ops[:at]], (0, 1))
        return made.stage("four", [op.name for op in graph.ops[at:]], (2, 3, 4, 5)).cut_batch(4).order(schedule)

    result = verify(EXAMPLES / "models" / "llama.py", plan=plan)
    assert result.equal, result
    assert [one["devices"] for one in result.summary["pieces"]] == [(0, 1), (2, 3, 4, 5)]


# --- orders that users write ----------------------------------------------------------------------------------------


def test_relations_are_completed() -> None:
    def plan(graph: Graph) -> Plan:
        return two_stages(graph).order(before(f("a", m + 1), b("a", m)), before(b("b", m), f("b", m + 1)))

    result = verify(*rows(), plan=plan)
    assert result.equal, result
    made = compiled(*rows(), plan)
    row = [event for event in made.schedule.events[0] if event.phase != "w"]
    for micro in range(3):
        first, second = made.pipeline.segments[0].name, made.pipeline.segments[1].name
        assert row.index(Event("f", first, micro + 1)) < row.index(Event("b", first, micro))
        last = made.schedule.events[1]
        assert last.index(Event("b", second, micro)) < last.index(Event("f", second, micro + 1))


def test_events_of_every_device_as_text() -> None:
    text = {0: "F0 F1 F2 F3 B3 B2 B1 B0", 1: "F0 F1 F2 F3 B3 B2 B1 B0(b)"}
    made = compiled(*rows(), lambda graph: two_stages(graph).order(text))
    assert [f"{event.phase}{event.micro}" for event in made.schedule.events[1]][-4:] == ["b3", "b2", "b1", "b0"]
    result = verify(*rows(), plan=lambda graph: two_stages(graph).order(text))
    assert result.equal, result


def test_rows_of_text_are_written_to_plan_files(tmp_path: Path) -> None:
    text = {0: "F0 F1 F2 F3 B0 B1 B2 B3", 1: "F0 B0 F1 B1 F2 B2 F3 B3"}
    subject = make_subject(*rows())
    plan = two_stages(capture_subject(subject)).order(text)
    save_plan(plan, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml", plan.graph).schedule == text


def test_events_by_stage_and_a_function_of_the_pipeline() -> None:
    def by_stage(pipeline: Pipeline) -> Schedule:
        row = [[Event(phase, name, micro) for phase in "fb" for micro in range(4)] for name in "ab"]
        return Schedule({0: tuple(row[0]), 1: tuple(row[1])})

    def gpipe(pipeline: Pipeline) -> Schedule:
        return make_schedule("gpipe", pipeline)

    made = [compiled(*rows(), partial(_ordered, how)) for how in (by_stage, gpipe, "gpipe")]
    assert made[0].schedule == made[1].schedule == made[2].schedule


def _ordered(how: object, graph: Graph) -> Plan:
    return two_stages(graph).order(how)  # type: ignore[arg-type]


def test_a_block_inside_a_stage_has_events_of_its_own() -> None:
    def plan(graph: Graph) -> Plan:
        made = two_stages(graph)
        made = made.block("first", [op.name for op in graph.ops if op.path == "first"])
        return made.order(before(f("first", m + 1), f("a", m)))

    made = compiled(*rows(), plan)
    assert len(made.pipeline.on(0)) == 2
    linear, rest = (one.name for one in made.pipeline.on(0))
    row = made.schedule.events[0]
    assert all(row.index(Event("f", linear, at + 1)) < row.index(Event("f", rest, at)) for at in range(3))
    result = verify(*rows(), plan=plan)
    assert result.equal, result


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({0: "F0 F1 F2 F3 B0 B1 B2 B3", 1: "F0 B0"}, "device 1 never runs"),
        ({0: "F0 B0 F1 B1 F2 B2 F3 B3", 1: "F1 B1 F0 B0 F2 B2 F3 B3"}, "contradicts the data"),
        ({0: "F0 X1", 1: "F0"}, "'X1' is no event"),
        ({0: "F0(c)", 1: "F0"}, "no stage is called 'c'"),
        (7, "7 is no order of events"),
        (lambda pipeline: 3, "returned a int"),
        ("2f2b", "no schedule is called '2f2b'"),
    ],
)
def test_orders_that_do_not_fit_are_refused(how: object, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        compiled(*rows(), partial(_ordered, how))


def test_relations_that_do_not_fit_are_refused() -> None:
    def said(*relations: object) -> Callable[[Graph], Plan]:
        return lambda graph: two_stages(graph).order(*relations)  # type: ignore[arg-type]

    with pytest.raises(PlanError, match="no block or stage is called 'c'"):
        compiled(*rows(), said(before(f("c", m), b("a", m))))
    with pytest.raises(PlanError, match="contradict"):
        compiled(*rows(), said(before(b("a", m), f("b", m))))
    with pytest.raises(PlanError, match="there are 4 micro-batches"):
        compiled(*rows(), said(before(f("a", 7), b("a", 1))))


def test_a_schedule_that_breaks_a_relation_is_refused() -> None:
    def plan(graph: Graph) -> Plan:
        return two_stages(graph).order("gpipe").order(before(b("b", m), f("b", m + 1)))

    with pytest.raises(PlanError, match="the plan asks for"):
        compiled(*rows(), plan)
