"""Gathered weights: a parameter that is stored split and used whole does not outlive its use.

In: a trained parameter's part and the transfers that bring it to where it is used. Out: the whole, as a tensor that
autograd knows only as an edge: nothing but the code that uses it holds its memory. What operators save of it for
backward, itself or a view, is packed as (use, geometry) and unpacked by running the transfers again: once for each use
and backward, whatever number of operators saved it; the memory goes with the last of them.

Unpacking runs collectives inside backward. They start in one order on all members: a use along axes of the grid stands
in the program of every member at the same place, is read there by the same operators, and autograd runs these in
reverse order of creation, as it does the reshards among them. Of uses from tables only those of loops over chunks that
all members run alike come so (`by_chunk.py`): a member that saves nothing would not come to the transfers.
Promised: the same bits as if the whole had been kept; a parameter that was changed between forward and backward is an
error, as it is for autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from weft.errors import Refuse
from weft.runtime.weights.gradient import Gradient
from weft.runtime.weights.prefetch import Prefetch
from weft.runtime.weights.unshard import Gather


def changed_since(name: str) -> tuple[str, str]:
    """What is wrong, and what to do instead."""
    return (
        f"{name} was changed in place after the forward whose backward needs it",
        "call backward() before optimizer.step(), and before weights are changed otherwise; or call the module again",
    )


Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""Pack and unpack."""


class Use:
    """One use of a parameter.

    Args:
        gather: how it is brought to where it is used.
        forward, backward: bring it.
        refuse: makes the error if it was changed in between.
    """

    def __init__(self, gather: Gather, forward: Prefetch, backward: Prefetch, refuse: Refuse) -> None:
        self.gather, self._version = gather, gather.version
        self._forward, self._backward, self._refuse = forward, backward, refuse
        self._cached: Tensor | None = None
        self._num_packed = self._num_left = 0

    def whole(self) -> Tensor:
        """Gather it, for forward."""
        return self._forward.get(self.gather)

    def pack(self) -> None:
        """An operator has saved it."""
        self._num_packed += 1
        self._num_left += 1

    def again(self) -> Tensor:
        """Gather it, for backward."""
        if self.gather.version != self._version:
            raise self._refuse(*changed_since(self.gather.name))
        return self._backward.get(self.gather)

    def unpack(self) -> Tensor:
        """The same; it is kept until all that were packed have been asked for."""
        if self._cached is None:
            self._cached = self.again()
        found = self._cached
        self._num_left -= 1
        if self._num_left <= 0:
            # a graph that was retained may ask again
            self._cached, self._num_left = None, self._num_packed
        return found


class Packed(NamedTuple):
    """What is saved in place of a gathered weight, or of a view of it."""

    use: Use
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """From the first element of the whole."""

    def unpack(self) -> Tensor:
        whole = self.use.unpack()
        if not self.offset and self.size == whole.shape and self.stride == whole.stride():
            return whole
        return whole.as_strided(self.size, self.stride, int(whole.storage_offset()) + self.offset)


@dataclass(frozen=True, slots=True)
class _Memory:
    """Memory in which wholes of one dtype lie: where each begins and ends."""

    weak: StorageWeakRef
    """Asked for expiry: another tensor may come to lie there later."""
    dtype: torch.dtype
    wholes: list[tuple[int, int, Use]] = field(default_factory=list)


