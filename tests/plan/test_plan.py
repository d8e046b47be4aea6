"""Primitives: what they record, what they refuse and why, and that asking first answers the same."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import Tensor, nn

from tests.plan.graphs import gpt_graph, layers, odd_graph
from weft.capture import capture
from weft.errors import PlanError
from weft.ir.oplayout import Copied, Cut, cut_table
from weft.plan import AxisUse, Micro, Plan, Selection, algorithm, b, before, copy, cut, f, recompute, w

GRAPH = layers()
PLAN = Plan(GRAPH, 4)
FC = PLAN.match("layers.*.fc")


def test_decisions_follow_lines() -> None:
    plan = PLAN.trans(FC, cut("b0", 2, axis="dp"), cut("n", 2, "tp")).assign(FC, [[0, 1], [2, 3]])
    plan = plan.trans("layers.0.fc", recompute()).trans("layers.[12].fc", recompute()).trans("layers.0", copy(2, "dp"))
    first, second = plan.decisions["layers.0.fc/linear"], plan.decisions["layers.1.fc/linear"]
    assert first.uses == (
        AxisUse("dp", 2, Cut("b0", (1, 1), (4,), 4)),
        AxisUse("tp", 2, Cut("n", (1, 1), (8,), 8)),
    )
    assert first.devices == (0, 1, 2, 3) and first.sizes == (2, 2)
    assert (first.recompute, second.recompute) == (0, 1)
    assert plan.decisions["layers.2.fc/linear"].recompute == 1
    assert plan.decisions["layers.0/relu"].uses == (AxisUse("dp", 2, Copied()),)
    assert "layers.1/relu" not in plan.decisions
    assert plan.axes == {"dp": 2, "tp": 2}
    assert not PLAN.decisions and len(PLAN.lines) == 0


def test_plans_with_equal_lines_are_equal() -> None:
    one = PLAN.trans(FC, cut("n", 2, "tp"))
    same = PLAN.trans(PLAN.match("**", op="linear"), cut("n", 2, "tp"))
    assert one == same and hash(one) == hash(same) and one != PLAN and one != Plan(GRAPH, 2, one.lines)
    replayed = Plan(GRAPH, 4, one.lines)
    assert replayed == one and replayed.decisions == one.decisions


def test_impossible_parts_say_where() -> None:
    for make, place in [
        (lambda: cut("n", [-1, 2]), "cut('n', [-1, 2])"),
        (lambda: cut("n", 0), "cut('n', 0)"),
        (lambda: copy(0), "copy(0)"),
        (lambda: algorithm("default", "n", []), "algorithm('default', 'n', [])"),
    ]:
        with pytest.raises(PlanError) as caught:
            make()
        assert caught.value.place == place


def test_a_single_number_has_no_dims_to_store_cut() -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scale).mean()

    with pytest.raises(PlanError, match="scale is a single number: it has no dims to cut"):
        Plan(capture(Scales(), torch.zeros(4)), 2).store("scale", cut(0, 2, "dp"))


def test_groups_units_and_shares() -> None:
    def use(transform) -> Cut:
        found = PLAN.trans("layers.0.fc", transform).decisions["layers.0.fc/linear"].uses[0].use
        assert isinstance(found, Cut)
        return found

    assert use(cut("n", 2, groups=2)) == Cut("n", (1, 1), (4, 4), 4)
    assert use(cut("n", 2, groups=[4, 2, 2])) == Cut("n", (1, 1), (4, 2, 2), 2)
    assert use(cut("n", 2, units=4)) == Cut("n", (1, 1), (8,), 4)
    assert cut_table([use(cut("n", [3, 1]))]) == (((0, 6),), ((6, 8),))
    assert cut_table([use(cut("n", [1, 0, 1]))]) == (((0, 4),), (), ((4, 8),))
    assert use(cut(1, 2)).name == use(cut(-1, 2)).name == "n" and use(cut(0, 2)).name == "b0"


def test_axis_names_are_made_up() -> None:
    plan = PLAN.trans(FC, cut("n", 2), cut("b0", 2, "a1")).trans("layers.*", copy(3))
    assert list(plan.axes) == ["a0", "a1", "a2"]


def test_one_part_is_harmless() -> None:
    graph = odd_graph()
    plan = Plan(graph, 1).trans("/sort", cut("d1", 1, "one"), copy(1, "two")).assign("/sort", 0)
    assert plan.decisions["sort"].num_cells == 1


TOLD = PLAN.trans(FC, cut("n", 2, "tp"))
PLACED = TOLD.assign(FC, [0, 1])
ODD = Plan(odd_graph(), 4)
BLOCK = PLAN.block("a", "layers.0.**")
m = Micro()

REFUSED: list[tuple[Callable[[], object], Callable[[], object], str, str, str]] = [
    (
        lambda: PLAN.trans(FC, cut("h", 2)),
        lambda: PLAN.can_trans(FC, cut("h", 2)),
        "aten.linear has names b0 k n, not 'h'",
        "model.py:1",
        "can be cut: b0 k n",
    ),
    (
        lambda: ODD.trans("/sort", cut("d1", 2)),
        lambda: ODD.can_trans("/sort", cut("d1", 2)),
        "'d1' of aten.sort may not be cut",
        "graphs.py:",
        "can be cut: d0",
    ),
    (
        lambda: PLAN.trans(FC, cut("n", 9)),
        lambda: PLAN.can_trans(FC, cut("n", 9)),
        "cannot cut n of size 8 (8 units) into 9 parts",
        "model.py:1",
        "at most 8",
    ),
    (
        lambda: PLAN.trans(FC, cut("n", 4, groups=[4, 4], units=2)),
        lambda: PLAN.can_trans(FC, cut("n", 4, groups=[4, 4], units=2)),
        "cannot cut n of size 8 (2 units) into 4 parts",
        "model.py:1",
        "at most 2",
    ),
    (
        lambda: PLAN.trans(FC, cut("n", 2, groups=3)),
        lambda: PLAN.can_trans(FC, cut("n", 2, groups=3)),
        "n of size 8 is not 3 equal groups",
        "model.py:1",
        "divides",
    ),
    (
        lambda: PLAN.trans(FC, cut("n", 2, groups=[4, 2])),
        lambda: PLAN.can_trans(FC, cut("n", 2, groups=[4, 2])),
        "groups [4, 2] do not add up to n of size 8",
        "model.py:1",
        "every group",
    ),
    (
        lambda: PLAN.trans(FC, cut("n", 2, units=3)),
        lambda: PLAN.can_trans(FC, cut("n", 2, units=3)),
        "not 3 whole units",
        "model.py:1",
        "divides every group",
    ),
    (
        lambda: PLAN.trans(FC, cut("n", 2, "tp"), copy(2, "tp")),
        lambda: PLAN.can_trans(FC, cut("n", 2, "tp"), copy(2, "tp")),
        "axis 'tp' is on layers.0.fc/linear already",
        "model.py:1",
        "another axis name",
    ),
    (
        lambda: TOLD.trans("layers.0.fc", cut("b0", 2, "tp")),
        lambda: TOLD.can_trans("layers.0.fc", cut("b0", 2, "tp")),
        "cut b0 2 (tp) contradicts it",
        "model.py:1",
        "drop one of the lines",
    ),
    (
        lambda: TOLD.trans("layers.0", copy(4, "tp")),
        lambda: TOLD.can_trans("layers.0", copy(4, "tp")),
        "axis 'tp' has 2 parts elsewhere in the plan, here 4",
        "copy 4 (tp)",
        "another axis name",
    ),
    (
        lambda: TOLD.trans(FC, cut("n", 2, "co", units=4)),
        lambda: TOLD.can_trans(FC, cut("n", 2, "co", units=4)),
        "axis 'tp' cuts n in 8 units",
        "model.py:1",
        "same groups and units",
    ),
    (
        lambda: TOLD.trans(FC, cut("n", 5, "co")),
        lambda: TOLD.can_trans(FC, cut("n", 5, "co")),
        "into 10 parts (2 nested axes)",
        "model.py:1",
        "at most 8",
    ),
    (
        lambda: PLACED.trans(FC, copy(2, "dp")),
        lambda: PLACED.can_trans(FC, copy(2, "dp")),
        "was assigned 2 devices before copy 2 (dp)",
        "model.py:1",
        "transform first",
    ),
    (
        lambda: PLAN.trans(FC, recompute()).trans(FC, recompute()),
        lambda: PLAN.trans(FC, recompute()).can_trans(FC, recompute()),
        "is recomputed already",
        "model.py:1",
        "once",
    ),
    (
        lambda: PLAN.trans(FC),
        lambda: PLAN.can_trans(FC),
        "no transform",
        "",
        "cut(...)",
    ),
    (
        lambda: PLAN.trans("nowhere", copy(2)),
        lambda: PLAN.can_trans("nowhere", copy(2)),
        "nowhere matches no op",
        "",
        "",
    ),
    (
        lambda: PLAN.trans(FC, algorithm("default", "n", 2)),
        lambda: PLAN.can_trans(FC, algorithm("default", "n", 2)),
        "no algorithm cuts 'n' of aten.linear",
        "model.py:1",
        "use cut()",
    ),
    (
        lambda: PLAN.trans(FC, cut(2, 2)),
        lambda: PLAN.can_trans(FC, cut(2, 2)),
        "dim 2 is not among the 2 dims",
        "model.py:1",
        "b0 k n",
    ),
    (
        lambda: TOLD.assign(FC, [0, 4]),
        lambda: TOLD.can_assign(FC, [0, 4]),
        "device 4 does not exist: the plan has devices 0 to 3",
        "layers.*.fc",
        "existing devices",
    ),
    (
        lambda: TOLD.assign(FC, [0, 1, 2]),
        lambda: TOLD.can_assign(FC, [0, 1, 2]),
        "3 devices do not fit the grid of layers.0.fc/linear: tp=2",
        "model.py:1",
        "give 2 devices",
    ),
    (
        lambda: TOLD.trans(FC, copy(3, "x")).assign(FC, [[0, 1], [2, 3], [0, 1]]),
        lambda: TOLD.trans(FC, copy(3, "x")).can_assign(FC, [[0, 1], [2, 3], [0, 1]]),
        "3x2 devices do not fit the grid",
        "model.py:1",
        "",
    ),
    (
        lambda: PLAN.assign(FC, [0, 1]),
        lambda: PLAN.can_assign(FC, [0, 1]),
        "no axes (one cell)",
        "model.py:1",
        "transform ops before assigning",
    ),
    (
        lambda: PLACED.assign(FC, [1, 0]),
        lambda: PLACED.can_assign(FC, [1, 0]),
        "was assigned devices (0, 1) before and (1, 0) now",
        "model.py:1",
        "once",
    ),
    (
        lambda: PLAN.assign(FC, [[0, 1], [2]]),
        lambda: PLAN.can_assign(FC, [[0, 1], [2]]),
        "do not form a grid",
        "",
        "equal length",
    ),
    (
        lambda: PLAN.assign(FC, "0"),
        lambda: PLAN.can_assign(FC, "0"),
        "is no device",
        "",
        "",
    ),
    (
        lambda: PLAN.store("layers.*.fc.weight", cut("n", 2)),
        lambda: PLAN.can_store("layers.*.fc.weight", cut("n", 2)),
        "cannot say how layers.0.fc.weight is stored",
        "line 1",
        "by its number",
    ),
    (
        lambda: PLAN.store("layers.*.fc.weight", cut(2, 2)),
        lambda: PLAN.can_store("layers.*.fc.weight", cut(2, 2)),
        "has 2 dims [8, 8], not dim 2",
        "line 1",
        "from 0",
    ),
    (
        lambda: PLAN.store("layers.*.fc.weight", cut(0, 9)),
        lambda: PLAN.can_store("layers.*.fc.weight", cut(0, 9)),
        "cannot cut dim 0 of layers.0.fc.weight of size 8",
        "line 1",
        "",
    ),
    (
        lambda: PLAN.store("layers.**", cut(0, 2)).store("layers.1.**", cut(1, 2)),
        lambda: PLAN.store("layers.**", cut(0, 2)).can_store("layers.1.**", cut(1, 2)),
        "layers.1.fc.weight is stored twice",
        "line 2",
        "line 1",
    ),
    (
        lambda: BLOCK.block("b", "layers.0/relu"),
        lambda: BLOCK.can_block("b", "layers.0/relu"),
        "layers.0/relu is in block 'a' already",
        "layers.0/relu",
        "one block",
    ),
    (
        lambda: BLOCK.order(before(f("a", m), b("z", m))),
        lambda: BLOCK.can_order(before(f("a", m), b("z", m))),
        "no block or stage is called 'z'",
        "f(a, m) before b(z, m)",
        "stages: a",
    ),
    (
        lambda: BLOCK.order(before(f("a", m + 1), b("a", m)), before(b("a", m), f("a", m + 1))),
        lambda: BLOCK.can_order(before(f("a", m + 1), b("a", m)), before(b("a", m), f("a", m + 1))),
        "contradicts",
        "order",
        "drop one",
    ),
]


@pytest.mark.parametrize(("act", "ask", "message", "place", "remedy"), REFUSED, ids=[row[2][:40] for row in REFUSED])
def test_refused_with_value_place_and_remedy(act, ask, message: str, place: str, remedy: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)) as caught:
        act()
    assert place in caught.value.place and remedy in caught.value.remedy
    verdict = ask()
    assert not verdict and message in verdict.reason


@pytest.mark.parametrize(
    "make",
    [
        lambda: cut("n", 0),
        lambda: cut("n", -2),
        lambda: cut("n", True),
        lambda: cut("n", []),
        lambda: cut("n", [0, 0]),
        lambda: cut("n", [1, -1]),
        lambda: cut("n", 2, "not a name"),
        lambda: copy(0),
        lambda: algorithm("ring", "n", 2),
        lambda: before(f("a", 0), b("a", m)),
        lambda: before(b("a", m), f("a", m)),
        lambda: before(f("a", m), f("a", m)),
        lambda: f("a", -1),
        lambda: Plan(GRAPH, 0),
    ],
)
def test_impossible_arguments(make: Callable[[], object]) -> None:
    with pytest.raises(PlanError):
        make()


def test_asking_changes_nothing() -> None:
    assert PLAN.can_trans(FC, cut("n", 2, "tp")) and TOLD.can_assign(FC, [3, 0]) and BLOCK.can_block("b", "layers.1")
    assert PLAN.can_store("layers.**", cut(0, 2, "tp")) and PLAN.can_store("layers.**", state=cut(1, 2, "tp"))
    assert not PLAN.can_store("layers.**", cut(0, 2, "tp"), state=cut(1, 2, "tp"))
    assert not PLAN.can_store("layers.**", grad=cut(0, 2, "tp"), state=cut(1, 2, "tp"))
    assert BLOCK.can_order(before(f("a", m + 2), b("a", m)), before(b("a", 0), w("a", 0)))
    assert not PLAN.lines


def test_devices_may_be_any_nesting() -> None:
    plan = TOLD.trans(FC, copy(2, "dp"))
    for devices in ([0, 1, 2, 3], [[0, 1], [2, 3]], numpy.arange(4).reshape(2, 2), ((0, 1), (2, 3))):
        assert plan.assign(FC, devices).decisions["layers.0.fc/linear"].devices == (0, 1, 2, 3)
    assert PLAN.assign(FC, 3).decisions["layers.0.fc/linear"].devices == (3,)
    again = plan.assign(FC, [0, 0, 1, 1])
    assert again.assign(FC, [0, 0, 1, 1]).decisions == again.decisions


def test_stores_blocks_orders() -> None:
    plan = PLAN.store("layers.*.fc.weight", cut(-2, 4, axis="dp"))
    store = plan.stores["w1"]
    assert store.uses == store.updated == (AxisUse("dp", 4, Cut("0", (1, 1, 1, 1), (8,), 8)),) and not store.kept
    plan = plan.block("a", "layers.0.**").order(before(f("a", m + 2), b("a", m)))
    assert isinstance(plan.blocks["a"], Selection) and len(plan.blocks["a"]) == 2
    assert str(plan.orders[0]) == "f(a, m+2) before b(a, m)"
    only_state = PLAN.store("layers.**", state=[cut(0, 2, "dp"), copy(2, "x")]).stores["w0"]
    assert only_state.uses == () and only_state.kept and not only_state.reduced
    assert [one.axis for one in only_state.updated] == ["dp", "x"]
    assert PLAN.store("layers.**", grad=cut(0, 2, "dp"), state=cut(0, 2, "dp")).stores["w0"].reduced


def test_prints_folded_by_layer() -> None:
    text = str(PLACED.trans("layers.0", cut("d1", [3, 1], "tp")).block("a", "layers.0.**"))
    assert text.splitlines() == [
        "plan of Layers for 4 devices: tp=2",
        "  layers.*.fc/linear   cut n 2 (tp)   devices 0 1",
        "  layers.0/relu        cut d1 [3, 1] (tp)",
        "  block a   layers.0.**",
        "  2 of 6 ops follow their neighbours",
    ]


def test_an_algorithms_name_is_cut_either_way() -> None:
    plain = ODD.trans("/softmax", cut("d1", 2, "tp"))
    assert plain.decisions == ODD.trans("/softmax", algorithm("default", "d1", 2, "tp")).decisions


def test_many_lines_on_a_real_graph() -> None:
    plan = Plan(gpt_graph(), 2)
    for op in plan.graph.ops:
        for name in plan.rule(op).cuttable:
            verdict = plan.can_trans(op, cut(name, 2, "tp"))
            assert bool(verdict) == (plan.rule(op).sizes[name] >= 2), verdict.reason
