"""Differentiable reshards: forward by its own transfers, backward by its own transfers.

Enters: this rank's parts of a value. Leaves: its parts in the new layout, and a token. Every member must enter the
backward transfers, whatever it holds or uses. Two things see to that. The *anchor*, a scalar that requires grad and is
an input of every reshard, makes a rank without source parts (or with parts that need no gradient) take part. The
*token*, a scalar output, is handed to autograd as a root with gradient zero, so that a rank without target parts, or
that does not use them, is reached. All nodes being reachable, autograd runs them in reverse order of creation: one
order on all members. Gradients that do not arrive are zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.runtime.layout.execute import execute_all, real_dtype
from weft.runtime.layout.transfer import Transfer
from weft.runtime.links.transport import Doing, Transport


@dataclass(frozen=True)
class Reshard:
    """A change of layout. `backward` is None where no gradient flows."""

    forward: tuple[Transfer, ...]
    backward: tuple[Transfer, ...] | None
    source_shapes: tuple[tuple[int, ...], ...]
    """Shapes of this rank's source slots (none if it holds nothing)."""
    target_shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype


def run_reshard(
    name: str,
    step: Reshard,
    sources: Sequence[Tensor],
    transport: Transport,
    anchor: Tensor,
    doing: Doing | None = None,
) -> tuple[list[Tensor], Tensor | None]:
    """The target's local tensors, and a token if a backward will come. `name`, `doing`: for messages."""
    transport.doing = doing or Doing(f"reshard {name}")
    _check_shapes(f"source of reshard {name}", sources, step.source_shapes)
    if step.backward is None or not torch.is_grad_enabled():
        outputs = _forward(name, step, sources, transport)
        return [tensor.detach() for tensor in outputs], None
    *results, token = _Differentiable.apply(name, step, transport, anchor, *sources)
    return results, token


def _forward(name: str, step: Reshard, sources: Sequence[Tensor], transport: Transport) -> list[Tensor]:
    outputs = execute_all(step.forward, sources, transport, dtype=step.dtype)
    _check_shapes(f"target of reshard {name}", outputs, step.target_shapes)
    return outputs


def _check_shapes(what: str, tensors: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> None:
    found = tuple(tuple(tensor.shape) for tensor in tensors)
    assert found == tuple(shapes), f"the {what} is {found}, planned as {shapes}"


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str, step: Reshard, transport: Transport, anchor: Tensor, *sources: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.name, ctx.doing, ctx.step, ctx.transport = name, transport.doing, step, transport
        ctx.set_materialize_grads(False)
        outputs = _forward(name, step, sources, transport)
        ctx.dtype = outputs[0].dtype if outputs else real_dtype(step.dtype)
        # two slots may be one tensor, or a source: each needs its own place in the autograd graph
        taken = {id(one) for one in sources}
        for at, one in enumerate(outputs):
            outputs[at] = one.detach() if id(one) in taken else one
            taken.add(id(one))
        return (*outputs, anchor.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        step, transport = ctx.step, ctx.transport
        transport.doing = Doing(f"backward of {ctx.doing.what}", ctx.doing.place)
        arrived = [
            torch.zeros(shape, dtype=ctx.dtype, device=transport.device) if gradient is None else gradient
            for gradient, shape in zip(gradients[:-1], step.target_shapes, strict=True)
        ]
        results = execute_all(step.backward, arrived, transport, dtype=step.dtype)
        _check_shapes(f"gradient of reshard {ctx.name}", results, step.source_shapes)
        return (None, None, None, None, *results)
