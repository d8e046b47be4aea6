"""Every row of the table of operators: what is printed gives what the operator gives, gradients too, bit for bit."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops import cases
from tests.ops.cases import Form, form, i, moving_cases, r
from tests.ops.cases_numeric import numeric_cases
from tests.ops.cases_talking import statistics
from weft.codegen.statements.calling import show
from weft.codegen.statements.operators import PRODUCTS, TEMPLATES, Written, expression
from weft.ops.arguments import overload

CPU = torch.device("cpu")


class Fixed(Tensor):
    """An argument that no gradient may flow into."""


def fixed(*sizes: int) -> Tensor:
    return r(*sizes).abs().as_subclass(Fixed)


def _unary(target: str) -> tuple[str, ...]:
    name = target.split(".")[1]
    return f"torch.{name}(self)", f"F.{name}(self)", "-self"


def more() -> dict[str, list[Form]]:
    """Rows that the rules' own cases do not reach, and arguments that a row must leave to the operator."""
    signs = ["add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge"]
    words = [target.split(".")[1] for target, row in TEMPLATES.items() if row in _unary(target)]
    return {
        **{f"aten.{sign}.Tensor": [form(r(2, 3), r(3))] for sign in signs},
        **{f"aten.{sign}.Tensor": [form(r(2, 3), r(3)), form(r(2, 3), 0.5)] for sign in signs[:4]},
        **{f"aten.{sign}.Scalar": [form(r(2, 3), 0.5), form(r(2, 3), -2)] for sign in signs},
        **{f"aten.{word}.default": [form(r(2, 3).abs() / 4)] for word in words},
        **{f"aten.bitwise_{word}.Tensor": [form(i(8, 4), i(8, 4))] for word in ("and", "or", "xor")},
        **{f"aten.bitwise_{word}.Scalar": [form(i(8, 4), 3)] for word in ("and", "or", "xor")},
        **{f"aten.{word}.default": [form(r(3) > 0, r(3) > 0)] for word in ("logical_and", "logical_or")},
        **{f"aten.{word}.default": [form(r(4), r(4))] for word in ("maximum", "minimum")},
        "aten.bitwise_not.default": [form(i(8, 4))],
        "aten.add.Tensor": [form(r(2, 3), r(2, 3), alpha=2.0), form(2.0, r(2)), form(r(2, 3), r(3))],
        "aten.sub.Tensor": [form(r(2, 3), r(2, 3), alpha=2.0), form(r(2, 3), r(3))],
        "aten.pow.Tensor_Scalar": [form(r(3), 2), form(r(3).abs(), -0.5)],
        "aten.pow.Tensor_Tensor": [form(r(3).abs(), r(3))],
        "aten.addmm.default": [form(r(3), r(2, 4), r(4, 3)), form(r(3), r(2, 4), r(4, 3), beta=0.5, alpha=2.0)],
        "aten.einsum.default": [form("ij,kj->ik", [r(2, 3), r(4, 3)])],
        "aten.gelu.default": [form(r(5)), form(r(5), approximate="tanh")],
        "aten.leaky_relu.default": [form(r(5)), form(r(5), 0.2)],
        "aten.elu.default": [form(r(5)), form(r(5), 0.5), form(r(5), 0.5, 2.0)],
        "aten.softplus.default": [form(r(5)), form(r(5), 2.0, 10.0)],
        "aten.softmax.int": [form(r(2, 3), -1), form(r(2, 3), 0, torch.float32)],
        "aten.log_softmax.int": [form(r(2, 3), -1), form(r(2, 3), 0, torch.float32)],
        "aten.clamp.default": [form(r(5), -0.5), form(r(5), None, 0.5), form(r(5), -0.5, 0.5)],
        "aten.clamp_min.default": [form(r(5), 0.0)],
        "aten.clamp_max.default": [form(r(5), 0.0)],
        "aten.dropout.default": [form(r(5), 0.5, False), form(r(5), 0.0, True)],
        "aten.rms_norm.default": [form(r(2, 4), [4], r(4), 1e-3), form(r(2, 4), [4])],
        "aten.layer_norm.default": [
            form(r(2, 4), [4], r(4), r(4), 1e-3, False),
            form(r(2, 4), [4], r(4)),
            form(r(2, 3, 4), [3, 4], None, r(3, 4)),
        ],
        "aten.group_norm.default": [form(r(2, 4, 3), 2, r(4), r(4), 1e-3), form(r(2, 4, 3), 2)],
        "aten.embedding.default": [form(r(5, 3), i(5, 4)), form(r(5, 3), i(5, 4), 2), form(r(5, 3), i(5, 4), -1, True)],
        "aten.cross_entropy_loss.default": [
            form(r(4, 5), i(5, 4)),
            form(r(4, 5), i(5, 4), None, 2, -1, 0.1),
            form(r(4, 5), i(5, 4), fixed(5), 1, 3, 0.1),
        ],
        "aten.mse_loss.default": [form(r(4), r(4)), form(r(4), r(4), 2)],
        "aten.l1_loss.default": [form(r(4), r(4)), form(r(4), r(4), 0)],
        "aten.binary_cross_entropy_with_logits.default": [form(r(4), r(4).sigmoid()), form(r(4), r(4), fixed(4))],
        "aten.nll_loss_nd.default": [form(r(4, 5), i(5, 4)), form(r(4, 5), i(5, 4), None, 1, 2)],
        "aten.scaled_dot_product_attention.default": [
            form(r(2, 3, 4), r(2, 3, 4), r(2, 3, 4)),
            form(r(1, 2, 3, 4), r(1, 2, 3, 4), r(1, 2, 3, 4), None, 0.0, True, scale=0.5),
            form(r(1, 4, 3, 4), r(1, 2, 3, 4), r(1, 2, 3, 4), enable_gqa=True),
            form(r(2, 3, 4), r(2, 3, 4), r(2, 3, 4), r(3, 3)),
        ],
        "aten.reshape.default": [form(r(2, 3), [3, 2]), form(r(1), [])],
        "aten.expand.default": [form(r(1, 3), [2, 3]), form(r(1), [2, -1])],
        "aten.slice.Tensor": [
            form(r(4, 5), 1, 1, 3),
            form(r(4, 5), 0, None, cases.END),
            form(r(4, 5), -1, -3),
            form(r(4, 5, 2), -2, 1, 5, 2),
            form(r(4)),
        ],
        "aten.contiguous.default": [form(r(2, 3).t())],
        "aten.clone.default": [form(r(2, 3).t()), form(r(2, 3).t(), memory_format=torch.contiguous_format)],
        "aten.cat.default": [form([r(2, 3), r(1, 3)]), form([r(2, 3), r(2, 1)], -1)],
        "aten.pad.default": [form(r(2, 3), [1, 1]), form(r(2, 3), [0, 1], "constant", -1.0)],
        "aten.constant_pad_nd.default": [form(r(2, 3), [1, 1]), form(r(2, 3), [0, 1], 2.0)],
        "aten.to.dtype": [form(r(3), torch.float32), form(r(3), torch.float32, False, True)],
        "aten.to.device": [form(r(3), CPU, torch.float32)],
        "aten.to.dtype_layout": [form(r(3), dtype=torch.float32, layout=torch.strided, device=CPU)],
        "aten.sum.default": [form(r(3)), form(r(3), dtype=torch.float32)],
        "aten.mean.default": [form(r(3)), form(r(3), dtype=torch.float32)],
        "aten.mean.dim": [form(r(3, 2), [-1], True), form(r(3, 2), [0], dtype=torch.float32)],
        "aten.masked_fill.Tensor": [form(r(3), r(3) > 0, r())],
        "aten.masked_fill.Scalar": [form(r(3), r(3) > 0, -torch.inf)],
        "aten.where.ScalarOther": [form(r(3) > 0, r(3), 1.0)],
        "aten.arange.default": [form(5), form(5, dtype=torch.int64, device=CPU, pin_memory=False)],
        "aten.arange.start": [form(1, 5, dtype=torch.int32)],
        "aten.arange.start_step": [form(1, 9, 2), form(1, 9)],
        "aten.zeros.default": [form([2, 3], dtype=torch.float64, device=CPU, pin_memory=False), form([2])],
        "aten.ones.default": [form([2, 3], dtype=torch.float64, device=CPU), form([])],
        "aten.full.default": [form([2], 3.5, dtype=torch.float64, device=CPU), form([2], -torch.inf)],
        "aten.zeros_like.default": [form(r(3)), form(r(3), dtype=torch.int64)],
        "aten.ones_like.default": [form(r(3)), form(r(3), dtype=torch.int64)],
        "aten.repeat_interleave.self_int": [form(r(2, 3), 2), form(r(2, 3), 2, 1)],
        **{
            f"aten.{word}.default": [form(r(2, 3)), form(r(2, 3), []), form(r(2, 3), (), True), form(r(2, 3), [1])]
            for word in ("amax", "amin")
        },
        "aten.argmax.default": [form(r(2, 3)), form(r(2, 3), 1, True)],
        "aten.conv1d.default": [form(r(2, 4, 7), r(6, 2, 3), r(6), [2], [1], [1], 2), form(r(2, 4, 7), r(6, 4, 3))],
        "aten.conv2d.default": [form(r(2, 4, 7, 5), r(6, 2, 3, 3), r(6), [2, 2], [1, 1], [1, 1], 2)],
        "aten.conv3d.default": [form(r(1, 2, 4, 4, 4), r(3, 2, 2, 2, 2), None, [2, 2, 2])],
        "aten.conv_transpose1d.default": [form(r(2, 4, 5), r(4, 3, 3), r(3), [2], [1], [1])],
        "aten.conv_transpose2d.input": [form(r(2, 4, 5, 5), r(4, 3, 3, 3), None, [2, 2], [1, 1], [1, 1])],
        "aten.conv_transpose3d.input": [form(r(1, 2, 3, 3, 3), r(2, 3, 2, 2, 2))],
        "aten.max_pool2d.default": [form(r(2, 3, 6, 6), [2, 2]), form(r(2, 3, 7, 7), [3, 3], [2, 2], [1, 1])],
        "aten.avg_pool2d.default": [
            form(r(2, 3, 6, 6), [2, 2]),
            form(r(2, 3, 6, 6), [2, 2], [1, 1], [1, 1], False, False),
        ],
        "aten.adaptive_avg_pool2d.default": [form(r(2, 3, 6, 6), [1, 1])],
        "aten.scatter.src": [form(r(3, 4), 1, i(4, 3, 4), r(3, 4))],
        "aten.scatter_add.default": [form(r(3, 4), 1, i(4, 3, 4), r(3, 4))],
        "aten.topk.default": [form(r(3, 5), 2), form(r(3, 5), 2, 0, False)],
        "aten.lerp.Scalar": [form(r(3), r(3), 0.1)],
        "aten.roll.default": [form(r(4), [1]), form(r(4, 2), [1], [0])],
    }


