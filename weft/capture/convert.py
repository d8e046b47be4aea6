"""FX nodes -> Ops.

Enters: a traced FX graph, and a handle for each of its placeholders. Leaves: a `Builder` full of Ops in execution
order, and handles of the outputs. On the way grad-mode and autocast regions become contexts of single ops, checkpoint
markers become region numbers, in-place operators their twins, multi-output operators lose their getitems, assertions
and size arithmetic disappear.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils import _pytree as pytree

from weft.capture.builder import Builder, Call, Context, may_alias
from weft.capture.draws import drops_nothing, is_random
from weft.capture.functional import (
    RESHAPING,
    Cell,
    Handle,
    check_writable,
    read,
    result_of,
    twin_of,
    unwritable,
    write,
)
from weft.capture.rewritten import (
    Selected,
    composed,
    emit_bag,
    is_bag,
    refuse_selected,
    selection,
    targets_as_rows,
    update_statistics,
    updates_statistics,
    with_repeated_heads,
)
from weft.capture.sizes import is_data_dependent
from weft.capture.source import source_of_trace
from weft.capture.tracing.expect import EXPECT, Expectation
from weft.capture.tracing.intercept import DIRICHLET, ENTER, FUNCTION, LEAVE, Interception
from weft.capture.tracing.refuse import NUMBER, NUMBER_REMEDY
from weft.capture.tracing.trace import GRAD_MODE
from weft.capture.views import Step
from weft.errors import CaptureError
from weft.ir.graph import Autocast, Ref

aten = torch.ops.aten
ROOT = "module"
"""The name under which the traced wrapper holds the user's module."""


