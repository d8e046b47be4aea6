"""The Graph's text and its verifier."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.models import MLP
from weft.capture import capture
from weft.errors import CheckError
from weft.ir.graph import Graph, Op, Ref, Tensor
from weft.ir.show import show_graph, show_op
from weft.ir.verify import verify_graph

LINE = inspect.getsourcelines(MLP.forward)[1] + 1
TEXT = """\
graph MLP
input %x: float32[4 6]  # x
input %y: float32[4 6]  # y
parameter %up.weight: float32[8 6] grad
parameter %up.bias: float32[8] grad
parameter %down.weight: float32[6 8] grad
parameter %down.bias: float32[6] grad

# tests/models.py:LINE  return F.mse_loss(self.drop(self.down(F.gelu(self.up(x)))), y)
%up/linear: float32[4 8] grad = linear.default(%x, %up.weight, %up.bias)
%gelu: float32[4 8] grad = gelu.default(%up/linear)
%down/linear: float32[4 6] grad = linear.default(%gelu, %down.weight, %down.bias)
%drop/dropout: float32[4 6] grad = dropout.default(%down/linear, 0.5, True) [draw 0]
%mse_loss: float32[] grad = mse_loss.default(%drop/dropout, %y)

return %mse_loss
loss %mse_loss
"""


@pytest.fixture(scope="module")
def graph() -> Graph:
    return capture(MLP(dropout=0.5), (torch.zeros(4, 6), torch.zeros(4, 6)))


def test_text(graph: Graph) -> None:
    assert show_graph(graph) == TEXT.replace("LINE", str(LINE))


def test_marks() -> None:
    op = Op(
        "f", "aten.add.Tensor", (Ref("a"), (1, None)), (("alpha", 2),), ("b",), grad=False, recompute=3, constant=True
    )
    text = show_op(op, {"b": Tensor("b", (2,), torch.float32)})
    assert text == "%b: float32[2] = add.Tensor(%a, [1, None], alpha=2) [no_grad] [recompute 3] [const]"


def with_op(graph: Graph, position: int, **changes: object) -> Graph:
    ops = list(graph.ops)
    ops[position] = replace(ops[position], **changes)
    return replace(graph, ops=tuple(ops))


def with_tensor(graph: Graph, key: str, **changes: object) -> Graph:
    return replace(graph, tensors={**graph.tensors, key: replace(graph.tensors[key], **changes)})


FAULTS: list[tuple[str, Callable[[Graph], Graph]]] = [
    ("%gelu is read before it is written", lambda g: replace(g, ops=(g.ops[0], *g.ops[2:]))),
    ("%nothing does not exist", lambda g: with_op(g, 1, args=(Ref("nothing"),))),
    ("written twice", lambda g: with_op(g, 1, outputs=("up/linear",))),
    ("the name up/linear is taken", lambda g: with_op(g, 1, name="up/linear")),
    ("each once", lambda g: with_op(g, 1, outputs=())),
    ("has no shape", lambda g: with_op(g, 1, outputs=("other",))),
    ("filed as", lambda g: with_tensor(g, "gelu", name="other")),
    ("is negative", lambda g: with_tensor(g, "gelu", shape=(4, -8))),
    ("without grad mode", lambda g: with_op(g, 1, grad=False)),
    ("needs a gradient but is torch.int64", lambda g: with_tensor(g, "gelu", dtype=torch.int64)),
    ("none of the op's inputs", lambda g: with_op(g, 1, args=(Ref("x"),))),
    ("a random op is not constant", lambda g: with_op(g, 3, constant=True)),
    ("go together", lambda g: with_op(g, 1, target="function:Odd")),
    ("draw 0 comes after draw 4", lambda g: with_op(g, 1, draw=4)),
    ("the output %other is never written", lambda g: replace(g, outputs=("other",))),
    ("is no output", lambda g: replace(g, loss="gelu")),
    ("is no scalar", lambda g: replace(g, loss="gelu", outputs=(*g.outputs, "gelu"))),
    ("nothing makes", lambda g: replace(g, tensors={**g.tensors, "z": Tensor("z", (), torch.float32)})),
    ("is dead", lambda g: replace(g, outputs=("gelu",), loss=None)),
    ("two of", lambda g: replace(g, inputs=(*g.inputs, g.inputs[0]))),
    ("trainable is False", lambda g: replace(g, parameters=(replace(g.parameters[0], trainable=False),))),
]


@pytest.mark.parametrize(("words", "break_it"), FAULTS, ids=[words for words, _ in FAULTS])
def test_faults_are_found(graph: Graph, words: str, break_it: Callable[[Graph], Graph]) -> None:
    verify_graph(graph)
    with pytest.raises(CheckError) as caught:
        verify_graph(break_it(graph))
    assert words in str(caught.value)


def test_error_shows_the_neighbourhood(graph: Graph) -> None:
    with pytest.raises(CheckError) as caught:
        verify_graph(with_op(graph, 2, args=(Ref("nothing"),)))
    lines = caught.value.message.split("\n")
    assert len(lines) == 7
    assert [line for line in lines if line.startswith(">")] == [lines[3]] and "%down/linear" in lines[3]
    assert f"tests/models.py:{LINE}" in caught.value.place
