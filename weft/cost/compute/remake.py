"""Calls made again from the keys of kernels.

In: a key, a device. Out: a Call, of which as many copies of operands as wanted can be made: tensors with the dtypes,
sizes and strides of the key and values that the operator can work with. Whole numbers that are indices lie within what
they index; where that is not known, and where the result's size depends on values, `CannotRemake` says so: nothing is
guessed.

    floating-point numbers   between 0 and 1, so that logarithms, roots and probabilities have what they need; near 1
                             for operators that write to what they read, which so can be repeated at any rate
    whole numbers            indices: any that is allowed, all over the table; else 1
    plain numbers            those that keys do not keep: 0 if they were, else 1; 0.01 where an optimizer asks
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.cost.compute.kernel import Read, read, sizes_of

Sizes = Sequence[int]
Bound = Callable[[Mapping[str, Any]], int]
"""From the arguments of a key to the number of entries that an index may choose from."""


class CannotRemake(Exception):  # noqa: N818 - says what it is about
    """A call that cannot be made again from its key, and why."""


def _along(table: str) -> Bound:
    def bound(named: Mapping[str, Any]) -> int:
        sizes = _sizes(named, table)
        return sizes[named["dim"]] if sizes else 1

    return bound


def _classes(named: Mapping[str, Any]) -> int:
    sizes = _sizes(named, "self")
    return sizes[1] if len(sizes) > 1 else sizes[0]


def _window(named: Mapping[str, Any]) -> int:
    """Places in a plane that is pooled."""
    return math.prod(_sizes(named, "self")[-2:])


def _sizes(named: Mapping[str, Any], name: str) -> Sizes:
    sizes = sizes_of(named[name])
    assert sizes is not None, f"{name} is no tensor"
    return sizes


ALONG = (
    *("gather", "index_select", "index_add", "index_copy", "index_fill", "index_reduce"),
    *("scatter", "scatter_add", "scatter_reduce"),
)
BOUNDS: dict[str, dict[str, Bound]] = {
    "embedding": {"indices": lambda named: _sizes(named, "weight")[0]},
    "embedding_dense_backward": {"indices": lambda named: int(named["num_weights"])},
    **{f"{name}{end}": {"index": _along("self")} for name in ALONG for end in ("", "_")},
    **{name: {"target": _classes} for name in ("nll_loss_forward", "nll_loss2d_forward")},
    **{name: {"target": _classes} for name in ("nll_loss_backward", "nll_loss2d_backward")},
    "max_pool2d_with_indices_backward": {"indices": _window},
}
"""How far the whole numbers of an argument may go, by operator and argument."""
PLACES = frozenset(("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"))
"""Operators whose `indices` are a list, one for each dim of their first tensor."""
NO_MATTER = ("philox_seed", "philox_offset", "rng_state", "unused", "cum_seq_q", "cum_seq_k", "workspace")
"""Arguments, by name, that are whole numbers of which no time depends."""
PLAIN = frozenset(
    (
        *("copy_", "_to_copy", "clone", "cat", "stack", "sum", "cumsum", "any", "all", "max", "min", "amax", "amin"),
        *("argmax", "argmin", "sort", "topk", "constant_pad_nd", "flip", "roll", "repeat", "tril", "triu", "fill_"),
        *("equal", "_local_scalar_dense", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"),
        *("zero_", "rand_like", "randn_like", "unfold_backward", "slice_backward", "select_backward", "mean", "prod"),
        *("slice_scatter", "select_scatter", "masked_fill", "masked_fill_", "where", "count_nonzero", "bincount"),
    )
)
"""Operators beside those that work element by element that take any whole numbers."""
SMALL = frozenset(("lr", "weight_decay", "momentum", "dampening", "beta1", "beta2", "eps", "p", "dropout_p"))
"""Numbers that are small: with 1 an average would forget all, and a division would be by 0."""


@dataclass(frozen=True)
class Call:
    """A call that can be made.

    Args:
        func: the operator.
        make: gives operands of its own each time, with which it can be called: positional and by name.
        num_bytes: of the tensors of one set of operands.
    """

    func: Any
    make: Callable[[], tuple[list[Any], dict[str, Any]]]
    num_bytes: int


def remake(key: str, device: torch.device | str = "cpu") -> Call:
    """The call that a key describes. Raises CannotRemake."""
    try:
        found = read(key)
    except (AttributeError, ValueError) as error:
        raise CannotRemake(f"this torch does not know the operator: {error}") from error
    if torch.Tag.dynamic_output_shape in found.func.tags and found.func.overloadpacket.__name__ not in PLACES:
        raise CannotRemake("the size of its result depends on values")
    maker = _Maker(found, torch.device(device))
    return Call(found.func, maker.operands, maker.num_bytes())


@dataclass(frozen=True)
class _Maker:
    """Makes operands for a call."""

    read: Read
    device: torch.device

    @property
    def op(self) -> str:
        return str(self.read.func.overloadpacket.__name__)

    def operands(self) -> tuple[list[Any], dict[str, Any]]:
        names = [one.name for one in self.read.func._schema.arguments]
        args = [self._made(name, one) for name, one in zip(names, self.read.args, strict=False)]
        return args, {name: self._made(name, one) for name, one in self.read.kwargs.items()}

    def num_bytes(self) -> int:
        return sum(map(_num_bytes, (*self.read.args, *self.read.kwargs.values())))

    def _made(self, name: str, value: Any) -> Any:
        match value:
            case {"t": [dtype, sizes, strides]}:
                return self._tensor(name, getattr(torch, dtype), sizes, strides, 0)
            case {"dtype": name} | {"kind": name}:
                return getattr(torch, name)
            case {"device": _}:
                return self.device
            case {"float": float() | str() as number}:
                return float(number)
            case {"float": whether}:
                return whether * (0.01 if name in SMALL else 1.0)
            case {"other": kind} if kind != "Generator":
                raise CannotRemake(f"its argument {name!r} is a {kind}, which no key holds")
            case list():
                return [self._member(name, one, place) for place, one in enumerate(value)]
        # a generator is left out, and the default one is taken
        return None if isinstance(value, dict) else value

    def _member(self, name: str, value: Any, place: int) -> Any:
        if self.op in PLACES and name == "indices" and sizes_of(value) is not None:
            dtype, sizes, strides = value["t"]
            if dtype in ("bool", "uint8"):
                raise CannotRemake("the size of its result depends on a mask")
            bound = _sizes(self.read.named, "self")[place]
            return self._tensor(name, getattr(torch, dtype), sizes, strides, bound)
        return self._made(name, value)

    def _tensor(self, name: str, dtype: torch.dtype, sizes: Sizes, strides: Sizes, bound: int) -> Tensor:
        empty = 0 in sizes
        span = 0 if empty else 1 + sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))
        if dtype.is_floating_point or dtype.is_complex:
            values = torch.rand(span, device=self.device)
            if self.read.func._schema.is_mutable:
                values.mul_(0.02).add_(0.99)
        elif dtype == torch.bool:
            values = torch.rand(span, device=self.device) < 0.5
        else:
            bound = bound or self._bound(name)
            values = torch.randint(bound, (span,), device=self.device) if bound > 1 else torch.ones(span)
            values = values if bound != 1 else torch.zeros(span)
        return values.to(self.device, dtype).as_strided(sizes, strides)

    def _bound(self, name: str) -> int:
        """What whole numbers choose from; 0 if they choose from nothing."""
        known = BOUNDS.get(self.op, {})
        if name in known:
            return known[name](self.read.named)
        tags = {torch.Tag.pointwise, torch.Tag.reduction}
        if self.op.startswith("_foreach") or name in NO_MATTER or self.op in PLAIN or tags & set(self.read.func.tags):
            return 0
        raise CannotRemake(f"its argument {name!r} holds whole numbers, and which are allowed is not known")


def _num_bytes(value: Any) -> int:
    match value:
        case {"t": [dtype, sizes, _]}:
            return math.prod(map(int, sizes)) * int(getattr(torch, dtype).itemsize)
        case list():
            return sum(map(_num_bytes, value))
    return 0
