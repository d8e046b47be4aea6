"""Algorithms of the user's: chosen by name, tried at first use, run by the interpreter and by generated code."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import weft
from tests.codegen.running import same_bits
from tests.ops import user_algorithms as mine
from weft.capture import capture
from weft.codegen import generate
from weft.compile.model_file import Subject
from weft.errors import PlanError
from weft.lower import lower
from weft.ops.book import RuleBook
from weft.runtime.operators.algorithms import REGISTRY, Exchange, register_algorithm

SOFTMAX = "aten.softmax"
TALK = Exchange("copy", "partial", ("all_reduce", "all_reduce"), ("all_reduce",))


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    known = {op: set(REGISTRY.names(op)) for op in (SOFTMAX, "aten.scaled_dot_product_attention", "aten.mean")}
    yield
    for op, names in known.items():
        for name in set(REGISTRY.names(op)) - names:
            REGISTRY.remove(op, name)


class Chooses(nn.Module):
    """Softmax between two layers, attention, a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.b(torch.softmax(self.a(x), -1))
        heads = hidden.unflatten(-1, (2, 4)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return F.mse_loss(mixed.transpose(1, 2).flatten(-2).mean(-1), y)


def example() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(2, 6, 8), torch.randn(2, 6)


def model() -> nn.Module:
    torch.manual_seed(0)
    return Chooses()


def softmax(name: str = "summed", run: Callable[..., Any] = mine.summed_softmax, **options: Any) -> None:
    register_algorithm(name, op=SOFTMAX, rule="b* s! -> b* s!", **options)(run)


def chosen(kind: str, name: str = "s", op: str = "softmax") -> Callable[[weft.Graph], weft.Plan]:
    """A plan that cuts one kind of op by an algorithm."""

    def plan(graph: weft.Graph) -> weft.Plan:
        made = weft.Plan(graph, devices=2)
        return made.trans(made.match("**", op=op), weft.algorithm(kind, name, 2, "tp"))

    return plan


def prove(plan: Callable[[weft.Graph], weft.Plan]) -> str:
    """Equal to one device, with or without a trace. The program's text."""
    result = weft.verify(model(), example(), plan=plan)
    assert result.equal, str(result)
    program = lower(plan(capture(model(), example())))
    same_bits(program, Subject(model(), example()))
    return "\n".join(text.decode() for name, text in generate(program).items() if name.endswith(".py"))


def test_several_algorithms_of_one_operator() -> None:
    softmax("summed")
    softmax("gathered", mine.gathered_softmax)
    texts = {name: prove(chosen(name)) for name in ("summed", "gathered")}
    for name, text in texts.items():
        assert f"from tests.ops.user_algorithms import {name}_softmax" in text
        assert f" {name}_softmax(" in text
    assert "user_algorithms" not in prove(chosen("default", "d2"))


def test_an_algorithm_that_names_dims_otherwise() -> None:
    """Queries and keys have one name, so that a sequence can be cut through: no rule of the table says that."""
    attention = register_algorithm(
        "gathered",
        op=torch.ops.aten.scaled_dot_product_attention,
        rule="b h s! d^, b h s! d^, b h s! v^ -> b h s! v^",
        indices="s",
    )
    attention(mine.gathered_attention)
    text = prove(chosen("gathered", "s", "scaled_dot_product_attention"))
    assert " = gathered_attention(" in text


def test_sizes_and_names_that_do_not_talk() -> None:
    register_algorithm("weighted", op="aten.mean", rule="b s h+ -> b s", sizes="h")(mine.weighted_mean)
    text = prove(chosen("weighted", "h", "mean"))
    assert "weighted_mean(" in text and "sizes=8" in text


def test_a_default_is_taken_by_every_plan() -> None:
    softmax(default=True)
    graph = capture(model(), example())
    (op,) = (op for op in graph.ops if op.kind == "softmax")
    rule = RuleBook(graph).rule(op)
    assert str(rule) == "b0 b1 s! -> b0 b1 s!" and rule.source == "user"
    assert weft.verify(model(), example(), plan="tp=2").equal
    REGISTRY.remove(SOFTMAX, "summed")
    assert str(RuleBook(graph).rule(op)) == "d0 d1 d2! -> d0 d1 d2!"


def test_what_it_exchanges_and_costs() -> None:
    softmax(exchanges={"s": TALK}, cost=lambda sizes: 24 * sizes["b0"] * sizes["b1"])
    graph = capture(model(), example())
    (op,) = (op for op in graph.ops if op.kind == "softmax")
    (exchange,) = RuleBook(graph).rule(op, "summed").algorithms.values()
    assert exchange == Exchange(TALK.output, TALK.gradient, TALK.forward, TALK.backward, 24 * 12)


def test_other_collectives_than_said_are_refused() -> None:
    softmax(exchanges={"s": Exchange("copy", "partial", ("all_reduce",))})
    with pytest.raises(PlanError, match="seen to exchange") as caught:
        chosen("summed")(capture(model(), example()))
    assert "test_registered.py" in str(caught.value)


def test_a_wrong_algorithm_is_refused() -> None:
    softmax("wrong", mine.wrong_softmax)
    with pytest.raises(PlanError, match="output 0 differs"):
        chosen("wrong")(capture(model(), example()))


def test_names_that_nobody_registered() -> None:
    softmax()
    with pytest.raises(PlanError, match="no algorithm is called 'sumed'") as caught:
        weft.algorithm("sumed", "s", 2)
    assert "did you mean 'summed'" in str(caught.value) and "known: default, summed" in str(caught.value)
    with pytest.raises(PlanError, match=r"no algorithm of aten\.mse_loss"):
        chosen("summed", "d0", "mse_loss")(capture(model(), example()))
    with pytest.raises(ValueError, match="already"):
        register_algorithm("summed", op=SOFTMAX, rule="b* s! -> b* s!")(mine.summed_softmax)
    with pytest.raises(TypeError, match="no operator"):
        register_algorithm("mine", op="softmax", rule="b -> b")


def test_one_op_has_one_algorithm() -> None:
    softmax("summed")
    softmax("gathered", mine.gathered_softmax)
    graph = capture(model(), example())
    plan = chosen("summed")(graph)
    ops = plan.match("**", op="softmax")
    with pytest.raises(PlanError, match="one op is run by one algorithm"):
        plan.trans(ops, weft.algorithm("gathered", "s", 2, "sp"))
    with pytest.raises(PlanError, match="does not know"):
        weft.Plan(graph, devices=4).trans(ops, weft.cut("d0", 2, "dp"), weft.algorithm("summed", "s", 2, "tp"))
    both = plan.trans(ops, weft.cut("b0", 2, "dp"))
    assert both.decision(next(iter(ops))).algorithm == "summed"


def test_plans_remember_it(tmp_path: Path) -> None:
    softmax()
    graph = capture(model(), example())
    plan = chosen("summed")(graph)
    weft.save_plan(plan, tmp_path / "plan.yaml")
    loaded = weft.load_plan(str(tmp_path / "plan.yaml"), graph)
    assert loaded.decisions == plan.decisions


def test_the_same_line_again_replaces() -> None:
    for run in (mine.wrong_softmax, mine.summed_softmax):
        softmax(run=run)
    found = REGISTRY.find(SOFTMAX, "summed")
    assert found is not None and found.stated is not None and found.stated.run is mine.summed_softmax


def test_registering_needs_no_compiler() -> None:
    """The ranks of a job import the module that registers."""
    text = (
        "import sys, weft\n"
        "@weft.register_algorithm('mine', op='aten.softmax', rule='b s! -> b s!', exchanges={'s': weft.Exchange()})\n"
        "def run(x, dim, *, comm): ...\n"
        "assert not [name for name in sys.modules if name.startswith(('weft.ops', 'weft.plan', 'weft.ir'))]\n"
    )
    subprocess.run([sys.executable, "-c", text], check=True)
