"""Runs torch.export over the module.

Enters: module and flattened example. Leaves: a `Trace`: the exported program (pre-dispatch ATen, still with in-place
operators and grad-mode regions), what its markers stand for, and how the output nests. The module's parameters are
never read: export works on fake tensors of the same shapes. Promised: the module, its mode and all random states are
as before, also after an error; an error names the user's line.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx.proxy import TracerBase

from weft.capture.example import Example, Output, dynamic_shapes, flatten_output
from weft.capture.intercept import Interception, LayerDrop, intercept
from weft.capture.refuse import Translating
from weft.capture.source import keep_users_frame
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

    def __init__(self, module: nn.Module, example: Example, seen: Callable[[Output], None]) -> None:
        super().__init__()
        self.module = module
        self.training = module.training
        self.example, self.seen = example, seen

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = self.example.arguments(tensors)
        watch = Watch(self.module)
        try:
            with LayerDrop():
                result = self.module(*args, **kwargs)
            watch.refuse_changes(lambda: self.module(*args, **kwargs))
            for old, new in watch.updates():
                with torch.no_grad():
                    old.copy_(new)
            output, leaves = flatten_output(result)
        finally:
            watch.restore()
        self.seen(output)
        return tuple(leaves)


def trace(module: nn.Module, example: Example, dynamic: Mapping[str, tuple[int, ...]]) -> Trace:
    """Export the module on fake tensors."""
    outputs: list[Output] = []
    traced = Traced(module, example, outputs.append)
    shapes = tuple(dynamic_shapes(example, dynamic))
    states = torch.get_rng_state()
    with ExitStack() as stack:
        found = stack.enter_context(intercept())
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(torch.enable_grad())
        stack.callback(torch.set_rng_state, states)
        stack.callback(Watch(module).restore)
        warnings.simplefilter("ignore")
        stack.enter_context(mock.patch.object(TracerBase, "_filter_traceback_frames", keep_users_frame))
        stack.enter_context(Translating(module))
        program = torch.export.export(traced, stand_ins(example), dynamic_shapes={"tensors": shapes}, strict=False)
    return Trace(program, found, outputs[-1])


def stand_ins(example: Example) -> tuple[torch.Tensor, ...]:
    """A tensor of its own for every input: export takes one object given twice for a single input."""
    return tuple(
        torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, requires_grad=value.requires_grad)
        for value in example.values
    )
