"""Branches on values that can go one way only while all is well: what is expected of them, checked in every step.

Enters: a truth value that forward asks of a tensor while it is traced. Leaves: the answer, where the user's line shows
what a healthy run gives; and at the end an op `weft.expect` on the loss, which raises in a step that goes another way.

- `if labels.max() >= n: raise ...`, and `assert`: the branch that raises is not taken.
- `if not torch.isfinite(x).all(): ...`, and the same with `isnan` or `isinf`: values are finite.

Any other branch on values is refused, as before.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from weft.capture.builder import Builder, Context
from weft.capture.source import OURS
from weft.ir.graph import Ref
from weft.runtime.operators.pointwise import expect

EXPECT = "weft.expect.default"
"""The marker in a traced graph: predicate, expected value."""
HANDLERS = ("__torch_function__", "__bool__")
"""Functions that stand between the line that asks and us."""
Position = tuple[int, int]
"""Line and column."""
FINITE = {"isfinite": True, "isnan": False, "isinf": False}
"""What these say of finite values."""


@dataclass(frozen=True)
class Expectation:
    """What forward expects: the tensor's working name, its value, and the line that asked."""

    predicate: str
    expected: bool
    place: str


def expected_here(value: Any) -> bool | None:
    """What the line that is running now expects of a truth value; None if the line does not say."""
    if not isinstance(value, FakeTensor) or value.constant is not None:
        return None
    frame = sys._getframe(1)
    # torch's own checks count too, as those of its distributions
    while frame.f_back is not None and (frame.f_code.co_filename.startswith(OURS) or frame.f_code.co_name in HANDLERS):
        frame = frame.f_back
    text = "".join(linecache.getlines(frame.f_code.co_filename))
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return None
    # the jump has the position of the whole statement; what was computed right before it is the value it asks
    positions = list(frame.f_code.co_positions())[: frame.f_lasti // 2 + 1]
    line, _, column, _ = next((one for one in reversed(positions) if one != positions[-1]), (None,) * 4)
    return None if line is None or column is None else _expected(tree, (line, column))


def _expected(tree: ast.Module, at: Position) -> bool | None:
    """What the innermost test around a position expects of the truth value that is asked there."""
    tests = [node for node in ast.walk(tree) if isinstance(node, ast.If | ast.Assert) and _holds(node.test, at)]
    if not tests:
        return None
    asking = max(tests, key=lambda node: (node.lineno, node.col_offset))
    if isinstance(asking, ast.Assert):
        return _of_term(asking.test, True, at)
    if not asking.orelse and all(isinstance(node, ast.Raise) for node in asking.body):
        return _of_term(asking.test, False, at)
    names = {node.attr for node in ast.walk(asking.test) if isinstance(node, ast.Attribute)}
    found = {FINITE[name] for name in names & set(FINITE)}
    return found.pop() if len(found) == 1 else None


def _holds(test: ast.expr, at: Position) -> bool:
    assert test.end_lineno is not None and test.end_col_offset is not None, "parsed from text"
    return (test.lineno, test.col_offset) <= at < (test.end_lineno, test.end_col_offset)


def _of_term(test: ast.expr, expected: bool, at: Position) -> bool:
    """What the term of a test at a position is to be, so that the whole is as expected."""
    match test:
        case ast.UnaryOp(op=ast.Not()):
            return _of_term(test.operand, not expected, at)
        case ast.BoolOp():
            term = next((one for one in test.values if _holds(one, at)), test.values[-1])
            return _of_term(term, expected, at)
        case _:
            return expected


def emit_expectations(
    found: Sequence[Expectation], results: Sequence[str], loss: int | None, builder: Builder
) -> list[str]:
    """The results, the loss among them (or the first) behind a check of all that is expected."""
    if not found or not results:
        return list(results)
    at = 0 if loss is None else loss
    args = (Ref(results[at]), tuple(Ref(one.predicate) for one in found))
    options = {
        "expected": tuple(one.expected for one in found),
        "places": tuple(one.place for one in found),
    }
    checked = builder.emit_runtime("weft.expect", expect, args, options, Context())
    return [checked if i == at else name for i, name in enumerate(results)]


def define(library: torch.library.Library) -> None:
    """The marker, while a trace runs."""
    library.define("expect(Tensor predicate, bool expected) -> ()")
    torch.library.register_fake("weft::expect", lambda predicate, expected: None, lib=library)
