"""Runs torch.export over the module.

Enters: module and flattened example. Leaves: a `Trace`: the exported program (pre-dispatch ATen, still with in-place
operators and grad-mode regions), what its markers stand for, and how the output nests. The module's parameters are
never read: export works on fake tensors of the same shapes. Promised: the module, its mode and all random states are
as before, also after an error; an error names the user's line.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram

from weft.capture.example import Example, Output, dynamic_shapes, flatten_output
from weft.capture.intercept import Interception, LayerDrop, intercept
from weft.capture.refuse import Translating
from weft.capture.watch import Watch


@dataclass(frozen=True)
class Trace:
    """A finished trace."""

    program: ExportedProgram
    found: Interception
    output: Output

    @property
    def fake_mode(self) -> FakeTensorMode:
        """The mode that all fake tensors of the program belong to."""
        for node in self.program.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch._subclasses.FakeTensor):
                return value.fake_mode
        return FakeTensorMode(allow_non_fake_inputs=True)


class Traced(nn.Module):
    """What export sees: flat tensors in, flat tensors out, the user's module inside, watched."""

    def __init__(self, module: nn.Module, example: Example) -> None:
        super().__init__()
        self.module = module
        self.training = module.training
        self.__dict__["example"] = example
        self.__dict__["outputs"] = []

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = self.example.arguments(tensors)
        watch = Watch(self.module)
        try:
            with LayerDrop():
                result = self.module(*args, **kwargs)
            watch.refuse_changes(lambda: self.module(*args, **kwargs))
            with torch.no_grad():
                for old, new in watch.updates():
                    old.copy_(new)
            output, leaves = flatten_output(result)
        finally:
            watch.restore()
        self.outputs.append(output)
        return tuple(leaves)


def trace(module: nn.Module, example: Example, dynamic: Mapping[str, tuple[int, ...]]) -> Trace:
    """Export the module on fake tensors."""
    traced = Traced(module, example)
    shapes = dynamic_shapes(example, dynamic)
    states = torch.get_rng_state()
    with ExitStack() as stack:
        found = stack.enter_context(intercept())
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(torch.enable_grad())
        stack.callback(torch.set_rng_state, states)
        warnings.simplefilter("ignore")
        stack.enter_context(Translating(module))
        program = torch.export.export(traced, example.values, dynamic_shapes={"tensors": tuple(shapes)}, strict=False)
    return Trace(program, found, traced.outputs[-1])


