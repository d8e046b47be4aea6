"""The checker is checked: every seeded fault in lowering or runtime comes out as a difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from tests.acceptance.subjects import HAND_WRITTEN, prepared
from tests.verify.faults import FAULTS, Fault
from weft.codegen import generate
from weft.ir.graph import Graph
from weft.lower import lower
from weft.plan.load import load_plan
from weft.plan.plan import Plan
from weft.plan.primitives import copy, cut
from weft.runtime.links.transport import Transport
from weft.verify import ranks
from weft.verify.compare import compare
from weft.verify.generated import run_generated


def tied_twice(graph: Graph) -> Plan:
    """The tied head cut by vocabulary, the embedding whole: two uses of one weight in different layouts."""
    plan = Plan(graph, 2)
    return plan.trans("lm_head/linear", cut("n", 2, axis="tp")).trans("transformer.wte/embedding", copy(2, axis="tp"))


def chunked_rows(graph: Graph) -> Plan:
    """Rows of the second linear in chunks on one device."""
    return Plan(graph, 1).trans("down/linear", cut("b0", 2, axis="co")).assign("down/linear", [0, 0])


SCENES: tuple[tuple[str, str | Callable[[Graph], Plan]], ...] = (
    ("gpt-tied", "dp=2,tp=2"),
    ("gpt-tied", HAND_WRITTEN["megatron"]),
    ("gpt-tied", tied_twice),
    ("mlp", "dp=2"),
    ("gpt-untied", "coshard=2"),
    ("mlp", chunked_rows),
)


def lowered(name: str, plan: str | Callable[[Graph], Plan]):
    graph = prepared(name)[1]
    return lower(load_plan(plan, graph) if isinstance(plan, str) else plan(graph))


def worst(name: str, ours) -> float:
    return max(found.value for found in compare(ours, prepared(name)[2]))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_in_the_program_is_seen(fault: Fault) -> None:
    for name, plan in SCENES:
        wrong = fault.apply(lowered(name, plan))
        if wrong is not None:
            subject, graph, reference = prepared(name)
            ours = run_generated(wrong, graph, subject, seed=7, wide=True, reference=reference)
            assert worst(name, ours) > 1e-9 or ours.disagreements, f"{fault.name} went unseen"
            return
    pytest.fail(f"no scene has a place for {fault.name!r}")


class Tampered:
    """A transport that does something to every sum."""

    def __init__(self, inner: Transport, change: Callable[[Tensor, Tensor, int], Tensor]) -> None:
        self.inner, self.change = inner, change

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...], op: str = "sum") -> Tensor:
        return self.change(tensor, self.inner.all_reduce(tensor, group, op), len(group))


RUNTIME_FAULTS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "a sum that is a mean": lambda own, total, members: total / members,
    "a sum that stays local": lambda own, total, members: own.clone(),
    "a sum that is rounded": lambda own, total, members: total * (1 + 1e-7),
}


@pytest.mark.parametrize("fault", RUNTIME_FAULTS)
def test_a_fault_in_the_transport_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, plan = SCENES[1]
    subject, graph, reference = prepared(name)
    ran = ranks.run_ranks

    def tampered(num_ranks: int, body: Callable[[Any], Any]) -> list[Any]:
        return ran(num_ranks, lambda transport: body(Tampered(transport, RUNTIME_FAULTS[fault])))

    monkeypatch.setattr(ranks, "run_ranks", tampered)
    ours = run_generated(generate(lowered(name, plan)), graph, subject, seed=7, wide=True, reference=reference)
    assert worst(name, ours) > 1e-9 or ours.disagreements


def test_without_a_fault_the_scenes_are_equal() -> None:
    for name, plan in SCENES:
        subject, graph, reference = prepared(name)
        ours = run_generated(generate(lowered(name, plan)), graph, subject, seed=7, wide=True, reference=reference)
        assert worst(name, ours) < 1e-9
        assert not ours.disagreements
