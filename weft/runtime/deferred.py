"""Deferred weight gradients: backward gives the gradients of inputs at once, those of weights when they are asked for.

In: a module, run under `Deferred`. Out: after its backward everything has its gradient but the weights of products
(`F.linear`, `matmul`, `mm`, `addmm`, `bmm`, `baddbmm`); `run()` computes these and hands them to autograd as if they
had arrived then: through the reshards that a weight came by, into `.grad`, firing the hooks of parameters. This is how
schedules split backward into its halves.

    queue = Deferred(module)
    with queue:
        loss = module(batch)
    loss.backward()
    queue.run()

A product runs in a graph of its own that is asked twice, first for the input's gradient, then for the weight's: the
same kernels as undivided, so the same bits. Gradients of one weight are added in the order in which backward came to
them. A ParallelModule completes its gradients at the end of `run()`, not of backward. Nothing is paid outside of it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from weft.runtime.gathered import as_edge
from weft.runtime.values import Gradient

PRODUCTS: dict[Any, tuple[int, ...]] = {
    nn.functional.linear: (1, 2),
    torch.matmul: (1,),
    Tensor.matmul: (1,),
    Tensor.__matmul__: (1,),
    torch.mm: (1,),
    Tensor.mm: (1,),
    torch.addmm: (0, 2),
    Tensor.addmm: (0, 2),
    torch.bmm: (1,),
    torch.baddbmm: (0, 2),
}
"""Positions of weights among the arguments of each function, if what stands there is one."""


class Held(Protocol):
    """A module that completes its gradients after backward, or when it is told to."""

    def hold_gradients(self, mode: AbstractContextManager[Any]) -> None:
        """Do not complete gradients at the end of backward; run under this mode what backward runs again."""
        ...

    def complete_gradients(self) -> None:
        """Complete them now."""
        ...

    def is_weight(self, tensor: Tensor) -> bool:
        """True for a parameter in the layout in which it is used."""
        ...


@dataclass
class _Waiting:
    """The gradient of one weight, from all of its products so far."""

    edge: GradientEdge
    makes: list[Callable[[], Tensor | None]] = field(default_factory=list)


class Deferred(TorchFunctionMode):
    """Defers the weight gradients of what runs under it.

    Args:
        module: the ParallelModule that runs, if it is one.
    """

    def __init__(self, module: Held | None = None) -> None:
        super().__init__()
        self._module = module
        self._waiting: dict[tuple[int, int], _Waiting] = {}
        self._anchor = torch.zeros((), requires_grad=True)

    def __enter__(self) -> Deferred:
        if self._module is not None:
            self._module.hold_gradients(self)
        super().__enter__()
        return self

    @property
    def num_waiting(self) -> int:
        """How many gradients of products wait."""
        return sum(len(one.makes) for one in self._waiting.values())

    def run(self) -> None:
        """Compute what waits, in the order in which backward came to it."""
        waiting, self._waiting = list(self._waiting.values()), {}
        for one in waiting:
            total = Gradient()
            for make in one.makes:
                gradient = make()
                if gradient is not None:
                    total.add(gradient)
            if total.total is not None:
                torch.autograd.backward([one.edge], [total.total])
        if self._module is not None:
            self._module.complete_gradients()

    def wait(self, edge: GradientEdge, make: Callable[[], Tensor | None]) -> None:
        """Have a gradient made later."""
        self._waiting.setdefault((id(edge.node), edge.output_nr), _Waiting(edge)).makes.append(make)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        positions = PRODUCTS.get(func)
        if positions is None or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        names = ("input", "weight", "bias") if func is nn.functional.linear else ()
        args = (*args, *(kwargs.pop(name) for name in names[len(args) :] if name in kwargs))
        found = [i for i in positions if i < len(args) and self._is_weight(args[i])]
        if not found:
            return func(*args, **kwargs)
        edges = tuple(get_gradient_edge(args[i]) for i in found)
        tensors = [arg.detach() if i in found else arg for i, arg in enumerate(args) if isinstance(arg, Tensor)]
        call = _Call(self, func, args, kwargs, tuple(found), edges)
        return _Product.apply(call, self._anchor, *tensors)

    def _is_weight(self, argument: Any) -> bool:
        if not isinstance(argument, Tensor) or not argument.requires_grad:
            return False
        return isinstance(argument, nn.Parameter) or (self._module is not None and self._module.is_weight(argument))


@dataclass
class _Call:
    """A product: its arguments, which of them are weights, and where their gradients go."""

    queue: Deferred
    function: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    weights: tuple[int, ...]
    edges: tuple[GradientEdge, ...]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.queue, ctx.edges = call.queue, call.edges
        wanted = iter(ctx.needs_input_grad[2:])
        given, inner, ctx.inputs = iter(tensors), [], []
        with torch.enable_grad():
            ctx.weights = []
            for i, argument in enumerate(call.args):
                if not isinstance(argument, Tensor):
                    inner.append(argument)
                    continue
                tensor, needs, weight = next(given), next(wanted), i in call.weights
                # an edge each: neither the graph of the product nor anybody else holds their memory
                own = as_edge(tensor, anchor, Gradient()) if needs or weight else tensor.detach()
                ctx.inputs.append(get_gradient_edge(own) if needs and not weight else None)
                if weight:
                    ctx.weights.append(get_gradient_edge(own))
                inner.append(own)
            result = call.function(*inner, **call.kwargs)
        # the arguments are not kept: what backward needs, the graph of the product has saved
        call.args = ()
        ctx.result = get_gradient_edge(result)
        return result.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        wanted = [edge for edge in ctx.inputs if edge is not None]
        found = iter(torch.autograd.grad([ctx.result], wanted, [gradient], retain_graph=True) if wanted else ())
        result = ctx.result
        for edge, own in zip(ctx.edges, ctx.weights, strict=True):
            ctx.queue.wait(edge, lambda own=own: torch.autograd.grad([result], [own], [gradient], retain_graph=True)[0])
        return (None, None, *(None if edge is None else next(found) for edge in ctx.inputs))
