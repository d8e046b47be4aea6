"""Shard rules: what may be computed of a part of a tensor, and what part of the result it gives.

In: an operator, its operands, and what each of them is a part of. Out: how the result is held, or None where other
elements than the rank's take part. Listed is what passes; whatever is not listed does not.

    elementwise   every element by itself: operands that meet along a cut dim are cut there alike, or are one thick
    reductions    along dims that are not cut
    sums          over all elements, in the caller's graph: an addend of a loss, whose gradients are right; it may be
                  scaled and added to others
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Event
from typing import Any
from weakref import ref

from torch import Tensor

from weft.errors import Refuse
from weft.runtime.layout.execute import size
from weft.runtime.layout.index import Shape
from weft.runtime.layout.transfer import Index

HELD = "_weft_held"
"""The attribute of tensors."""


@dataclass(frozen=True, eq=False)
class Shard:
    """A parameter of which ranks hold parts.

    Args:
        shape: of all of it.
        mine: what this rank holds.
        ranks: what each rank of the replica holds.
        gather: all of a tensor that is held so, on all ranks.
        parameter: itself.
        told: the user was told that sizes are those of parts.
    """

    name: str
    shape: Shape
    mine: Index
    ranks: tuple[Index, ...]
    refuse: Refuse
    gather: Callable[[Tensor, Held], Tensor]
    parameter: ref[Tensor]
    told: Event

    @property
    def is_frozen(self) -> bool:
        """The parameter gets no gradient now."""
        parameter = self.parameter()
        return parameter is not None and not parameter.requires_grad

    def is_cut(self, dim: int) -> bool:
        """True if some rank holds a part along a dim; nothing of a number has one dim."""
        own = slice(dim, dim + 1)
        return any(size(index)[own] != self.shape[own] for index in self.ranks)

    def __str__(self) -> str:
        part = ", ".join("+".join(f"{start}:{stop}" for start, stop in runs) or "nothing" for runs in self.mine)
        return f"[{part}] of its {list(self.shape)}"


@dataclass(frozen=True)
class Held:
    """How a tensor is held.

    Args:
        dims: for each dim of the tensor the cut dim of the parameter that it runs along, if any.
        is_addend: the ranks' parts are to be added up.
    """

    shard: Shard
    dims: tuple[int | None, ...]
    is_addend: bool = False

    def cut_at(self, place: int) -> int | None:
        """The cut dim that stands at a place, counted from the last: 0."""
        return self.dims[-1 - place] if place < len(self.dims) else None

    def meets(self, place: int, other: Held) -> bool:
        """True if both are cut alike there, on all ranks."""
        mine, its = self.cut_at(place), other.cut_at(place)
        if mine is None or its is None:
            return False
        if self.shard is other.shard:
            return mine == its
        pairs = zip(self.shard.ranks, other.shard.ranks, strict=False)
        return len(self.shard.ranks) == len(other.shard.ranks) and all(
            a[mine : mine + 1] == b[its : its + 1] for a, b in pairs
        )


def whole_of(shard: Shard) -> Held:
    """A tensor that is cut as the parameter is."""
    return Held(shard, tuple(dim if shard.is_cut(dim) else None for dim in range(len(shard.mine))))


def held_of(value: Any) -> Held | None:
    """How a tensor is held, if it is a part."""
    found = vars(value).get(HELD) if isinstance(value, Tensor) else None
    return found if isinstance(found, Held) else None


# Names of operators, without the `_` of those that work in place and the `_foreach_` of those of lists.

_ELEMENTWISE = """
    add sub subtract rsub mul multiply div divide true_divide floor_divide remainder fmod pow square sqrt rsqrt
    reciprocal neg negative positive abs absolute sign sgn signbit exp exp2 expm1 log log2 log10 log1p sin cos tan asin
    acos atan atan2 arctan2 sinh cosh tanh asinh acosh atanh sigmoid logit erf erfc erfinv relu softplus hardtanh silu
    gelu leaky_relu softsign tanhshrink hardshrink softshrink floor ceil round trunc fix frac clamp clamp_min clamp_max
    clip maximum minimum fmax fmin hypot copysign heaviside lerp addcmul addcdiv where masked_fill nan_to_num isnan
    isinf isfinite isposinf isneginf isclose eq ne lt le gt ge logical_and logical_or logical_xor logical_not
    bitwise_and bitwise_or bitwise_xor bitwise_not xlogy threshold copy clone detach cpu cuda float double half bfloat16
    int long bool short char byte contiguous pin_memory alias requires_grad fill zero zeros constant ones zeros_like
    ones_like full_like empty_like data __radd__ __rsub__ __rmul__ __rdiv__ __rtruediv__ __rpow__ __pow__ __ipow__
    __itruediv__ __idiv__ __iadd__ __isub__ __imul__ __neg__ __pos__ __abs__ __and__ __or__ __xor__ __invert__ __iand__
    __ior__ __rfloordiv__ __floordiv__ __mod__ __truediv__ __div__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__
