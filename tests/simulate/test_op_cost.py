"""Costs of single operators add up to those of a step."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulate.test_record import subject
from weft.compile import compile_subject
from weft.ops.book import RuleBook
from weft.plan.follow import resolve
from weft.simulate.op_cost import OpCosts, kept_bytes
from weft.simulate.record import record
from weft.simulate.trace import Run
from weft.train.memory.expected import expect_rank

NEAR = 0.005
"""Of what is kept: the loss, and targets that a program lays in order, are not in the sum."""


@pytest.mark.parametrize("plan", ["dp=1", "dp=2", "tp=2"])
def test_sums_are_those_of_a_step(plan: str) -> None:
    model = subject(layers=2)
    compiled = compile_subject(model, plan)
    book = RuleBook(compiled.graph)
    layouts, costs = resolve(compiled.plan, book), OpCosts(compiled.graph, book)
    flops: Counter[str] = Counter()
    for op in compiled.graph.ops:
        found = costs.of(op, layouts[op.name])
        flops["forward"] += sum(kernel.flops for kernel in found.forward)
        flops["backward"] += sum(kernel.flops for kernel in found.backward)
    (trace,) = record(compiled, model, by_block=True)
    told: Counter[str] = Counter()
    for event in trace.events:
        if isinstance(event, Run) and event.kernel.flops:
            told[event.place.phase] += event.kernel.flops
    assert flops == told
    kept = kept_bytes(compiled.graph, layouts, costs)
    assert kept == pytest.approx(expect_rank(compiled.files, model, 0).activations, rel=NEAR)


def test_what_cannot_be_told_apart_is_looked_at_once() -> None:
    model = subject(layers=4)
    compiled = compile_subject(model, "tp=2")
    book = RuleBook(compiled.graph)
    layouts, costs = resolve(compiled.plan, book), OpCosts(compiled.graph, book)
    for op in compiled.graph.ops:
        costs.of(op, layouts[op.name])
    assert len(costs._known) < len(compiled.graph.ops) / 2