class Gathered:
    """The uses of one forward, and the hooks that keep their memory out of autograd's hands."""

    def __init__(self) -> None:
        self._uses: dict[int, _Memory] = {}
        self._hooks: saved_tensors_hooks | None = None
        self._needed: dict[Use, None] = {}

    @property
    def is_used(self) -> bool:
        """Something was gathered."""
        return bool(self._uses)

    def need(self, use: Use) -> None:
        """Backward will gather it again."""
        self._needed.pop(use, None)
        self._needed[use] = None

    def again(self) -> list[Gather]:
        """What backward will gather, in order."""
        return [use.gather for use in reversed(self._needed)]

    def add(self, use: Use, whole: Tensor) -> None:
        """A whole that is about to be used. From the first one on, what is saved is looked at."""
        storage, start = whole.untyped_storage(), int(whole.storage_offset())
        memory = self._uses.get(storage._cdata)
        if memory is None or memory.weak.expired():
            memory = self._uses[storage._cdata] = _Memory(StorageWeakRef(storage), whole.dtype)
        memory.wholes.append((start, start + whole.numel(), use))
        if self._hooks is None:
            self._hooks = saved_tensors_hooks(self._pack, _unpack)
            self._hooks.__enter__()

    def close(self) -> None:
        """The forward is over."""
        if self._hooks is not None:
            hooks, self._hooks = self._hooks, None
            hooks.__exit__(None, None, None)

    def _pack(self, tensor: Tensor) -> Tensor | Packed:
        # most of what comes by is no weight
        memory = self._uses.get(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else None
        if memory is None or memory.weak.expired() or memory.dtype != tensor.dtype:
            return tensor
        at, is_empty = int(tensor.storage_offset()), not tensor.numel()
        # what was gathered last is what is mostly saved; what has no elements is gathered again for who has some
        for start, stop, use in reversed(memory.wholes):
            if start <= at < stop + is_empty and not (tensor.is_conj() or tensor.is_neg()):
                use.pack()
                self.need(use)
                return Packed(use, tensor.shape, tensor.stride(), at - start)
        return tensor


SAVED = (
    "torch.autograd.graph.saved_tensors_hooks change what the operators of a parallel module save for backward, and "
    "some of it does not come by them: it is gathered, or computed, again, or saved by other threads (emulate=True)",
    "call the module outside of these hooks; or a plan without recompute and with zero=2 or less",
)


def hooks_around() -> Hooks | None:
    """What somebody else does to tensors that are saved for backward; what torch itself does leaves values alone."""
    found: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if found is None or getattr(found[0], "__module__", "").startswith("torch.") else found


@torch.no_grad()
def change_values(hooks: Hooks) -> bool:
    """True if a tensor does not come back as it was."""
    probe = torch.linspace(-1, 1, 12).reshape(3, 4) / 3
    try:
        return not torch.equal(hooks[1](hooks[0](probe.clone())), probe)
    except Exception:  # noqa: BLE001 - the user's code, on a tensor that it does not know
        return True


def _unpack(saved: Tensor | Packed) -> Tensor:
    return saved.unpack() if isinstance(saved, Packed) else saved


def as_edge(whole: Tensor, anchor: Tensor, sink: Gradient) -> Tensor:
    """The tensor, requiring a gradient, which is summed in the sink; the graph does not hold its memory."""
    (found,) = _Edge.apply(anchor, [whole], sink, None)
    return cast(Tensor, found)


def edge_and_mark(whole: Tensor, anchor: Tensor, sink: Gradient, passed: Callable[[], None]) -> tuple[Tensor, Tensor]:
    """The same, and a token (`mark`), which is of the same node."""
    found: tuple[Tensor, Tensor] = _Edge.apply(anchor, [whole, anchor.detach()], sink, passed)
    return found


def mark(anchor: Tensor, passed: Callable[[], None]) -> Tensor:
    """A token: if backward starts from it too, `passed` is called when all that was made after this has had its turn,
    so that nothing more will come to the sinks of what was.

    Autograd runs what is ready in the reverse order of creation. Of the nodes that were made after this one and have
    not run, the latest is ready: what its gradients come from is later still, and has run. So it runs first."""
    (found,) = _Edge.apply(anchor, [anchor.detach()], None, passed)
    return cast(Tensor, found)


class _Edge(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, made: list[Tensor], sink: Gradient | None, passed: Callable[[], None] | None
    ) -> tuple[Tensor, ...]:
        ctx.sink, ctx.passed = sink, passed
        ctx.set_materialize_grads(False)
        # in a list, they are no inputs: they become the outputs as they are
        found = tuple(made)
        made.clear()
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, token: Tensor | None = None) -> tuple[None, None, None, None]:
        if gradient is not None and ctx.sink is not None:
            ctx.sink.add(gradient)
        if ctx.passed is not None:
            ctx.passed()
        return None, None, None, None
