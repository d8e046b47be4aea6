"""Ops, one by one, each tried on fake tensors.

Enters: operators with arguments (`Ref`s, sizes, plain values) and the context they ran in. Leaves: Ops and Tensors
under working names (`names.py` gives the final ones). Every op is run once on fake tensors in its own grad mode and
autocast, so shape, dtype and whether a gradient flows are what torch itself says, for rewritten operators too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from weft.capture.sizes import Sizes
from weft.errors import CaptureError
from weft.ir.graph import NOWHERE, Autocast, Op, Ref, Source, Tensor
from weft.ops.trial import FAILURES


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

    def returns_itself(
        self, target: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], context: Context
    ) -> bool:
        """Whether the call gives back the very tensor that is its first argument (`.to` of its own dtype)."""
        return may_alias(target) and self._run(target, args, kwargs, context)[0] is self.fakes[args[0].name]

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
    ) -> str:
        """Append one call of a function of the runtime that stands in for an operator; its output's working name."""
        return self._append(target, function, args, kwargs, context)[0]

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
                cast = context.autocast
                stack.enter_context(torch.autocast(cast.device, cast.dtype, cast.enabled, cache_enabled=False))
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


def may_alias(target: OpOverload) -> bool:
    """Whether an operator may return a view of its argument, or the argument itself."""
    return any(result.alias_info is not None for result in target._schema.returns)