@dataclass
class Converter:
    """The state of one conversion."""

    builder: Builder
    found: Interception
    environment: dict[fx.Node, Any] = field(default_factory=dict)
    regions: list[tuple[int, bool]] = field(default_factory=list)
    """Open checkpoint regions: number, and whether gradients flow in them."""
    draws: int = 0
    expected: list[Expectation] = field(default_factory=list)

    def run(self, module: fx.GraphModule, arguments: Sequence[Any], around: Context) -> Any:
        """Convert a graph whose placeholders stand for `arguments`; what its output node holds."""
        given = iter(arguments)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                self.environment[node] = next(given)
            elif node.op == "get_attr":
                self.environment[node] = getattr(module, node.target)
            elif node.op == "output":
                return self.value(node.args[0])
            else:
                self.environment[node] = self.call(node, self.context(node, around))
        raise AssertionError("an FX graph ends with its output node")

    def value(self, arg: Any) -> Any:
        """An FX argument with nodes replaced by what they stand for."""
        return fx.map_arg(arg, lambda node: self.environment[node])

    def context(self, node: fx.Node, around: Context) -> Context:
        path, call = address_of(node)
        source = source_of_trace(node.meta.get("stack_trace"))
        grad = node.meta.get(GRAD_MODE, around.grad) and all(flows for _, flows in self.regions)
        recompute = self.regions[0][0] if self.regions else None
        return replace(around, path=path, call=call, source=source, grad=grad, recompute=recompute)

    def call(self, node: fx.Node, context: Context) -> Any:
        """One call_function node."""
        target = node.target
        args, kwargs = self.value(node.args), self.value(node.kwargs)
        if target is operator.getitem and not is_number(node.meta.get("val")):
            return args[0][args[1]]
        if isinstance(target, HigherOrderOperator):
            return self.region(target, args, context)
        if is_transform(target):
            raise transformed(target, context)
        if not isinstance(target, OpOverload) or is_number(node.meta.get("val")):
            return self.number(node, context)
        if target.namespace == "weft":
            return self.marker(str(target), args, node, context)
        if not target._schema.returns:
            if target._schema.is_mutable:
                raise unwritable(target, context)
            return None
        return self.operator(Call(target, tuple(args), dict(kwargs), context), node)

    def marker(self, target: str, args: tuple[Any, ...], node: fx.Node, context: Context) -> Any:
        """What stands for a call that export would lose (`intercept.py`)."""
        if target in (ENTER, LEAVE):
            return self.checkpoint(target, args)
        if target == DIRICHLET:
            return self.dirichlet(args[0], node, context)
        if target == FUNCTION:
            return self.function(args, node, context)
        assert target == EXPECT, target
        predicate, expected = args
        return self.expected.append(Expectation(read(predicate, self.builder, context), expected, context.place))

    def region(self, target: HigherOrderOperator, args: tuple[Any, ...], context: Context) -> Any:
        """A grad-mode or autocast region, flattened."""
        name = target.name()
        if name == "wrap_with_set_grad_enabled":
            _, module, *rest = args
            return self.run(module, rest, context)
        if name == "wrap_with_autocast":
            device, dtype, enabled, _, module, *rest = args
            return self.run(module, rest, replace(context, autocast=inner_autocast(context, device, dtype, enabled)))
        raise CaptureError(
            f"forward uses torch.{name}, which cannot be taken apart",
            place=context.place,
            remedy="write the computation with ordinary operators",
        )

    def number(self, node: fx.Node, context: Context) -> Any:
        """Size arithmetic: its value is known from the trace."""
        value = node.meta.get("val")
        if is_data_dependent(value) and not all(is_assertion(user) for user in node.users):
            raise CaptureError(
                NUMBER,
                place=context.place,
                remedy=NUMBER_REMEDY,
            )
        return value

    def checkpoint(self, target: str, args: tuple[Any, ...]) -> None:
        """A marker: a checkpoint region begins or ends.

        A reentrant checkpoint none of whose arguments needs a gradient gives its parameters none either.
        """
        if target == LEAVE:
            assert self.regions.pop()[0] == args[0], "checkpoint regions nest"
            return
        number, reentrant, tensors = args
        flows = not reentrant or any(self.builder.needs_grad(handle.name) for handle in tensors)
        if not flows and self.found.requires:
            raise CaptureError(
                "a reentrant checkpoint whose inputs may require a gradient only by requires_grad_()",
                place=self.found.requires,
                remedy="checkpoint(..., use_reentrant=False)",
            )
        self.regions.append((number, flows))

    def function(self, args: tuple[Any, ...], node: fx.Node, context: Context) -> list[Handle]:
        """An opaque autograd.Function."""
        applied = self.found.functions[args[0]]
        tensors = [Ref(read(handle, self.builder, context)) for handle in args[1]]
        names = self.builder.emit_function(applied.name, applied, tuple(applied.arguments(tensors)), context)
        return [fresh(name, value) for name, value in zip(names, node.meta["val"], strict=True)]

    def dirichlet(self, concentration: Handle, node: fx.Node, context: Context) -> Handle:
        """A draw that torch makes in an autograd.Function."""
        operand = Ref(read(concentration, self.builder, context))
        # torch's own operator has no derivative: its Function has
        name = self.builder.emit_runtime(
            "aten._sample_dirichlet.default", torch.clone, (operand,), {}, context, draw=self.draws
        )
        self.draws += 1
        return fresh(name, node.meta["val"])

    def operator(self, call: Call, node: fx.Node) -> Any:
        """An ATen operator, or a user's from a torch library."""
        value, context = node.meta["val"], call.context
        other = self.stand_in(call, node)
        if other is not None:
            return other
        if is_data_dependent(value):
            raise CaptureError(
                f"the shape that {call.target} returns depends on the values in a tensor",
                place=context.place,
                remedy="keep the shape and mask instead (torch.where, masked_fill, multiplication by the mask)",
            )
        if is_identity(call, value):
            return call.args[0]
        random = is_random(call)
        draw = self.draws if random else None
        self.draws += random
        if str(call.target) == "aten.cat.default":
            call = replace(call, args=(self.without_empty(call.args[0], context), *call.args[1:]))
            if len(call.args[0]) == 1:
                return fresh(read(call.args[0][0], self.builder, context), value)
        if call.name in ("lift_fresh_copy", "lift_fresh"):
            return fresh(read(call.args[0], self.builder, context), value, "constant")
        made = with_repeated_heads(self.resolved(call), self.builder)
        is_viewing = not context.grad and not call.target._schema.is_mutable
        if is_viewing and call.args and isinstance(call.args[0], Handle) and self.builder.returns_itself(made):
            return call.args[0]
        if updates_statistics(made):
            name, means = update_statistics(made, self.builder)
            for key, mean in zip(("running_mean", "running_var"), means, strict=True):
                write(call.values[key], mean, self.builder, context)
            return fresh(name, value)
        if call.target._schema.is_mutable:
            return self.mutate(call, draw)
        names = self.builder.emit(call.target, made.args, made.kwargs, context=context, draw=draw)
        return handles_of(made, call.args, names, value)

    def stand_in(self, call: Call, node: fx.Node) -> Any:
        """What takes the place of a call that no op can be as it stands; None for all others."""
        refuse_selected(call)
        if any(isinstance(arg, Selected) for arg in (*call.args, *call.kwargs.values())):
            # a ctc loss whose targets a mask selects
            values, expected = targets_as_rows(call, self.builder)
            self.expected.append(expected)
            given = self.resolve(values, call.context)
            return fresh(self.builder.ref(call.target, *given.values(), context=call.context).name, node.meta["val"])
        if is_bag(call, node):
            return [fresh(emit_bag(self.resolved(call), self.builder), node.meta["val"][0]), None, None, None]
        if call.name == "broadcast_tensors":
            pairs = zip(call.args[0], node.meta["val"], strict=True)
            return [self.expand(handle, value.shape, call.context) for handle, value in pairs]
        return selection(call, self.builder)

    def expand(self, handle: Handle, shape: Sequence[Any], context: Context) -> Handle:
        """A handle seen in a larger shape; itself where the shape is its own."""
        name = read(handle, self.builder, context)
        if self.builder.fakes[name].shape == shape:
            return handle
        return self.viewed(handle, Step(aten.expand.default, (list(shape),), {}, None), context)

    def without_empty(self, handles: Sequence[Handle], context: Context) -> list[Handle]:
        """`cat` lets a tensor of shape (0,) stand beside tensors of any rank: it adds nothing and has no dim to cut."""
        fakes = [self.builder.fakes[read(handle, self.builder, context)] for handle in handles]
        kept = [handle for handle, fake in zip(handles, fakes, strict=True) if fake.shape != (0,)]
        same_dtype = len({fake.dtype for fake in fakes}) == 1
        return kept if kept and same_dtype else list(handles)

    def resolve(self, tree: Any, context: Context) -> Any:
        """Handles replaced by references to their present values."""
        return pytree.tree_map(
            lambda leaf: Ref(read(leaf, self.builder, context)) if isinstance(leaf, Handle) else leaf, tree
        )

    def resolved(self, call: Call) -> Call:
        """The call on present values."""
        return replace(call, args=self.resolve(call.args, call.context), kwargs=self.resolve(call.kwargs, call.context))

    def mutate(self, call: Call, draw: int | None) -> Any:
        """An operator that writes into an argument."""
        if call.name in RESHAPING:
            return self.reshape_in_place(call)
        if "out" in call.kwargs:
            return self.write_out(call, draw)
        if call.name == "embedding_renorm_":
            raise CaptureError(
                f"an embedding with max_norm changes its weight {call.args[0].cell.label} in forward",
                place=call.context.place,
                remedy="leave out max_norm; shrink the rows that are too long outside forward, after the "
                "optimizer's step, or divide the looked-up rows by their norm",
            )
        check_writable(call.args[0], self.builder, call.context)
        resolved = self.resolved(call)
        value = composed(resolved, self.builder, draw) or result_of(resolved, self.builder, draw)
        write(call.args[0], value, self.builder, call.context)
        return call.args[0]

    def reshape_in_place(self, call: Call) -> Handle:
        """`x.unsqueeze_(0)`: from here on x is the view."""
        handle: Handle = call.args[0]
        view = self.viewed(handle, Step(twin_of(call.target, call.context), call.args[1:], {}, None), call.context)
        for other, value in self.environment.items():
            if value is handle:
                self.environment[other] = view
        return view

    def viewed(self, handle: Handle, step: Step, context: Context) -> Handle:
        """A view of a handle, made."""
        view = replace(handle, parent=handle, step=step, version=-1)
        read(view, self.builder, context)
        return view

    def write_out(self, call: Call, draw: int | None) -> Handle:
        """`torch.add(a, b, out=c)`: the functional overload, then written into c."""
        context = call.context
        out: Handle = call.kwargs["out"]
        given = self.resolved(replace(call, kwargs={key: one for key, one in call.kwargs.items() if key != "out"}))
        twin = twin_of(call.target, context)
        name = self.builder.emit(twin, given.args, given.kwargs, context=context, draw=draw)[0]
        copied = Call(aten.copy_.default, (Ref(read(out, self.builder, context)), Ref(name)), {}, context)
        write(out, result_of(copied, self.builder), self.builder, context)
        return out


