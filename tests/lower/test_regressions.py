"""Faults that random programs and seeded faults brought to light, each as small as it gets."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tests.property.harness import differences, run_program, run_single
from tests.property.sketch import Case, Sketch, ref
from weft.errors import CheckError, PlanError
from weft.ir.layout import COPY, PARTIAL, Axis, Grid, Layout
from weft.ir.oplayout import Copied, OpLayout, plain_cut
from weft.ir.program import Chunks, Compute, Give, Program, Recompute, Reshard, Step, Sync, Use
from weft.ir.routes import Routing
from weft.lower import lower
from weft.lower.check import check
from weft.lower.proof.moves import FaultError
from weft.lower.proof.ops import refuse_hanging_talk
from weft.plan.plan import Plan
from weft.plan.primitives import copy, cut
from weft.runtime.layout.execute import execute
from weft.runtime.layout.transfer import Piece, Transfer
from weft.runtime.links.transport import Doing


def layers() -> Case:
    """`sum(linear(tanh(linear(x))) * y)`."""
    sketch = Sketch(random.Random(0))
    (h,) = sketch.run(
        "aten.linear.default", ref(sketch.input((4, 4))), ref(sketch.parameter((4, 4))), ref(sketch.parameter((4,)))
    )
    (a,) = sketch.run("aten.tanh.default", ref(h))
    (o,) = sketch.run("aten.linear.default", ref(a), ref(sketch.parameter((4, 4))), None)
    (z,) = sketch.run("aten.mul.Tensor", ref(o), ref(sketch.input((4, 4))))
    (loss,) = sketch.run("aten.sum.default", ref(z))
    return sketch.finish(loss, [])


def scores() -> Case:
    """A linear layer and a cross entropy."""
    sketch = Sketch(random.Random(0))
    (s,) = sketch.run("aten.linear.default", ref(sketch.input((3, 4))), ref(sketch.parameter((4, 4))), None)
    (loss,) = sketch.run("aten.cross_entropy_loss.default", ref(s), ref(sketch.integers((3,), 4)))
    return sketch.finish(loss, [])


def changed(program: Program, old: Step, *new: Step) -> Program:
    """The program with one step replaced, on the top level or inside a loop."""
    steps: list[Step] = []
    for step in program.steps:
        if step is old:
            steps.extend(new)
        elif isinstance(step, Chunks | Recompute) and old in step.body:
            at = step.body.index(old)
            steps.append(replace(step, body=(*step.body[:at], *new, *step.body[at + 1 :])))
        else:
            steps.append(step)
    return replace(program, steps=tuple(steps))


def refused(program: Program, fact: str) -> None:
    with pytest.raises(CheckError, match=fact):
        check(program)


def test_cells_that_talk_must_have_the_same_turn() -> None:
    """Devices 1 0 / 0 1: each runs the other's part first, and both wait for ever."""
    case = scores()
    op = case.graph.ops[-1]
    plan = Plan(case.graph, 2).trans(op, cut("c", 2, "a"), copy(2, "b")).assign(op, [[1, 0], [0, 1]])
    with pytest.raises(PlanError, match="must talk"):
        lower(plan)
    layout = OpLayout(Grid((Axis("a", 2), Axis("b", 2)), (1, 0, 0, 1)), (plain_cut("c", 4, (1, 1)), Copied()))
    with pytest.raises(FaultError, match="talks"):
        refuse_hanging_talk(op, plan.rule(op), Compute(op.name, layout, op.inputs, op.outputs))


def test_two_axes_of_one_talking_name_form_one_group() -> None:
    """Along each axis the devices differ, along both together they repeat."""
    case = scores()
    op = case.graph.ops[-1]
    plan = Plan(case.graph, 2).trans(op, cut("c", 2, "a"), cut("c", 2, "b")).assign(op, [[0, 1], [1, 0]])
    with pytest.raises(PlanError, match="must talk"):
        lower(plan)


def test_sums_along_permuted_fibers_agree_to_the_last_bit() -> None:
    """Copies that different groups add up must add in the same order."""
    grid = Grid((Axis("q", 3), Axis("a", 2)), (1, 5, 3, 2, 0, 4))
    source = Layout((2,), grid, (PARTIAL, COPY), (None,))
    routing = Routing(source, Layout((2,), grid, (COPY, COPY), (None,)))
    assert [routing.group(device) for device in (0, 1, 3)] == [(1, 3, 0)] * 3
    assert [routing.group(device) for device in (2, 4, 5)] == [(5, 2, 4)] * 3


