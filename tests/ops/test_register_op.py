"""register_op: rules that users state, checked at their first use; functions kept whole from capture to processes."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from examples import custom_ops
from weft.capture import capture
from weft.codegen import generate
from weft.compile.model_file import load_model_file
from weft.errors import CaptureError, ModelFileError, RuleError, WeftError
from weft.ir.graph import Graph, Op
from weft.lower import lower
from weft.ops.book import RuleBook
from weft.ops.rule import Rule
from weft.plan.load import load_plan
from weft.runtime.comm import Comms, sum_over, sum_to_copy
from weft.runtime.operators.custom import CustomOp, defined_in, kept_name, need_operator, tensors_in

FILE = Path(custom_ops.__file__)


def trained(*sizes: int) -> Tensor:
    return torch.randn(sizes).requires_grad_()


def one_op(function: Any, *example: Tensor) -> tuple[Op, Graph]:
    class Module(nn.Module):
        def forward(self, *tensors: Tensor) -> Any:
            return function(*tensors)

    graph = capture(Module(), example)
    (op,) = graph.ops
    return op, graph


def rule_of(function: Any, *example: Tensor) -> Rule:
    op, graph = one_op(function, *example)
    return RuleBook(graph).rule(op)


# Stated rules.


@weft.register_op("b h+, f h+, &f -> b f")
def dense(x: Tensor, w: Tensor, bias: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
    y = scale * (x @ w.t())
    return y if bias is None else y + bias


def test_a_rule_is_stated_in_one_line() -> None:
    rule = rule_of(dense, trained(4, 6), trained(5, 6), trained(5))
    assert str(rule) == "b h+, f h+, &f -> b f" and rule.source == "user"
    assert [set(one) for one in rule.linear] == [{0, 2}, {1, 2}]


def test_an_operand_may_be_left_out() -> None:
    rule = rule_of(lambda x, w: dense(x, w, scale=2.0), trained(4, 6), trained(5, 6))
    assert str(rule) == "b h+, f h+ -> b f" and [set(one) for one in rule.linear] == [{0}, {1}]


def test_called_as_ever() -> None:
    x, w = trained(4, 6), trained(5, 6)
    assert isinstance(dense, CustomOp) and dense.__name__ == "dense"
    assert torch.equal(dense(x, w, scale=2.0), 2.0 * (x @ w.t()))
    assert pickle.loads(pickle.dumps(dense)) is dense


WRONG = {
    "b h -> b h": (
        lambda x: x.softmax(-1),
        "cut along 'h' into 2 parts, with operands of shapes (4, 6), output 0 differs by",
    ),
    "b h+ -> b": (
        lambda x: x.mean(-1),
        "cut along 'h' into 2 parts, with operands of shapes (4, 6), output 0 differs by",
    ),
    "n h -> n h": (
        lambda x: x.cumsum(0),
        "cut along 'n' into 2 parts, with operands of shapes (4, 6), output 0 differs by",
    ),
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_rule_is_refused_with_the_counter_example(text: str) -> None:
    function, told = WRONG[text]
    with pytest.raises(RuleError) as caught:
        rule_of(weft.register_op(text)(function), trained(4, 6))
    assert f"the rule `{text}` of " in caught.value.message and told in caught.value.message
    assert Path(__file__).name in caught.value.place and "running it showed" in caught.value.remedy


class HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - grad.mean()


def test_a_rule_that_is_wrong_in_backward_only_is_refused() -> None:
    with pytest.raises(RuleError, match="the gradient of operand 0 differs by"):
        rule_of(weft.register_op("b h -> b h")(HalfGradient.apply), trained(4, 6))


def test_a_factor_that_is_added_is_told() -> None:
    plain = weft.register_op("b h+, f h+, f -> b f")(lambda x, w, b: x @ w.t() + b)
    with pytest.raises(RuleError) as caught:
        rule_of(plain, trained(4, 6), trained(5, 6), trained(5))
    assert "along 'h'" in caught.value.message and "`d0 k0+, d1 k0+, &d1 -> d0 d1`" in caught.value.remedy


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("b h q -> b h", "'q' is not in every output"),
        ("b h+ -> b h", "'h' is in every output, so it is not summed away"),
        ("b -> b", "does not fit here"),
        ("b h, b h -> b h", "has 2 operands, it is given 1 tensor"),
        ("b h -> b h, b h", "the rule has 2 outputs, the operator 1"),
        ("b h! -> b h!", "do not agree about h"),
    ],
)
def test_a_rule_that_does_not_fit_is_refused(text: str, told: str) -> None:
    def it(x: Tensor) -> Tensor:
        return x * 2

    with pytest.raises(RuleError) as caught:
        rule_of(weft.register_op(text)(it), trained(4, 6))
    assert told.replace("1 tensor", "1 tensors") in caught.value.message and Path(__file__).name in caught.value.place


def test_a_library_operator_is_stated_by_name() -> None:
    with torch.library._scoped_library("weft_test_stated", "FRAGMENT") as library:
        library.define("scaled(Tensor x, float by) -> Tensor")
        library.impl("scaled", lambda x, by: x * by, "CompositeExplicitAutograd")
        library.impl("scaled", lambda x, by: torch.empty_like(x), "Meta")
        weft.register_op("rows columns -> rows columns", op="weft_test_stated::scaled")
        op, graph = one_op(lambda x: torch.ops.weft_test_stated.scaled(x, 2.0), torch.randn(4, 6))
        rule = RuleBook(graph).rule(op)
        assert str(rule) == "rows columns -> rows columns" and rule.source == "user"
        weft.register_op("rows -> rows", op=torch.ops.weft_test_stated.scaled)
        with pytest.raises(RuleError, match="does not fit here"):
            RuleBook(graph).rule(op)


def test_what_is_no_operator_is_refused() -> None:
    with pytest.raises(TypeError, match="no operator of a torch library"):
        weft.register_op("b -> b", op=torch.relu)
    with pytest.raises(TypeError, match="there is no operator nolib::missing"):
        weft.register_op("b -> b", op="nolib::missing")
    with pytest.raises(TypeError, match="state it"):
        weft.register_op(comm="h")


# Functions without a rule, and what may stand in their arguments and results.


@weft.register_op
def parts(x: Tensor, options: dict[str, Any], more: list[Tensor], *, mask: Tensor | None = None) -> Any:
    y = x * options["scale"] + more[0] * more[1]
    if mask is not None:
        y = y.masked_fill(mask, 0.0)
    return {"y": y, "pair": (y.sum(-1), options["scale"]), "nothing": None}


def test_nested_arguments_and_results() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b = nn.Parameter(torch.randn(6))

        def forward(self, x: Tensor, a: Tensor, mask: Tensor) -> Tensor:
            made = parts(x, {"scale": 3}, [a, self.b], mask=mask)
            assert made["pair"][1] == 3 and made["nothing"] is None
            loss: Tensor = made["y"].sum() + made["pair"][0].square().sum()
            return loss

    example = (torch.randn(4, 6), torch.randn(4, 6), torch.randn(4, 6) > 0)
    graph = capture(Module(), example)
    op = graph.ops[0]
    assert op.target == "function:parts" and len(op.inputs) == 4 and len(op.outputs) == 2
    assert str(RuleBook(graph).rule(op)) == "d0 6, d0 6, 6, d0 6 -> d0 6, d0"
    assert weft.verify(Module(), example, plan="dp=2").equal


def test_what_would_not_stay_inside_is_refused() -> None:
    @weft.register_op
    def writes(x: Tensor) -> Tensor:
        return x.add_(1)

    @weft.register_op
    def draws(x: Tensor) -> Tensor:
        return x * torch.rand_like(x)

    with pytest.raises(CaptureError, match="writes changes its input in place"):
        one_op(lambda x: writes(x * 2), torch.randn(4))
    with pytest.raises(CaptureError, match="draws draws random numbers"):
        one_op(draws, torch.randn(4))


def test_what_is_no_function_of_its_operands_is_not_cut() -> None:
    calls: list[int] = []

    def counts(x: Tensor) -> Tensor:
        calls.append(0)
        return x * len(calls)

    rule = rule_of(weft.register_op(counts), torch.randn(4, 6))
    assert rule.source == "none" and "other results each time" in rule.reason
    with pytest.raises(RuleError, match="cannot be cut: it gives other results each time"):
        rule_of(weft.register_op("b h -> b h")(counts), torch.randn(4, 6))


def test_a_rule_that_cannot_be_tried_stands_as_stated() -> None:
    def picky(x: Tensor) -> Tensor:
        if type(x) is Tensor and not bool((x == 7.25).all()):
            raise ValueError("only sevens and a quarter")
        return x * 2

    rule = rule_of(weft.register_op("b h -> b h")(picky), torch.full((4, 6), 7.25))
    assert rule.cuttable == ("b", "h") and "not checked" in rule.reason
    found = rule_of(weft.register_op(picky), torch.full((4, 6), 7.25))
    assert found.source == "none" and "only sevens and a quarter" in found.reason


# Communicators and indices.


def softmax(x: Tensor, comm: Comms = ()) -> Tensor:
    e = x.exp()
    return e / sum_over(e.sum(-1, keepdim=True), comm)


def score(x: Tensor, w: Tensor, comm: Comms = ()) -> Tensor:
    return sum_to_copy((x * w).sum(-1), comm)


def test_what_is_exchanged_is_found() -> None:
    rule = rule_of(weft.register_op("b h! -> b h", comm="h")(softmax), trained(4, 6))
    assert rule.algorithms["h"].forward == ("all_reduce",) and rule.algorithms["h"].backward == ("all_reduce",)
    rule = rule_of(weft.register_op("b h!, h! -> b", comm="h")(score), trained(4, 6), trained(6))
    exchange = rule.algorithms["h"]
    assert (exchange.output, exchange.forward, exchange.backward) == ("copy", ("all_reduce",), ())


def test_a_function_that_does_not_talk_enough_is_refused() -> None:
    def silent(x: Tensor, comm: Comms = ()) -> Tensor:
        return softmax(x)

    def backward_forgotten(x: Tensor, comm: Comms = ()) -> Tensor:
        e = x.exp()
        return e / sum_to_copy(e.sum(-1, keepdim=True), comm)

    with pytest.raises(RuleError, match="output 0 differs by"):
        rule_of(weft.register_op("b h! -> b h", comm="h")(silent), trained(4, 6))
    with pytest.raises(RuleError, match="gradient of operand 0 differs by"):
        rule_of(weft.register_op("b h! -> b h", comm="h")(backward_forgotten), trained(4, 6))


# To the end.


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "tp=3", "dp=2,tp=2"])
def test_a_model_of_custom_operators_gives_the_same_numbers(plan: str) -> None:
    assert weft.verify(FILE, plan=plan).equal


def test_on_processes_too() -> None:
    assert weft.verify(FILE, plan="tp=2", processes=True).equal


def test_generated_code_calls_functions_by_name() -> None:
    module = custom_ops.model()
    graph = capture(module, custom_ops.example())
    program = lower(load_plan("tp=2", graph))
    text = generate(program)["program.py"].decode()
    assert "from examples.custom_ops import gated, project, spread, turned" in text
    assert 'need_operator("custom_ops.swish", "' in text
    assert 'spread(dropout_1, comm=(self.comm.along("tp"),))' in text and "tensors_in(gated(" in text


def test_what_another_process_could_not_find_is_refused() -> None:
    @weft.register_op("b h -> b h")
    def local(x: Tensor) -> Tensor:
        return x * 2

    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return local(x).sum()

    program = lower(load_plan("dp=2", capture(Module(), (trained(4, 6),))))
    with pytest.raises(WeftError, match="cannot be imported from a generated program"):
        generate(program)


SCRIPT = """
import torch, weft
from torch import nn

