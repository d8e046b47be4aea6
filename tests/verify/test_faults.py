"""The checker is checked: every seeded fault in lowering or runtime comes out as a difference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from tests.acceptance.subjects import HAND_WRITTEN, prepared
from weft.ir.graph import Graph
from weft.lower import lower
from weft.plan.load import load_plan
from weft.plan.plan import Plan
from weft.plan.primitives import copy, cut
from weft.runtime.script import Script
from weft.runtime.transport import Transport
from weft.verify.compare import compare
from weft.verify.faults import FAULTS, Fault
from weft.verify.parallel import run_parallel, write_scripts


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
def test_a_fault_in_the_scripts_is_seen(fault: Fault) -> None:
    for name, plan in SCENES:
        program = lowered(name, plan)
        wrong = fault.apply(write_scripts(program))
        if wrong is None:
            continue

        def tamper(_: list[Script], wrong: list[Script] = wrong) -> list[Script]:
            return wrong

        ours = run_parallel(program, prepared(name)[0], seed=7, wide=True, reference=prepared(name)[2], tamper=tamper)
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
def test_a_fault_in_the_transport_is_seen(fault: str) -> None:
    name, plan = SCENES[1]
    ours = run_parallel(
        lowered(name, plan),
        prepared(name)[0],
        seed=7,
        wide=True,
        reference=prepared(name)[2],
        through=lambda transport: Tampered(transport, RUNTIME_FAULTS[fault]),
    )
    assert worst(name, ours) > 1e-9 or ours.disagreements


def test_without_a_fault_the_scenes_are_equal() -> None:
    for name, plan in SCENES:
        ours = run_parallel(lowered(name, plan), prepared(name)[0], seed=7, wide=True, reference=prepared(name)[2])
        assert worst(name, ours) < 1e-9
        assert not ours.disagreements