"""
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
_REDUCTIONS = """
    sum nansum mean nanmean prod amax amin max min any all std var argmax argmin median nanmedian logsumexp
    count_nonzero softmax log_softmax cumsum cumprod sort argsort
"""
REDUCTIONS = {
    **dict.fromkeys(_REDUCTIONS.split(), 1),
    **dict.fromkeys(("norm", "linalg_norm", "linalg_vector_norm", "topk", "kthvalue"), 2),
}
"""And the place of `dim` among their arguments."""
LAST = frozenset(("topk", "sort", "argsort", "kthvalue"))
"""Those that go along the last dim if none is given."""
_METADATA = """
    size dim ndimension numel nelement stride is_contiguous storage_offset data_ptr element_size get_device
    is_floating_point is_complex is_signed is_pinned is_shared is_same_size register_hook
    register_post_accumulate_grad_hook retain_grad backward __len__ __dir__ as_subclass new_zeros new_ones new_full
    new_empty can_cast result_type has_names is_neg is_conj is_inference
"""
METADATA = frozenset(_METADATA.split())
"""What looks, and tells nothing of elements, not even whether all are equal. `as_subclass(torch.Tensor)` is the part as
an ordinary tensor."""
NO_PROPERTY = frozenset(("T", "H", "mT", "mH", "real", "imag", "_base"))
LINEAR = frozenset(("add", "sub", "subtract", "neg", "negative", "__radd__", "__rsub__", "__neg__", "__pos__"))
SCALING = frozenset(("mul", "multiply", "__rmul__", "div", "divide", "true_divide", "__truediv__"))
CONVERSIONS = frozenset(("to", "type", "type_as"))
"""Of their first operand alone."""
SAME = frozenset(("clone", "detach", "cpu", "cuda", "float", "double", "data", "alias", "contiguous"))
LIKE = frozenset(("zeros_like", "ones_like", "full_like", "empty_like"))


def plain_name(name: str) -> str:
    """An operator without what says that it works in place, or on lists."""
    return name if name.startswith("__") else name.removeprefix("_foreach_").rstrip("_")


def joined(operands: Iterable[Tensor]) -> Held | None:
    """How the result of an elementwise operator is held; None if operands do not belong together."""
    tensors = list(operands)
    parts = [(one, held) for one in tensors if (held := held_of(one)) is not None]
    base = max((held for _, held in parts), key=lambda held: sum(dim is not None for dim in held.dims))
    num_dims = max(one.dim() for one in tensors)
    dims = list[int | None]()
    for place in range(num_dims):
        cut = base.cut_at(place)
        dims.insert(0, cut)
        lengths = {one.shape[-1 - place] for one, held in parts if held is base}
        for one in tensors:
            held = held_of(one)
            if place >= one.dim() or held is base:
                continue
            is_cut = held is not None and held.cut_at(place) is not None
            length = one.shape[-1 - place]
            if is_cut and held is not None and not base.meets(place, held):
                return None
            if cut is not None and not is_cut and length != 1 and (held is not None or length not in lengths):
                return None
    return Held(base.shard, tuple(dims))


def reduced_dims(name: str, held: Held, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[int] | None:
    """The dims along which a reduction goes; None if one is cut, or nobody knows."""
    place, num_dims = REDUCTIONS[name], len(held.dims)
    dim = kwargs.get("dim", args[place] if len(args) > place else -1 if name in LAST else None)
    if isinstance(dim, bool) or not isinstance(dim, int | tuple | list) or "axis" in kwargs:
        return None
    along = {one % num_dims for one in ((dim,) if isinstance(dim, int) else dim)}
    return along if along and all(held.dims[one] is None for one in along) else None


def reduced(held: Held, along: Collection[int], num_dims: int) -> Held:
    """How the result of a reduction is held that has so many dims: all of them, or those that are left."""
    if num_dims == len(held.dims):
        return held
    return replace(held, dims=tuple(one for at, one in enumerate(held.dims) if at not in along))


def unsqueezed(held: Held, dim: int) -> Held:
    """How a tensor is held that has one more dim."""
    dims = list(held.dims)
    dims.insert(dim % (len(dims) + 1), None)
    return replace(held, dims=tuple(dims))


def added_up(name: str, operands: Sequence[Any]) -> Held | None:
    """How the result of an operator on addends is held; None if it does not follow from those of all ranks."""
    parts = [held for one in operands if (held := held_of(one)) is not None]
    addends = [held for held in parts if held.is_addend]
    alone = len(parts) == 1 and not any(
        isinstance(one, Tensor) and one.requires_grad for one in operands if held_of(one) is None
    )
    first = held_of(operands[0]) is not None
    if len(addends) != len(parts):
        return None
    if name in SAME or name in LINEAR or (name in SCALING and alone and (first or "div" not in name)):
        return addends[0]
    return None


def tensors_of(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments, not those in lists."""
    return (one for one in values if isinstance(one, Tensor))
