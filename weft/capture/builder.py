"""Ops, one by one, each tried on fake tensors.

Enters: operators with arguments (`Ref`s, sizes, plain values) and the context they ran in. Leaves: Ops and Tensors
under working names (`assemble.py` gives the final ones). Every op is run once on fake tensors in its own grad mode and
autocast, so shape, dtype and whether a gradient flows are what torch itself says, for rewritten operators too.

While `known_shapes()` is entered, fake tensors pass through two operators that torch knows for fewer arguments than it
computes: `_grouped_mm` in any float dtype (its kernels take float32 too, torch's own shape function bfloat16 alone),
and `_ctc_loss` with lengths that are tensors, for which torch has no shape function at all. What was registered before
is put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from weft.capture.sizes import Sizes
from weft.errors import CaptureError
from weft.ir.graph import NOWHERE, Autocast, Op, Ref, Source, Tensor
from weft.ops.arguments import bound
from weft.ops.trial import FAILURES

GROUPED = torch.ops.aten._grouped_mm.default
CTC = torch.ops.aten._ctc_loss.Tensor


@dataclass(frozen=True)
class Context:
    """Where and how an op ran."""

    path: str = ""
    call: int = 0
    source: Source = NOWHERE
    grad: bool = True
    autocast: Autocast | None = None
    recompute: int | None = None

    @property
    def place(self) -> str:
        return str(self.source) if self.source.line else self.path


@dataclass(frozen=True)
class Call:
    """A call of an operator. Arguments are what the trace has (handles), or `Ref`s to their present values."""

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    context: Context

    @property
    def name(self) -> str:
        return name_of(self.target)

    @cached_property
    def values(self) -> dict[str, Any]:
        """All arguments by the names of the schema, defaults filled in."""
        return bound(self.target, self.args, self.kwargs)


@dataclass
class Builder:
    """The program so far."""

    mode: FakeTensorMode
    sizes: Sizes
    fakes: dict[str, torch.Tensor] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)

    def place(self, fake: torch.Tensor, name: str) -> str:
        """Take in a tensor that no op makes (input, parameter, buffer, constant)."""
        self.fakes[name] = fake
        shape = tuple(self.sizes.dim(dim) for dim in fake.shape)
        self.tensors[name] = Tensor(name, shape, fake.dtype, fake.requires_grad)
        return name

    def emit(
        self,
        target: OpOverload,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        *,
        context: Context,
        draw: int | None = None,
    ) -> list[str]:
        """Append one call; the working names of its output tensors."""
        if not context.grad and may_alias(target) and target is not torch.ops.aten.detach.default:
            args, kwargs = pytree.tree_map(lambda leaf: self._detached(leaf, context), (args, dict(kwargs or {})))
        return self._append(str(target), target, args, kwargs or {}, context, draw=draw)

    def ref(self, target: OpOverload, *args: Any, context: Context, draw: int | None = None, **kwargs: Any) -> Ref:
        """Append a call that makes one tensor; what it makes, as an argument of the next."""
        return Ref(self.emit(target, args, kwargs, context=context, draw=draw)[0])

    def returns_itself(self, call: Call) -> bool:
        """Whether the call gives back the very tensor that is its first argument (`.to` of its own dtype)."""
        if not may_alias(call.target):
            return False
        return self._run(call.target, call.args, call.kwargs, call.context)[0] is self.fakes[call.args[0].name]

    def emit_function(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], context: Context
    ) -> list[str]:
        """Append one call of an opaque function."""
        idle = range(len(args)) if not context.grad else self._without_gradient(function, args, context)
        args = tuple(self._detached(leaf, context) if i in idle else leaf for i, leaf in enumerate(args))
        return self._append(f"function:{name}", function, args, {}, context, function=function)

    def _without_gradient(self, function: Callable[..., Any], args: tuple[Any, ...], context: Context) -> list[int]:
        """Positions of arguments that need a gradient and get none: backward returns None for them.

        To an optimizer none is not zero. A backward that cannot run on fake tensors is taken to give all of them.
        """
        wanted = [i for i, leaf in enumerate(args) if isinstance(leaf, Ref) and self.needs_grad(leaf.name)]
        live = [self.fakes[leaf.name].detach() if isinstance(leaf, Ref) else leaf for leaf in args]
        for i in wanted:
            live[i].requires_grad_()
        with self._around(context) as stack:
            if self.mode.shape_env is not None:
                stack.enter_context(self.mode.shape_env.suppress_guards())
            try:
                made = [one for one in pytree.tree_leaves(function(*live)) if one.requires_grad]
                seeds = [torch.ones_like(one) for one in made]
                found = torch.autograd.grad(made, [live[i] for i in wanted], seeds, allow_unused=True) if made else ()
            except FAILURES:
                return []
        return [i for i, gradient in zip(wanted, found, strict=False) if gradient is None]

    def emit_runtime(
        self,
        target: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        context: Context,
        draw: int | None = None,
    ) -> str:
        """Append one call of a function of the runtime that stands in for an operator; its output's working name."""
        return self._append(target, function, args, kwargs, context, draw=draw)[0]

    def needs_grad(self, name: str) -> bool:
        return self.tensors[name].needs_grad

    def _detached(self, leaf: Any, context: Context) -> Any:
        """A view made without grad mode still says that it requires a gradient, although none flows through it.

        And `.contiguous()` may copy here and return its argument on a part. Viewing a detached tensor settles both.
        """
        if not isinstance(leaf, Ref) or not self.needs_grad(leaf.name):
            return leaf
        return Ref(self._append("aten.detach.default", torch.ops.aten.detach.default, (leaf,), {}, context)[0])

    def _append(
        self,
        target: str,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        context: Context,
        *,
        draw: int | None = None,
        function: Callable[..., Any] | None = None,
    ) -> list[str]:
        outputs = self._run(call, args, kwargs, context)
        number = len(self.tensors)
        names = [self.place(fake, f"{number + k}") for k, fake in enumerate(outputs)]
        self.ops.append(
            Op(
                name=f"{len(self.ops)}",
                target=target,
                args=self.sizes.recorded(tuple(args), context),
                kwargs=tuple((key, self.sizes.recorded(value, context)) for key, value in kwargs.items()),
                outputs=tuple(names),
                path=context.path,
                call=context.call,
                source=context.source,
                grad=context.grad,
                autocast=context.autocast,
                recompute=context.recompute,
                draw=draw,
                function=function,
            )
        )
        return names

    def _run(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], context: Context
    ) -> list[torch.Tensor]:
        """The op on fake tensors, in its context."""
        live_args, live_kwargs = pytree.tree_map(
            lambda leaf: self.fakes[leaf.name] if isinstance(leaf, Ref) else leaf, (args, dict(kwargs))
        )
        with self._around(context):
            result = self._try(call, live_args, live_kwargs, context)
        leaves = pytree.tree_leaves(result)
        if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            raise CaptureError(f"{call} returns something that is no tensor: {result}", place=context.place)
        return leaves

    def _around(self, context: Context) -> ExitStack:
        """The fake tensors, grad mode and autocast in which an op runs."""
        with ExitStack() as stack:
            stack.enter_context(self.mode)
            stack.enter_context(torch.set_grad_enabled(context.grad))
            if context.autocast is not None:
                stack.enter_context(context.autocast.around())
            return stack.pop_all()

    def _try(self, call: Callable[..., Any], args: Any, kwargs: Any, context: Context) -> Any:
        try:
            return call(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise CaptureError(
                f"{call} could not be taken out of forward: {str(error).strip().splitlines()[0]}",
                place=context.place,
                remedy="write this line with other operators",
            ) from error


def name_of(target: OpOverload) -> str:
    """`dropout` of `aten.dropout.default`, `add_` of `aten.add_.Tensor`; `my::op` of a library of the user's."""
    library, name, _ = str(target).split(".")
    return name if library == "aten" else f"{library}::{name}"


def may_alias(target: OpOverload) -> bool:
    """Whether an operator may return a view of its argument, or the argument itself."""
    return any(result.alias_info is not None for result in target._schema.returns)


@contextmanager
def known_shapes() -> Iterator[None]:
    """While this is entered, fake tensors know more shapes."""
    held = fake_impls.op_implementations_dict
    added = {one: fake for one, fake in ((GROUPED, fake_grouped_mm), (CTC, fake_ctc_loss)) if one not in held}
    held.update(added)
    try:
        yield
    finally:
        for one in added:
            del held[one]


def fake_ctc_loss(
    mode: FakeTensorMode,
    _operator: torch._ops.OpOverload,
    scores: torch.Tensor,
    targets: torch.Tensor,
    *_rest: object,
    **_named: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss for each row; and the sums over alignments, whose length only the run knows, for backward alone."""
    with mode:
        rows = list(scores.shape[1:2])
        return scores.new_empty(rows), scores.new_empty([*rows, scores.shape[0], 2 * targets.shape[-1] + 1])


def fake_grouped_mm(
    mode: FakeTensorMode,
    _operator: torch._ops.OpOverload,
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """An empty result: groups divide the rows of `a`, the columns of `b`, or what is contracted."""
    if (offs is None) != (a.ndim == b.ndim == 3):
        raise RuntimeError("offs tells the groups of 2-d matrices, and batches of matrices have none")
    if (a.ndim == 3 or b.ndim == 3) and a.shape[-1] != b.shape[-2]:
        raise RuntimeError(f"matrices of widths {a.shape[-1]} and {b.shape[-2]} cannot be multiplied")
    batch = list(a.shape[:1]) if offs is None else list(offs.shape) if a.ndim == b.ndim == 2 else []
    with mode:
        return a.new_empty([*batch, a.shape[-2], b.shape[-1]], dtype=out_dtype or a.dtype)