print("runs")

@weft.register_op("b h -> b h")
def twice(x):
    return x * 2

class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient * ctx.saved_tensors[0]

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return Square.apply(twice(self.linear(x))).mean()

x, model = torch.randn(4, 4), Model()
loss = weft.parallelize(model, x, "dp=2", emulate=True, cache=None)(x)
loss.backward()
torch.testing.assert_close(loss, model(x))
"""


def test_operators_of_the_script_that_runs(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "runs\n"), done.stderr


def test_files_and_operators_are_found_at_run_time(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import torch\n\nclass A:\n    def f(x):\n        return x + 1\n")
    assert defined_in(str(file), "A.f")(1) == 2
    with pytest.raises(ImportError, match="is not there"):
        defined_in(str(tmp_path / "other.py"), "A")
    with pytest.raises(ImportError, match=r"nothing here defines torch\.ops\.no_such_library\.it"):
        need_operator("no_such_library.it", str(file))
    assert tensors_in({"a": [torch.ones(1)], "b": 2}).item() == 1  # type: ignore[union-attr]


OPERATOR = """
import torch

@torch.library.custom_op("weft_once::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2

def model():
    return torch.nn.Linear(2, 2)

def example():
    return torch.zeros(2, 2)
"""


def test_operators_are_defined_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch ends an operator that is defined again; calls of the first may crash."""
    file = tmp_path / "weft_once_operators.py"
    file.write_text(OPERATOR)
    monkeypatch.syspath_prepend(tmp_path)
    imported = importlib.import_module(file.stem)
    load_model_file(file)
    assert defined_in(str(file), "double") is imported.double
    assert imported.double(torch.ones(1)).item() == 2
    monkeypatch.delitem(sys.modules, file.stem)
    sys.modules[kept_name(str(file))] = imported
    file.write_text(OPERATOR + "\n")
    with pytest.raises(ModelFileError, match="was changed after its operators were defined"):
        load_model_file(file)
