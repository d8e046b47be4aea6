"""Placeholders of the exported program bound to the module's own tensors.

Leaves: for every placeholder a handle, and lists of inputs, parameters, buffers and constants by their dotted names.
A tied parameter is two placeholders and one handle.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec

from weft.capture.builder import Builder
from weft.capture.convert import ROOT, fresh
from weft.capture.example import Example
from weft.capture.functional import FOREIGN, Handle
from weft.capture.tracing.watch import memory_of


@dataclass(frozen=True)
class Stored:
    """A parameter or buffer of the module: the tensor, its dotted names, its handle if forward was given it."""

    value: torch.Tensor
    names: tuple[str, ...]
    persistent: bool = True
    handle: Handle | None = None

    @property
    def name(self) -> str:
        """Working name of its value before forward."""
        return f"stored:{self.names[0]}"


@dataclass(frozen=True)
class Constant:
    """A tensor baked into the program."""

    name: str
    """Working name."""
    value: torch.Tensor
    label: str


@dataclass(frozen=True)
class State:
    """What the placeholders are. `placeholders` stand in the program's order."""

    placeholders: tuple[Any, ...]
    inputs: tuple[str, ...]
    """Working names, in the order of the example's tensors."""
    parameters: tuple[Stored, ...]
    buffers: tuple[Stored, ...]
    constants: tuple[Constant, ...]


def bind_state(
    module: nn.Module, example: Example, program: ExportedProgram, builder: Builder, trained: Collection[int]
) -> State:
    """Put every tensor that no op makes into the builder.

    Args:
        trained: the memory of parameters that the module does not have: what the program holds requires no gradient.
    """
    attributes = {
        f"{path}.{name}" if path else name
        for path, sub in module.named_modules(remove_duplicate=False)
        for name in vars(sub)
    }
    binder = Binder(
        example, program, builder, gather(module, "_parameters"), gather(module, "_buffers"), attributes, trained
    )
    nodes = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    placeholders = tuple(binder.bind(spec, nodes) for spec in program.graph_signature.input_specs)
    return State(
        placeholders,
        tuple(handle.name for handle in binder.inputs),
        tuple(replace(stored, handle=binder.handles.get(stored.names[0])) for stored in binder.parameters),
        tuple(replace(stored, handle=binder.handles.get(stored.names[0])) for stored in binder.buffers),
        tuple(binder.constants),
    )


@dataclass
class Binder:
    """The state of one binding."""

    example: Example
    program: ExportedProgram
    builder: Builder
    parameters: list[Stored]
    buffers: list[Stored]
    attributes: set[str]
    """Dotted names of what the modules hold besides."""
    trained: Collection[int]
    handles: dict[str, Handle] = field(default_factory=dict)
    inputs: list[Handle] = field(default_factory=list)
    constants: list[Constant] = field(default_factory=list)

    def bind(self, spec: InputSpec, nodes: dict[str, Any]) -> Any:
        """The handle for one placeholder; a plain value for one that is no tensor."""
        value = nodes.get(getattr(spec.arg, "name", ""))
        if not isinstance(value, torch.Tensor):
            return value if value is not None else getattr(spec.arg, "value", None)
        dotted = (spec.target or "").removeprefix(ROOT).removeprefix(".")
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            return self.bind_stored(dotted, value, "parameter" if spec.kind is InputKind.PARAMETER else "buffer")
        if spec.kind is InputKind.USER_INPUT:
            return self.bind_input(value)
        return self.bind_constant(spec.target or "", value)

    def bind_stored(self, dotted: str, value: torch.Tensor, kind: str) -> Handle:
        group = self.parameters if kind == "parameter" else self.buffers
        stored = next(stored for stored in group if dotted in stored.names)
        if dotted not in self.handles:
            handle = self.place(value, stored.name, kind, stored.names[0], stored.value.requires_grad)
            self.handles |= dict.fromkeys(stored.names, handle)
        return self.handles[dotted]

    def bind_input(self, value: torch.Tensor) -> Handle:
        position = len(self.inputs)
        label = self.example.names[position]
        needs_grad = self.example.values[position].requires_grad
        self.inputs.append(self.place(value, f"input:{label}", "input", label, needs_grad))
        return self.inputs[-1]

    def bind_constant(self, target: str, value: torch.Tensor) -> Handle:
        """A tensor written out in forward is copied first, anew in each call; others last, so they must not change."""
        real = self.program.constants[target]
        dotted = target.removeprefix(f"{ROOT}.")
        is_attribute = dotted in self.attributes
        label = dotted if is_attribute else "constant"
        needs_grad = isinstance(real, torch.Tensor) and (real.requires_grad or memory_of(real) in self.trained)
        handle = self.place(value, f"constant:{target}", "attribute" if is_attribute else FOREIGN, label, needs_grad)
        self.constants.append(Constant(handle.name, real, label))
        return handle

    def place(self, value: torch.Tensor, name: str, kind: str, label: str, needs_grad: bool) -> Handle:
        with self.builder.mode, torch.no_grad():
            fake = value.detach()
        fake.requires_grad_(needs_grad)
        return fresh(self.builder.place(fake, name), value, kind, label)


def gather(module: nn.Module, kind: str) -> list[Stored]:
    """The module's parameters or buffers, each once, with all names in the order of the module tree."""
    names: dict[int, list[str]] = {}
    values: dict[int, torch.Tensor] = {}
    persistent: dict[int, bool] = {}
    for path, sub in module.named_modules(remove_duplicate=False):
        for name, value in vars(sub)[kind].items():
            if value is None:
                continue
            names.setdefault(id(value), []).append(f"{path}.{name}" if path else name)
            values[id(value)] = value
            lasting = kind == "_parameters" or name not in sub._non_persistent_buffers_set
            persistent[id(value)] = persistent.get(id(value), False) or lasting
    return [Stored(values[key], tuple(names[key]), persistent[key]) for key in names]
