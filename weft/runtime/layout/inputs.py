"""Inputs: the tensors of a batch, brought to the rank's device.

In: a program's forward, and tensors wherever the caller has them. Out: tensors for the forward. What lies on the device
is passed on as it is. Of an input that the program only cuts rows out of (`self.comm.slice`, before anything else reads
it), no more than these rows are moved: it stays where it is, and `slice` moves what it took. Everything else is moved
whole. From the host tensors go through pinned memory, and the rank does not wait for them.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor


def brought(inputs: Sequence[Any], device: torch.device, forward: Callable[..., Any]) -> Sequence[Any]:
    """The inputs for a forward on a device."""
    if all(not isinstance(one, Tensor) or one.device == device for one in inputs):
        return inputs
    cut = sliced_inputs(forward)
    return [one if at in cut or not isinstance(one, Tensor) else moved(one, device) for at, one in enumerate(inputs)]


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device."""
    if tensor.device == device:
        return tensor
    if tensor.device.type == "cpu" and not tensor.requires_grad:
        # from other memory the copy would wait for all that the device has to do
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device, non_blocking=device.type != "cpu")


@cache
def sliced_inputs(forward: Callable[..., Any]) -> frozenset[int]:
    """Positions of the inputs whose first use replaces them by what `self.comm.slice` takes of them.

    Generated forwards run from top to bottom; what is read anywhere else before that, a loop or a function among it, is
    wanted whole."""
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(forward))).body
    assert isinstance(function, ast.FunctionDef), f"{forward} is no forward"
    names = [argument.arg for argument in function.args.args[1:]]
    found, read = set[str](), set[str]()
    for statement in function.body:
        name = _sliced(statement)
        if name in names and name not in read:
            found.add(name)
        read |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    return frozenset(at for at, name in enumerate(names) if name in found)


def _sliced(statement: ast.stmt) -> str | None:
    """The name in `name = self.comm.slice(name, ...)`."""
    match statement:
        case ast.Assign(
            targets=[ast.Name(id=target)],
            value=ast.Call(
                func=ast.Attribute(value=ast.Attribute(value=ast.Name(id="self"), attr="comm"), attr="slice"),
                args=[ast.Name(id=source), *_],
            ),
        ) if target == source:
            return target
    return None