def address_of(node: fx.Node) -> tuple[str, int]:
    """Path and call of the innermost module, from the keys of the recorded module stack."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return "", 0
    key, (path, _) = list(stack.items())[-1]
    call = key.rpartition("@")[2] if "@" in key else ""
    path = path.partition("@")[0]
    return path.removeprefix(ROOT).removeprefix("."), int(call) if call.isdigit() else 0


def inner_autocast(context: Context, device: str, dtype: torch.dtype | None, enabled: bool) -> Autocast | None:
    """The autocast inside a region, given the one around it."""
    outer = context.autocast
    if outer is None and not enabled:
        return None
    if outer is not None and outer.device != device:
        raise CaptureError(
            f"autocast for {device} inside autocast for {outer.device}",
            place=context.place,
            remedy="one device type for all autocast regions",
        )
    return Autocast(device, dtype or torch.get_autocast_dtype(device), enabled)


def is_number(value: Any) -> bool:
    """Whether a node's value is a size or a number, not a tensor."""
    return isinstance(value, int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool)


def is_transform(target: Any) -> bool:
    """Whether a node opens or closes a transform of torch.func."""
    return isinstance(target, FunctionType) and target.__module__.startswith("torch._functorch")


def transformed(target: Any, context: Context) -> CaptureError:
    """The refusal of a transform."""
    is_batch = not any(word in target.__name__ for word in ("jvp", "grad", "fwd", "dual"))
    return CaptureError(
        f"forward calls {'torch.vmap' if is_batch else 'a derivative of torch.func'}, which cannot be taken apart",
        place=context.place,
        remedy="write the computation for the whole batch: most operators take leading batch dims as they are"
        if is_batch
        else "write the derivative with ordinary operators, or an autograd.Function; or take it outside forward",
    )


