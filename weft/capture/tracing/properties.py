"""What forward asks of tensors that is no value of theirs, and that a program would hold as it is in the trace.

Enters: a traced forward. Leaves: nothing, or a `CaptureError` with the line of the user's own code that asks: for an
attribute that somebody gave a parameter, a buffer or an input (export's stand-ins have none, so `getattr(t, "gain",
1.0)` would give the default), for gradients, versions and addresses, and for whether two inputs are one object.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from traceback import FrameSummary
from types import CodeType
from typing import Any
from unittest import mock

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from weft.capture.source import OURS, is_own, place_here, place_of
from weft.errors import CaptureError

GRAD, VERSION, IS_LEAF = (getattr(Tensor, name).__get__ for name in ("grad", "_version", "is_leaf"))
FROZEN: Mapping[Any, tuple[str, str]] = {
    GRAD: ("asks for a gradient (.grad)", "use gradients between backward() and optimizer.step()"),
    VERSION: ("asks how often a tensor was changed (._version)", "count in a buffer"),
    IS_LEAF: ("asks whether a tensor is a leaf (.is_leaf)", "ask for requires_grad, or pass a flag in"),
    Tensor.data_ptr: ("asks where a tensor lies (data_ptr())", "compare the objects (is), or keep a flag in __init__"),
}
"""Questions whose answers last no longer than the trace."""


def refuse_frozen(func: Callable[..., Any]) -> None:
    """Raise if the user's own code asks such a question."""
    if func in FROZEN and asker_is_own():
        what, remedy = FROZEN[func]
        raise CaptureError(
            f"forward {what}: the answer would be frozen into the program", place=place_here(), remedy=remedy
        )


def asker_is_own() -> bool:
    """Whether the user's own code called into Weft, not torch or an installed package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(OURS):
        frame = frame.f_back
    return is_own(frame.f_code.co_filename)


class Attached:
    """Attributes that tensors were given, by the tensors that stand for them in a trace.

    Args:
        module: whose parameters and buffers are looked at.
        inputs: by name.
    """

    def __init__(self, module: nn.Module, inputs: Mapping[str, Tensor]) -> None:
        named: dict[str, Tensor] = {f"the parameter {name}": one for name, one in module.named_parameters()}
        named |= {f"the buffer {name}": one for name, one in module.named_buffers()}
        named |= {f"the input {name}": one for name, one in inputs.items()}
        self._given = {label: dict(vars(one)) for label, one in named.items() if vars(one)}
        self._labels: dict[int, str] = {}

    @contextmanager
    def shown(self, module: nn.Module, inputs: Mapping[str, Tensor]) -> Iterator[None]:
        """While this is entered, the stand-ins have the attributes; forward may not read them."""
        named = {id(one): f"the parameter {name}" for name, one in module.named_parameters()}
        named |= {id(one): f"the buffer {name}" for name, one in module.named_buffers()}
        self._labels = named | {id(one): f"the input {name}" for name, one in inputs.items()}
        names = {name for held in self._given.values() for name in held if not hasattr(FakeTensor, name)}
        with ExitStack() as stack:
            for name in sorted(names):
                stack.enter_context(mock.patch.object(FakeTensor, name, self._property(name), create=True))
            yield

    def _property(self, name: str) -> property:
        def read(tensor: Tensor) -> Any:
            label = self._labels.get(id(tensor), "")
            held = {**self._given.get(label, {}), **vars(tensor)}
            if name not in held:
                raise AttributeError(f"{type(tensor).__name__!r} object has no attribute {name!r}")
            if name not in vars(tensor) and asker_is_own():
                raise CaptureError(
                    f"forward reads the attribute {name} of {label}: it would be frozen into the program",
                    place=place_here(),
                    remedy="keep it as an attribute or a buffer of the module (self.NAME), or pass it in",
                )
            return held[name]

        def write(tensor: Tensor, value: Any) -> None:
            vars(tensor)[name] = value

        return property(read, write, lambda tensor: vars(tensor).pop(name))


def refuse_identity(values: Sequence[Tensor], lines: Mapping[CodeType, Collection[int]]) -> None:
    """Raise if the example has one tensor for two inputs and the user's own code asks whether two names are one object:
    each input has a stand-in of its own.

    Args:
        lines: those that ran, by their code.
    """
    if len({id(one) for one in values}) == len(values):
        return
    own = {code: ran for code, ran in lines.items() if is_own(code.co_filename)}
    for code, ran in own.items():
        before: list[str] = []
        for one in dis.get_instructions(code):
            line = one.positions.lineno if one.positions is not None else None
            is_local = before[-2:] == ["LOAD_FAST"] * 2 or before[-1:] == ["LOAD_FAST_LOAD_FAST"]
            if one.opname == "IS_OP" and is_local and line in ran:
                raise CaptureError(
                    "forward asks whether two names are one object, and the example has one tensor for two inputs: "
                    "in a program each input is a tensor of its own",
                    place=place_of(FrameSummary(code.co_filename, line, code.co_name)),
                    remedy="tell forward by an argument of its own (a flag), or give it the tensor once",
                )
            before = [*before[-1:], one.opname]