torch.manual_seed(0)
ALL = {target: list(forms) for target, forms in (moving_cases() | numeric_cases() | statistics()).items()}
for _target, _forms in more().items():
    ALL.setdefault(_target, []).extend(_forms)


def leaves(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [leaf for one in value for leaf in leaves(one)] if isinstance(value, tuple | list) else []


def fresh(value: Any) -> Any:
    """The same arguments, floating tensors as new leaves."""
    if isinstance(value, Fixed):
        return value.as_subclass(Tensor)
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.is_floating_point())
    return type(value)(fresh(one) for one in value) if isinstance(value, tuple | list) else value


def named(value: Any, names: dict[str, Tensor]) -> Any:
    """The arguments with variables in place of tensors."""
    if isinstance(value, Tensor):
        names[f"t{len(names)}"] = value
        return Written(f"t{len(names) - 1}")
    return tuple(named(one, names) for one in value) if isinstance(value, tuple | list) else value


def outcome(results: Any, inputs: list[Tensor]) -> list[Tensor]:
    """Results and gradients."""
    found = leaves(results)
    roots = [one for one in found if one.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.linspace(1, 2, one.numel()).to(one).reshape(one.shape) for one in roots])
    return [*(one.detach() for one in found), *(one.grad for one in inputs if one.grad is not None)]