def test_transfers_leave_equal_strides() -> None:
    """Operators round otherwise on other strides: a copy that stays must lie in memory like one that came."""

    class Nobody:
        rank, num_ranks, device, doing = 0, 1, torch.device("cpu"), Doing()

    held = torch.arange(6.0).view(2, 3).t()
    whole = ((0, 3),), ((0, 2),)
    transfer = Transfer("local", (0,), (Piece(0, 0, whole),), (Piece(0, 0, whole),), ((3, 2),))
    (found,) = execute(transfer, [held], Nobody(), dtype=held.dtype)  # type: ignore[arg-type]
    assert found.is_contiguous() and torch.equal(found, held)


def test_a_bias_copied_to_every_cell_of_a_sum_is_refused() -> None:
    """Row cut: the bias belongs into one cell. The check once took a whole one in every cell for one addend."""
    case = layers()
    first = case.graph.ops[0]
    program = lower(Plan(case.graph, 2).trans(first, cut("k", 2, "tp")))
    bias = next(step for step in program.steps if isinstance(step, Use) and step.value == first.inputs[2])
    assert bias.moves
    wrong = changed(program, bias, replace(bias, moves=()))
    refused(wrong, "counted more than once")
    assert differences(run_program(wrong, case.state, case.inputs), run_single(case.graph, case.state, case.inputs))


def test_a_sync_takes_the_gradients_away() -> None:
    """A second sync of one parameter brings zeros; a source listed twice adds zeros."""
    case = layers()
    program = lower(Plan(case.graph, 2).trans(case.graph.ops[0], cut("b0", 2, "dp")))
    sync = program.syncs[0]
    refused(changed(program, sync, sync, sync), "not complete")
    twice = changed(
        program, sync, replace(sync, sources=(*sync.sources, sync.sources[0]), moves=(*sync.moves, sync.moves[0]))
    )
    check(twice)
    assert not differences(run_program(twice, case.state, case.inputs), run_single(case.graph, case.state, case.inputs))


def test_nothing_is_given_twice() -> None:
    case = layers()
    first = case.graph.ops[0]
    plan = Plan(case.graph, 1).trans(first, cut("b0", 2, "co")).assign(first, [0, 0])
    program = lower(plan)
    give = next(s for step in program.steps if isinstance(step, Chunks) for s in step.body if isinstance(s, Give))
    refused(changed(program, give, give, give), "given to one value")


def test_what_a_chunk_makes_dies_with_it() -> None:
    """Backward cannot start inside a loop, though the value there is the loss."""
    case = layers()
    end = case.graph.ops[-1]
    program = lower(Plan(case.graph, 1).trans(end, cut(summed_name(case), 2, "co")).assign(end, [0, 0]))
    inner = next(s for step in program.steps if isinstance(step, Chunks) for s in step.body if isinstance(s, Give))
    assert program.values[inner.source].tensor == case.graph.loss
    refused(replace(program, loss=inner.source), "read before it is made")


def summed_name(case: Case) -> str:
    """A name that the last op sums over."""
    return sorted(Plan(case.graph, 1).rule(case.graph.ops[-1]).summed)[0]


def test_backward_moves_must_land_where_the_value_came_from() -> None:
    """Also where nobody reads the gradient: the ranks would not even get there."""
    sketch = Sketch(random.Random(0))
    (s,) = sketch.run("aten.sin.default", ref(sketch.input((4, 4))))
    (o,) = sketch.run("aten.linear.default", ref(s), ref(sketch.parameter((4, 4))), None)
    (loss,) = sketch.run("aten.sum.default", ref(o))
    case = sketch.finish(loss, [])
    first, second, _ = case.graph.ops
    program = lower(Plan(case.graph, 2).trans(first, cut("d0", 2, "a")).trans(second, copy(2, "a")))
    reshard = next(step for step in program.steps if isinstance(step, Reshard) and step.source == s)
    assert reshard.backward is None
    refused(changed(program, reshard, replace(reshard, backward=())), "is planned")


@pytest.mark.parametrize("fault", ["no tensor", "no value", "other parameter", "no gradient", "other devices"])
def test_the_check_ends_in_a_check_error(fault: str) -> None:
    """Whatever it is given: never a KeyError."""
    case = layers()
    program = lower(Plan(case.graph, 2).trans(case.graph.ops[0], cut("b0", 2, "dp")))
    use = next(step for step in program.steps if isinstance(step, Use))
    sync = next(step for step in program.steps if isinstance(step, Sync))
    compute = next(step for step in program.steps if isinstance(step, Compute))
    made, used = program.values[compute.outputs[0]], program.values[sync.sources[0]]
    moved = replace(compute.layout, grid=Grid(compute.layout.grid.axes, (0, 7)))
    wrong = {
        "no tensor": changed(program, use, replace(use, value=made.name)),
        "no value": changed(program, use, replace(use, value="nothing")),
        "other parameter": changed(program, sync, replace(sync, parameter=made.tensor)),
        "no gradient": replace(program, values={**program.values, used.name: replace(used, grad=None)}),
        "other devices": changed(program, compute, replace(compute, layout=moved)),
    }
    refused(wrong[fault], "wrong")
