"""Interpreted: one rank's share of a Program as an nn.Module, run by the interpreter of Scripts.

In: the rank's Script, a transport, its stored parts. Out: a module with the original dotted names whose call gives the
loss and whose `loss.backward()` gives every parameter the gradient of its stored part, complete and, over replicas,
averaged. The random numbers of a forward in training belong to the step, counted from 0, and to the replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from weft.ir.graph import Graph
from weft.runtime.interpret import Rank
from weft.runtime.random import Stream
from weft.runtime.replicas import Replica
from weft.runtime.script import Script
from weft.runtime.training import Optimizer, train_step
from weft.runtime.transport import Doing
from weft.train.batch import bind_batch


class Interpreted(nn.Module):
    """A rank of a parallel module. `parameters()` is what an optimizer updates on this rank.

    Args:
        state: this rank's parts of parameters, buffers and constants, by tensor name of the graph.
        seed: of the random stream.
    """

    def __init__(
        self, script: Script, transport: Replica, graph: Graph, state: Mapping[str, Tensor], *, seed: int = 0
    ) -> None:
        super().__init__()
        self.step = 0
        self.seed = seed
        self._graph, self._transport = graph, transport
        self._parts: dict[str, Tensor] = dict(state)
        self._trained: dict[str, nn.Parameter] = {}
        for parameter in graph.parameters:
            if parameter.tensor in state:
                part = nn.Parameter(state[parameter.tensor], requires_grad=parameter.trainable)
                self._parts[parameter.tensor] = part.detach()
                for name in parameter.names:
                    owner, last = _owner(self, name)
                    owner.register_parameter(last, part)
                if parameter.trainable:
                    self._trained[parameter.tensor] = part
        for buffer in graph.buffers:
            if buffer.tensor in state:
                for name in buffer.names:
                    owner, last = _owner(self, name)
                    owner.register_buffer(last, state[buffer.tensor], persistent=buffer.persistent)
        dtypes = {name: tensor.dtype for name, tensor in graph.tensors.items() if name not in graph.producers}
        self._rank = Rank(script, transport, state=self._parts, dtypes=dtypes)
        self._anchor = torch.zeros((), device=transport.device, requires_grad=True)

    @property
    def replica(self) -> int:
        """The number of the replica that this rank is part of: which share of the data it is fed."""
        return self._transport.number

    @property
    def num_replicas(self) -> int:
        return self._transport.num_replicas

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of the replica's batch, whole on every rank of it."""
        stream = Stream(self.seed, self.step, self.replica)
        self._transport.begin_step(self.step)
        if self.training:
            self.step += 1
        found = self._rank.forward(bind_batch(self._graph, args, kwargs), stream)
        for name, content in self._rank.updates().items():
            self._parts[name].copy_(content)
        loss = found[str(self._graph.loss)]
        return _Root.apply(self._anchor, loss, self) if torch.is_grad_enabled() else loss

    def train_step(self, batch: Any, optimizer: Optimizer) -> Tensor:
        """Forward, backward, update; the loss before the update."""
        return train_step(self, batch, optimizer)

    def collect(self, scale: Tensor) -> None:
        """Backward of the last forward: adds to the `.grad` of every trained parameter."""
        for name, gradient in self._rank.backward().items():
            parameter = self._trained[name]
            mean = self._average(gradient, name) * scale
            parameter.grad = mean if parameter.grad is None else parameter.grad + mean

    def _average(self, gradient: Tensor, name: str) -> Tensor:
        if self.num_replicas == 1:
            return gradient
        self._transport.doing = Doing(f"average of the gradient of {name} over replicas")
        return self._transport.whole.all_reduce(gradient, self._transport.twins) / self.num_replicas


class _Root(torch.autograd.Function):
    """The loss as a root of autograd whose backward is the Script's own."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, module: Interpreted) -> Tensor:
        ctx.module = module
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        with torch.enable_grad():
            ctx.module.collect(grad.detach())
        return None, None, None


def _owner(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The container that a dotted name lies in, made if need be, and the last part of the name."""
    *path, last = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    return root, last
