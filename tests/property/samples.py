"""Small programs with known plans: what faults are seeded into.

A two-layer perceptron and an attention block under plans of all sorts, and random graphs under random plans.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tests.property.graphs import random_case
from tests.property.harness import Results, run_single
from tests.property.plans import random_plan, staged_plan
from tests.property.sketch import Case, Sketch, ref
from weft.codegen import generate
from weft.errors import PlanError, RuleError
from weft.ir.program import Program
from weft.lower import lower
from weft.lower.pipeline import lower_pieces
from weft.ops.book import RuleBook
from weft.plan.plan import Plan
from weft.plan.primitives import copy, cut, recompute


@dataclass(frozen=True)
class Sample:
    """A program, the tensors to run it on, and what comes out on one device."""

    name: str
    case: Case
    program: Program
    expected: Results
    book: RuleBook


def perceptron() -> Case:
    """`mean((gelu(x w1 + b1) w2 + b2) * y)`, the first weight tied to the last layer."""
    sketch = Sketch(random.Random(1))
    x, w1, b1 = sketch.input((4, 4)), sketch.parameter((4, 4)), sketch.parameter((4,))
    w2, b2 = sketch.parameter((4, 4)), sketch.parameter((4,))
    (h,) = sketch.run("aten.linear.default", ref(x), ref(w1), ref(b1))
    (a,) = sketch.run("aten.gelu.default", ref(h))
    (o,) = sketch.run("aten.linear.default", ref(a), ref(w2), ref(b2))
    (r,) = sketch.run("aten.add.Tensor", ref(o), ref(a))
    (u,) = sketch.run("aten.linear.default", ref(r), ref(w1), None)
    (z,) = sketch.run("aten.mul.Tensor", ref(u), ref(sketch.input((4, 4))))
    (loss,) = sketch.run("aten.mean.default", ref(z))
    return sketch.finish(loss, [])


def attention() -> Case:
    """One head-split attention with a residual and a cross entropy."""
    sketch = Sketch(random.Random(2))
    ids, table = sketch.integers((2, 3), 6), sketch.parameter((6, 4))
    (x,) = sketch.run("aten.embedding.default", ref(table), ref(ids))
    heads = []
    for _ in range(3):
        (p,) = sketch.run("aten.linear.default", ref(x), ref(sketch.parameter((4, 4))), None)
        (v,) = sketch.run("aten.view.default", ref(p), (2, 3, 2, 2))
        heads += sketch.run("aten.transpose.int", ref(v), 1, 2)
    (a,) = sketch.run("aten.scaled_dot_product_attention.default", *map(ref, heads), None, 0.0, True)
    (t,) = sketch.run("aten.transpose.int", ref(a), 1, 2)
    (m,) = sketch.run("aten.reshape.default", ref(t), (2, 3, 4))
    (o,) = sketch.run("aten.linear.default", ref(m), ref(sketch.parameter((4, 4))), ref(sketch.parameter((4,))))
    (r,) = sketch.run("aten.add.Tensor", ref(x), ref(o))
    (s,) = sketch.run("aten.linear.default", ref(r), ref(table), None)
    (f,) = sketch.run("aten.view.default", ref(s), (6, 6))
    (loss,) = sketch.run("aten.cross_entropy_loss.default", ref(f), ref(sketch.integers((6,), 6)))
    return sketch.finish(loss, [])


def _perceptron_plans(case: Case) -> Iterator[tuple[str, Plan]]:
    first, act, second, *_, last, _, end = (op.name for op in case.graph.ops)
    two, four = Plan(case.graph, 2), Plan(case.graph, 4)
    yield "dp", two.trans(first, cut("b0", 2, "dp"))
    yield "tp", two.trans(first, cut("n", 2, "tp")).trans(second, cut("k", 2, "tp"))
    both = four.trans(first, cut("b0", 2, "dp"), cut("n", 2, "tp"))
    yield "dp x tp", both.trans(second, cut("b0", 2, "dp"), cut("k", 2, "tp"))
    zero = two.trans(first, cut("b0", [3, 1], "dp"))
    yield "zero", zero.store(case.graph.parameters[0], cut(0, 2, "dp"))
    yield "recompute", zero.trans([first, act, second], recompute())
    stages = two.assign(first, [0]).assign(act, [0]).assign(second, [1])
    yield "stages", stages.assign(last, [1]).assign(end, [0])


def _co_shard(case: Case) -> Iterator[tuple[str, Plan]]:
    first = case.graph.ops[0]
    plan = Plan(case.graph, 2).trans(first, cut("b0", 2, "dp"), cut("n", 2, "co"))
    yield "co-shard", plan.assign(first, [[0, 0], [1, 1]])
    plan = Plan(case.graph, 2).trans(first, cut("k", 2, "tp"), cut("b0", 2, "co"))
    yield "co-shard of addends", plan.assign(first, [[0, 0], [1, 1]])


def _attention_plans(case: Case) -> Iterator[tuple[str, Plan]]:
    names = {op.name: op for op in case.graph.ops}
    table = next(iter(names))
    linears = [name for name, op in names.items() if op.kind == "linear"]
    plan = Plan(case.graph, 2).trans(table, copy(2, "tp"))
    for name in linears[:3]:
        plan = plan.trans(name, cut("n", 2, "tp", units=2))
    plan = plan.trans(linears[3], cut("k", 2, "tp", units=2))
    yield "heads", plan
    yield "vocabulary", Plan(case.graph, 2).trans(table, cut("v", 2, "tp")).trans(linears[4], cut("n", 2, "tp"))
    yield "batch and heads", Plan(case.graph, 2).trans(table, cut("b0", 2, "dp"))


def samples(num_random: int) -> list[Sample]:
    """The programs that faults are seeded into."""
    found = []
    mlp, block = perceptron(), attention()
    for case, plans in ((mlp, _perceptron_plans), (mlp, _co_shard), (block, _attention_plans)):
        found += [_sample(name, case, plan) for name, plan in plans(case)]
    seed = 10_000
    while num_random:
        seed += 1
        case = random_case(seed, num_ops=random.Random(seed).randint(2, 5))
        plan = random_plan(case.graph, seed)
        if plan.devices == 1 or plan.devices > 4:
            continue
        try:
            found.append(_sample(f"seed {seed}", case, plan))
        except (PlanError, RuleError):
            continue
        num_random -= 1
    return found


def _sample(name: str, case: Case, plan: Plan) -> Sample:
    program = lower(plan, outputs="all")
    generate(program)  # an operator that cannot run on an empty part says so here
    return Sample(name, case, program, run_single(case.graph, case.state, case.inputs), plan.rules)


def piece_samples(count: int) -> list[tuple[str, Program]]:
    """Programs that take gradients from their caller or give it some: pieces of random graphs, and open programs."""
    found: list[tuple[str, Program]] = []
    mlp, block = perceptron(), attention()
    for case, plans in ((mlp, _perceptron_plans), (mlp, _co_shard), (block, _attention_plans)):
        found += [(f"open {name}", lower(plan, outputs="open")) for name, plan in plans(case)]
    seed, count = 30_000, count + len(found)
    while len(found) < count:
        seed += 1
        draw = random.Random(seed)
        try:
            parts = lower_pieces(staged_plan(random_case(seed, num_ops=draw.randint(2, 6)).graph, draw)).parts
        except (PlanError, RuleError):
            continue
        found += [
            (f"{part.piece.segment.name} of seed {seed}", part.program)
            for part in parts
            if part.program.roots or part.program.entries
        ]
    return found