def is_assertion(node: fx.Node) -> bool:
    """Whether a node checks a number, or compares it for no other end."""
    if "assert" in str(node.target) or "constrain_range" in str(node.target):
        return True
    return is_number(node.meta.get("val")) and bool(node.users) and all(map(is_assertion, node.users))


def is_identity(call: Call, value: Any) -> bool:
    """Operators whose output is their input, in a functional program."""
    if call.name == "detach_":
        return call.args[0].cell.kind == "constant"  # type: ignore[no-any-return]
    return drops_nothing(call, is_empty=isinstance(value, torch.Tensor) and 0 in value.shape)


def storage_of(value: torch.Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def fresh(name: str, value: torch.Tensor, kind: str = "op", label: str = "") -> Handle:
    """A handle on new memory."""
    return Handle(Cell(kind, label), name, 0, storage_of(value))


def handles_of(made: Call, args: tuple[Any, ...], names: list[str], values: Any) -> Any:
    """Handles for the outputs of an operator: views of its first argument where memory is shared."""
    is_list = isinstance(values, tuple | list)
    handles = []
    for index, (name, value) in enumerate(zip(names, values if is_list else [values], strict=True)):
        source = args[0] if args and isinstance(args[0], Handle) else None
        if source is not None and (may_alias(made.target) or is_list) and source.storage == storage_of(value):
            step = Step(made.target, made.args[1:], made.kwargs, index if is_list else None)
            handles.append(Handle(source.cell, name, source.cell.version, source.storage, source, step))
        else:
            handles.append(fresh(name, value))
    return handles if is_list else handles[0]