def check(target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    operator = overload(target)
    assert operator is not None
    plain = fresh(args), {name: fresh(value) for name, value in kwargs.items()}
    expected = outcome(operator(*plain[0], **plain[1]), leaves((plain[0], list(plain[1].values()))))
    names: dict[str, Tensor] = {}
    again = named(fresh(args), names), {name: named(fresh(value), names) for name, value in kwargs.items()}
    text = expression(target, again[0], again[1], show)
    made = eval(text, {"torch": torch, "F": F, "self": SimpleNamespace(device=CPU)}, names)
    found = outcome(made, list(names.values()))
    assert len(found) == len(expected), text
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), text
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num()), text
    return text


@pytest.mark.parametrize("target", sorted({*TEMPLATES, "aten.slice.Tensor"}))
def test_row(target: str) -> None:
    texts = [check(target, args, kwargs) for args, kwargs in ALL.get(target, ())]
    assert texts, "no arguments to try this row with"
    assert any(not text.startswith("torch.ops.") for text in texts), "the row is never used"


@pytest.mark.parametrize("target", sorted({*TEMPLATES, *PRODUCTS}))
def test_a_row_asks_for_no_argument_that_a_call_may_leave_out(target: str) -> None:
    operator, row = overload(target), TEMPLATES.get(target, "") + " " + PRODUCTS.get(target, "")
    assert operator is not None
    demanded = {word for word in re.findall(r"[A-Za-z_][\w?=]*", row) if word[-1] not in "?="}
    assert not {one.name for one in operator._schema.arguments if one.has_default_value()} & demanded


def test_other_calls_are_left_to_the_operator() -> None:
    assert expression("aten.add.Tensor", (Written("x"), Written("y")), {"alpha": 2}, show).startswith("torch.ops.aten")
    assert expression("aten.sub.Tensor", (1.0, Written("y")), {}, show) == "torch.ops.aten.sub.Tensor(1.0, y)"
    assert expression("aten.erfinv.default", (Written("x"),), {}, show) == "torch.ops.aten.erfinv.default(x)"
