"""Every rule of the room, proven by running it (see `prover.py`), and the errors of those who ask for none."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from contextlib import nullcontext

import pytest
import torch

from tests.ops.cases import Form, moving_cases, r
from tests.ops.cases_algebra import algebra_cases
from tests.ops.cases_losses import loss_cases
from tests.ops.cases_numeric import numeric_cases
from tests.ops.cases_random import random_cases
from tests.ops.cases_talking import talking_cases
from tests.ops.cells import prove_cells, whole_case
from tests.ops.drawn import prove_drawn
from tests.ops.prover import case, check_form, prove, prove_layout
from weft.errors import RuleError
from weft.ir.graph import Graph, Op, Ref, Source, Tensor
from weft.ir.oplayout import plain_cut
from weft.ops.arguments import overload
from weft.ops.build import OpView
from weft.ops.discover import nothing
from weft.ops.precision import Float64Mode
from weft.ops.rules.pointwise import UNTAGGED, is_pointwise
from weft.ops.table import RULES, look_up, rule_for

NO_EMPTY = (
    *("conv", "pool", "upsample", "grid", "col", "addmv", "bilinear", "cross", "pixel", "pad", "_adaptive", "shuffle"),
    *("fft", "stft", "lstm", "gru", "rnn", "quantile"),
)
"""Kernels of torch that refuse empty batches or channels."""
ALIASES = {"transformers.grouped_mm_fallback": "aten._grouped_mm"}
"""Rows for operators of other libraries, which need not be there: they have the rule of another row, and its inputs."""


def all_cases() -> dict[str, list[Form]]:
    """The test inputs of every row: target -> forms."""
    found: dict[str, list[Form]] = {}
    for group in (moving_cases, numeric_cases, algebra_cases, talking_cases, loss_cases, random_cases):
        for target, forms in group().items():
            found.setdefault(target, []).extend(forms)
    return found


CASES = all_cases()


@pytest.mark.parametrize("target", sorted(CASES))
def test_rule(target: str) -> None:
    """Each name that may be cut, even and uneven, in two and three parts, nested, empty, and each pair of names."""
    torch.manual_seed(1)
    empty = not any(word in target for word in NO_EMPTY)
    for form in CASES[target]:
        args, kwargs = form
        if form.draw is not None:
            prove_drawn(target, form)
            continue
        with Float64Mode() if "grouped_mm" in target else nullcontext():
            it = whole_case(target, args, kwargs, fixed=form.fixed, unused=form.unused)
        if it.rule.algorithms or target.startswith("weft.") or "grouped_mm" in target:
            prove_cells(it, empty=empty)  # its cells talk, or run what only the runtime has
        else:
            prove(target, args, kwargs, empty=empty, fixed=form.fixed, unused=form.unused)


def unproven(rows: Iterable[str], targets: Iterable[str]) -> list[str]:
    """Rows, by family, that no target belongs to."""
    proven = {".".join(target.split(".")[:2]) for target in targets}
    return sorted({ALIASES.get(family, family) for family in rows} - proven)


def test_every_row_is_proven() -> None:
    assert not unproven(RULES, CASES), "these rows have no test inputs"


def test_a_row_without_inputs_is_found() -> None:
    for family in ("aten.softmax", "aten.dropout", "aten.mm", "aten.view"):
        assert unproven(RULES, [target for target in CASES if not target.startswith(family + ".")]) == [family]


WHOLE = (
    *("aten.as_strided", "aten.as_strided_copy", "aten.arange", "aten.linspace", "aten.logspace", "aten.eye"),
    *("aten.scalar_tensor", "aten.tril_indices", "aten.triu_indices", "aten.range", "aten.hann_window"),
    *("aten.hamming_window", "aten.block_diag", "aten.cartesian_prod", "aten.diag", "aten.diagflat", "aten.trace"),
)
"""Rows of which nothing may be cut."""


def test_inputs_cut_something() -> None:
    """Inputs so small, or of such a form, that nothing of them can be cut would prove nothing."""
    cut = set()
    for target, forms in CASES.items():
        for form in forms:
            with Float64Mode() if "grouped_mm" in target else nullcontext():
                rule = whole_case(target, *form, fixed=form.fixed, draw=form.draw).rule
            if rule.cuttable:
                cut.add(".".join(target.split(".")[:2]))
                break
    families = {".".join(target.split(".")[:2]) for target in CASES}
    assert families - cut == set(WHOLE)


def _pointwise_targets() -> list[str]:
    found = []
    for full in torch._C._dispatch_get_all_op_names():
        space, _, name = full.partition("::")
        target = f"{space}.{name}" if "." in name else f"{space}.{name}.default"
        if space == "aten" and is_pointwise(Op("it", target, (), (), ())):
            found.append(target)
    return sorted(set(found))


def _values(target: str, kind: str) -> tuple[list[object], dict[str, object]] | None:
    """Arguments made from the schema; None if the schema wants something odd."""
    operator = overload(target)
    assert operator is not None
    shapes = itertools.repeat((4, 3)) if kind == "alike" else iter([(4, 3), (3,), (4, 1), (4, 3)])
    args: list[object] = []
    kwargs: dict[str, object] = {}
    for argument in operator._schema.arguments:
        text = str(argument.type)
        if argument.has_default_value() and "Tensor" not in text:
            continue
        if text in ("Tensor", "Optional[Tensor]"):
            shape = next(shapes)
            value: object = {
                "alike": r(*shape),
                "float": torch.rand(shape, dtype=torch.float64) * 0.5 + 0.25,
                "int": torch.randint(1, 4, shape),
                "bool": torch.rand(shape) > 0.5,
                "mask first": torch.rand(shape) > 0.5 if not args else r(*shape),
                "complex": torch.complex(r(*shape), r(*shape)),
                "integers second": torch.randint(1, 4, shape) if args else r(*shape),
                "one number": torch.rand((), dtype=torch.float64) if args else r(*shape),
            }[kind]
        elif text in ("number", "float", "int", "Scalar"):
            value = 2
        elif text == "bool":
            value = False
        else:
            return None
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


KINDS = ("float", "int", "bool", "mask first", "integers second", "one number", "alike", "complex")


def _prove_pointwise(target: str) -> bool:
    """True if some kind of arguments suits the operator; its rule is then proven with them."""
    for grad, kind in itertools.product((True, False), KINDS):  # some have no derivative
        made = _values(target, kind)
        if made is None:
            return False
        with torch.set_grad_enabled(grad):
            try:
                case(target, *made)
            except (RuntimeError, TypeError, ValueError):
                continue
            prove(target, *made, limit=3)
        return True
    return False


def test_pointwise_operators() -> None:
    torch.manual_seed(2)
    unproven = [target for target in _pointwise_targets() if not _prove_pointwise(target) and target not in CASES]
    assert not unproven, unproven


def test_untagged_names_exist() -> None:
    known = {target.rsplit(".", 1)[0] for target in _pointwise_targets()}
    assert known >= UNTAGGED, sorted(UNTAGGED - known)


def _one(target: str, *shapes: tuple[int, ...]) -> tuple[Op, Graph]:
    tensors = {f"x{i}": Tensor(f"x{i}", shape, torch.float64) for i, shape in enumerate(shapes)}
    tensors["y"] = Tensor("y", (4,), torch.float64)
    refs = tuple(Ref(f"x{i}") for i in range(len(shapes)))
    op = Op("a/it", target, refs, (), ("y",), source=Source("model.py", 7, "y = it(x)"))
    return op, Graph("one", tensors, (), (), (), {}, (op,), ("y",), None)


@pytest.mark.parametrize("target", ["aten.pdist.default", "function:Mine", "other.thing.default", "nonsense"])
def test_no_rule(target: str) -> None:
    op, graph = _one(target, (4, 3), (3,))
    assert look_up(OpView.of(op, graph)) is None
    with pytest.raises(RuleError) as caught:
        rule_for(op, graph)
    assert target in str(caught.value) and "model.py:7" in str(caught.value) and "copy" in caught.value.remedy
    rule = nothing([graph.tensors[name] for name in op.inputs], [graph.tensors["y"]], "")
    check_form(rule)
    assert rule.cuttable == () and rule.source == "none" and len(rule.inputs) == 2


def test_masks_are_refused() -> None:
    op = Op("it", "aten.index.Tensor", (Ref("x"), (Ref("m"),)), (), ("y",))
    tensors = {
        "x": Tensor("x", (4, 3), torch.float64),
        "m": Tensor("m", (4,), torch.bool),
        "y": Tensor("y", (2, 3), torch.float64),
    }
    graph = Graph("one", tensors, (), (), (), {}, (op,), ("y",), None)
    assert look_up(OpView.of(op, graph)) is None
    with pytest.raises(RuleError, match="mask"):
        rule_for(op, graph)


@pytest.mark.parametrize("name", ["i", "o", "b"])
def test_windows_refuse_empty_parts(name: str) -> None:
    it = case("aten.conv2d.default", (r(2, 4, 5, 5), r(6, 4, 3, 3), r(6)))
    with pytest.raises(RuleError, match=f"nothing of '{name}'"):
        prove_layout(it, (plain_cut(name, it.rule.sizes[name], (0, 1)),))


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "text"),
    [
        ("aten.linear.default", (r(2, 3, 4), r(6, 4), r(6)), {}, "b0 b1 k+, n k+, &n -> b0 b1 n"),
        ("aten.addmm.default", (r(6), r(3, 4), r(4, 6)), {}, "&n, m k+, k+ n -> m n"),
        ("aten.view.default", (r(2, 3, 8), [2, 3, 4, 2]), {}, "d0 d1 (d2 d3) -> d0 d1 d2 d3"),
        (
            "aten.split_with_sizes.default",
            (r(2, 12), [8, 2, 2], 1),
            {},
            "d0 [(d1 4) | d1 | d1] -> d0 (d1 4), d0 d1, d0 d1",
        ),
        ("aten.mul.Tensor", (r(4, 3), r(4, 1)), {}, "d0 d1, d0 1 -> d0 d1"),
        ("aten.slice.Tensor", (r(2, 12), 1, 4, 8), {}, "d0 (3 d1) -> d0 d1"),
        ("aten.slice.Tensor", (r(2, 8), 1, 0, 7), {}, "d0 8 -> d0 7"),
        ("aten.sum.dim_IntList", (r(2, 3), [1], True), {}, "d0 d1+ -> d0 1"),
        ("aten.median.dim", (r(2, 3), 1), {}, "d0 d1^ -> d0, d0"),
        ("aten.prod.dim_int", (r(2, 3), 1), {}, "d0 d1! -> d0"),
        ("aten.conv2d.default", (r(2, 4, 5, 5), r(6, 4, 3, 3), r(6)), {}, "b i+ 5 5, o i+ 3 3, &o -> b o 3 3"),
        ("aten.gather.default", (r(4, 6), 1, torch.zeros(4, 3, dtype=torch.int64)), {}, "d0 6, d0 d1 -> d0 d1"),
    ],
)
def test_rules_read_well(target: str, args: tuple[object, ...], kwargs: dict[str, object], text: str) -> None:
    assert str(case(target, args, kwargs).rule) == text


@pytest.mark.parametrize(
    ("target", "args", "sets"),
    [
        ("aten.add.Tensor", (r(4), r(4)), [{0, 1}]),
        ("aten.add.Tensor", (r(4), 3), []),
        ("aten.mul.Tensor", (r(4), r(4)), [{0}, {1}]),
        ("aten.mul.Tensor", (r(4), 3), [{0}]),
        ("aten.div.Tensor", (r(4), r(4)), [{0}]),
        ("aten.where.self", (r(4) > 0, r(4), r(4)), [{1, 2}]),
        ("aten.where.ScalarOther", (r(4) > 0, r(4), 1.0), []),
        ("aten.masked_fill.Scalar", (r(4), r(4) > 0, 0), [{0}]),
        ("aten.masked_fill.Scalar", (r(4), r(4) > 0, -1.0), []),
        ("aten.linear.default", (r(2, 4), r(3, 4), r(3)), [{0, 2}, {1, 2}]),
        ("aten.to.dtype", (r(4), torch.int64), []),
        ("aten.gelu.default", (r(4),), []),
    ],
)
def test_linear_sets(target: str, args: tuple[object, ...], sets: list[set[int]]) -> None:
    assert [set(one) for one in case(target, args).rule.linear] == sets
