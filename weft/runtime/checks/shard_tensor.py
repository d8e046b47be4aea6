"""Shards as users see them: what is computed of a part is right, or refused.

In: a trained parameter of which this rank holds a part, as `parameters()` gives it. Out: the same parameter, as a
`ShardParameter`: its gradient, its `data`, and whatever is computed of it element by element are `ShardTensor`s, which
know what they are a part of. An operator that mixes elements which lie on several ranks (a norm, a sum, sorting,
indexing, a random fill) would give other numbers than on one device, and is refused, with the parameter, the operator
and what to do instead (`full_tensor.py`). What passes is listed in `shard_rules.py`.

Promised: the runtime and its programs see ordinary tensors, whatever they do; so do optimizers of torch's in `step()`
(`guards.py`), which are checked in their own way. A tensor is made a shard, or an ordinary one, where it is: its
memory, and who refers to it, stay.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.testing._comparison import ErrorMeta

from weft.runtime.checks.outside import INSTALLED, LIBRARY
from weft.runtime.checks.rank_tensor import WRITERS
from weft.runtime.checks.shard_rules import (
    CONVERSIONS,
    ELEMENTWISE,
    HELD,
    LIKE,
    METADATA,
    NO_PROPERTY,
    REDUCTIONS,
    SAME,
    Held,
    Shard,
    added_up,
    held_of,
    joined,
    plain_name,
    reduced,
    reduced_dims,
    tensors_of,
    unsqueezed,
    whole_of,
)
from weft.runtime.layout.index import size

OURS = ("weft.", "weft_program_")
"""Modules that see ordinary tensors: of the runtime, and generated ones."""
COMPARES = ErrorMeta.__module__
TAKERS = {COMPARES: "torch.testing", "torch._functorch.vmap": "torch.vmap", **dict.fromkeys(WRITERS, "")}
"""Modules that go on with all elements of whatever they look at, and who that is."""
ASIDE = "_weft_aside"
"""The attribute of parameters without elements that has their gradient while an optimizer steps."""
CLIP = torch.nn.utils.clip_grad.__name__
GRAPH = torch.autograd.graph.__name__, torch.autograd.graph.register_multi_grad_hook.__name__
HOOKED = (
    "hooks are not for gradients of shards (register_multi_grad_hook): look at them when they are complete, between "
    "backward() and optimizer.step(), or in train_step(..., prepare=FUNCTION)"
)
FULL = (
    "weft.full_tensor(x), on all ranks, is all of it as an ordinary tensor; parameter.copy_(weft.shard_like(full, "
    "parameter)) writes a full tensor back; x.as_subclass(torch.Tensor) is this rank's part, to be looked at"
)
FILES = (
    "{0} is about to be saved or sent (pickled), and this rank holds {1}",
    "weft.save(folder, parallel, optimizer) on all ranks; or parallel.full_state_dict(), weft.full_tensor(x) on all "
    "ranks, and save that on one; parallel.local_state_dict() is for files of which every rank writes its own",
)
NORM = "weft.clip_grad_norm_(parallel, max_norm), or weft.clip_grad_norm_(parameters, max_norm) for some of them"
RANDOM = (
    "initialise the model before parallelize(); or draw all of it, alike on all ranks, and take the part: "
    "parameter.copy_(weft.shard_like(full, parameter))"
)
_FILLS = """
    normal uniform random bernoulli exponential cauchy geometric log_normal trunc_normal rand_like randn_like
    randint_like xavier_normal xavier_uniform kaiming_normal kaiming_uniform orthogonal sparse dropout
"""
FILLS = frozenset(_FILLS.split())
SIZES = ("size", "numel", "nelement", "__len__")
PROPERTIES = "weft.runtime.program.shown.attributes"
"""What compares what a user's property gives with what the original's does."""
BETWEEN = (__name__, "torch.overrides", "torch._tensor")
"""Modules that stand between whoever asks for a size and a shard."""
ZERO_GRAD = frozenset(inspect.unwrap(one.zero_grad).__code__ for one in (torch.optim.Optimizer, nn.Module))
"""Reads and drops the gradient of every parameter in every step, and computes nothing of them."""
UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
"""Of torch's GradScaler, which is refused where that matters."""

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])


class ShardTensor(Tensor):
    """A part of a tensor of a parameter's kind."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            asker = _asker()
            if asker is None:
                return func(*args, **(kwargs or {}))
            if asker in TAKERS:
                raise _taken(asker, (*args, *(kwargs or {}).values()))
            return _computed(func, args, kwargs or {})

    def __repr__(self, **settings: Any) -> str:  # type: ignore[override]
        return _shown(self)

    def __copy__(self) -> Tensor:
        return _held_as(_plain(self).detach().requires_grad_(self.requires_grad), held_of(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        found = memo[id(self)] = _held_as(_plain(self).clone(), held_of(self))
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _unsaved(self)

    def __create_write_items__(self, name: str, value: Any) -> Any:
        """Asked by torch.distributed.checkpoint, which takes an ordinary tensor for the same on every rank."""
        raise _unsaved(self)


class ShardParameter(ShardTensor, nn.Parameter):
    """A parameter of which this rank holds a part."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if sys._getframe(1).f_code in ZERO_GRAD:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return ShardTensor.__torch_function__(func, types, args, kwargs)

    def __copy__(self) -> nn.Parameter:
        found = nn.Parameter(_plain(self).detach(), self.requires_grad)
        vars(found).update(vars(self))
        found.__class__ = ShardParameter
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        found = memo[id(self)] = nn.Parameter(_plain(self).detach().clone(), self.requires_grad)
        vars(found)[HELD] = vars(self)[HELD]
        found.__class__ = ShardParameter
        return found


def show_as_shard(parameter: nn.Parameter, shard: Shard) -> None:
    """From now on what is computed of a parameter is looked at."""
    vars(parameter)[HELD] = whole_of(shard)
    show_again([parameter])


def show_again(parameters: Iterable[nn.Parameter]) -> None:
    """Parameters that were made ordinary ones are shards again."""
    for one in parameters:
        if type(one) is nn.Parameter and HELD in vars(one):
            if ASIDE in vars(one):
                one.grad = vars(one).pop(ASIDE)
            one.__class__ = ShardParameter


def make_plain(parameters: Iterable[nn.Parameter]) -> None:
    """Let parameters and their gradients be ordinary ones. Those without elements have no gradient meanwhile: to update
    nothing takes time, and what some optimizers compute of it is an error."""
    for one in parameters:
        if type(one) is ShardParameter:
            cast(Any, one).__class__ = nn.Parameter
        if type(one.grad) is ShardTensor:
            cast(Any, one.grad).__class__ = Tensor
        if not one.numel():
            vars(one)[ASIDE], one.grad = one.grad, None


def plainly(function: Function) -> Function:
    """A function of the runtime, in which shards cost nothing and nothing is refused."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    return cast(Function, call)


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """An ordinary tensor, as a part of what another one is a part of."""
    return _held_as(tensor, held_of(other))


def _shown(tensor: Tensor) -> str:
    held = held_of(tensor)
    return f"{type(tensor).__name__}(this rank's part of {held and held.shard.name}, {held and held.shard}):\n" + repr(
        _plain(tensor).detach()
    )


def _plain(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def _held_as(tensor: T, held: Held | None) -> T:
    """The very tensor, as a part; what is no tensor as it is."""
    if held is not None and (type(tensor) is Tensor or type(tensor) is ShardTensor):
        vars(tensor)[HELD] = held
        cast(Any, tensor).__class__ = ShardTensor
    elif isinstance(tensor, tuple | list):
        for one in tensor:
            _held_as(one, held)
    return tensor


def _asker() -> str | None:
    """Who asks: the first taker on the way out of torch, or the package outside; None: the runtime, or a program."""
    frame, taker = cast(Any, sys._getframe(2)), ""
    if frame.f_code is ShardParameter.__torch_function__.__code__:
        frame = frame.f_back
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(OURS):
            return None
        taker = taker or (name if name in TAKERS else "")
        if name != "torch" and not name.startswith("torch."):
            return taker or str(name).partition(".")[0]
        frame = frame.f_back
    return taker


def _computed(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What a function of torch's gives for shards."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return _property(func, args)
    if name == "__set__":
        return _set(func, args)
    if name in METADATA or name == UNSCALE or _is_made_of_others(name, args, kwargs):
        if name in SIZES:
            _tell_of_size(args[0], name, whole=name == "size" and len(args) + len(kwargs) == 1)
        return func(*args, **kwargs)
    if name.startswith("_foreach_"):
        return _listed(func, name, args, kwargs)
    operands = (*args, *kwargs.values())
    plain = plain_name(name)
    if plain in CONVERSIONS:
        return _held_as(func(*args, **kwargs), held_of(args[0]))
    if any(held.is_addend for one in operands if (held := held_of(one)) is not None):
        return _of_addends(func, args, kwargs)
    first = held_of(args[0]) if args else None
    if plain in REDUCTIONS and first is not None and len(list(tensors_of(operands))) == 1:
        return _reduced(func, first, args, kwargs)
    found = _held(plain, operands)
    if found is None:
        raise _refused(func, operands)
    return _held_as(func(*args, **kwargs), found)


def _is_made_of_others(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Of a shard are only the dtype and the device."""
    return name == "new_tensor" and all(held_of(one) is None for one in (*args[1:], *kwargs.values()))


def _held(name: str, operands: tuple[Any, ...]) -> Held | None:
    """How the result is held; None if it is not right on a rank."""
    tensors, first = list(tensors_of(operands)), held_of(operands[0]) if operands else None
    if all(held_of(one) is None for one in tensors):
        return None  # they are in lists, which nobody looks into
    if name == "where" and len(operands) < 3:
        return None  # gives places
    if name in ELEMENTWISE or (name in ("max", "min") and len(tensors) == 2):
        return joined(tensors)
    if name == "unsqueeze" and first is not None and isinstance(operands[1], int):
        return unsqueezed(first, operands[1])
    return None


def _reduced(func: Any, held: Held, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What a reduction gives."""
    name = plain_name(func.__name__)
    along = reduced_dims(name, held, args, kwargs)
    # only its gradients are right, of which what is frozen has none
    differentiates = torch.is_grad_enabled() and (args[0].requires_grad or held.shard.is_frozen)
    is_term = name == "sum" and len(args) == 1 and not kwargs and differentiates
    if along is None and not is_term:
        raise _refused(func, args)
    found = func(*args, **kwargs)
    if along is None:
        return _held_as(found, Held(held.shard, (), is_addend=True))
    one = found if isinstance(found, Tensor) else found[0]
    return _held_as(found, reduced(held, along, one.dim()))


def _of_addends(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What a function gives for sums that are one rank's."""
    name, operands = plain_name(func.__name__), (*args, *kwargs.values())
    found = added_up(name, operands)
    if found is None and name not in LIKE:
        raise _refused(func, operands)
    return _held_as(func(*args, **kwargs), found)


def _listed(func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Of an operator on lists of tensors."""
    lists = [one for one in (*args, *kwargs.values()) if isinstance(one, tuple | list)]
    rows = [[one for one in row if isinstance(one, Tensor)] for row in zip(*lists, strict=False)]
    shards = [row for row in rows if any(held_of(one) is not None for one in row)]
    ways = [joined(row) if plain_name(name) in ELEMENTWISE else None for row in shards]
    for row, way in zip(shards, ways, strict=True):
        if way is None:
            raise _refused(func, row)
    found = func(*args, **kwargs)
    known = {id(row[0]): way for row, way in zip(shards, ways, strict=True)}
    for row, one in zip(rows, found or (), strict=False):
        _held_as(one, known.get(id(row[0])))
    return found


def _property(func: Any, args: tuple[Any, ...]) -> Any:
    (tensor, *_), name = args, func.__self__.__name__
    if name in NO_PROPERTY:
        raise _refused(func.__self__, args)
    if name == "shape":
        _tell_of_size(tensor, name, whole=True)
    found = func(*args)
    return _held_as(found, held_of(tensor)) if name in ("grad", *SAME) else found


def _set(func: Any, args: tuple[Any, ...]) -> Any:
    (tensor, value, *_), name = args, func.__self__.__name__
    held = held_of(tensor)
    if name in ("grad", "data") and held is not None and isinstance(value, Tensor) and value.shape != tensor.shape:
        raise held.shard.refuse(
            f"{name} of {held.shard.name} is set to a tensor of shape {list(value.shape)}, and this rank holds "
            f"{held.shard}",
            f"parameter.{name} = weft.shard_like(values, parameter)"
            if name == "grad"
            else "parameter.copy_(weft.shard_like(values, parameter))",
        )
    return func(*args)


def _tell_of_size(tensor: Tensor, name: str, *, whole: bool) -> None:
    """Warn, once for each module, of a number that is the size of a part of a parameter, if it is the user's own code
    that asks for it. Whether there are elements, and a shape as it is (`whole`), to print or to compare, is no number.
    """
    held = held_of(tensor)
    if type(tensor) is not ShardParameter or held is None or held.shard.told.is_set():
        return
    frame: FrameType = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") in BETWEEN:
        frame = frame.f_back
    file, shape, shard = frame.f_code.co_filename, tuple(tensor.shape), held.shard
    if shape == shard.shape or INSTALLED in file or file.startswith(LIBRARY):
        return
    if frame.f_back is not None and frame.f_back.f_globals.get("__name__") == PROPERTIES:
        return
    if (tensor.numel() or whole or name == "size") and _is_number(frame.f_code, frame.f_lasti, whole):
        shard.told.set()
        warnings.warn_explicit(
            f"the size of {shard.name} on this rank is that of its part, {list(shape)}; the original has "
            f"{list(shard.shape)}. Where a size is used as a number, or to choose parameters, results would be others "
            "than on one device: weft.full_shape(parameter) is the original's on all ranks",
            UserWarning,
            file,
            frame.f_lineno,
        )


@functools.lru_cache(256)
def _is_number(code: CodeType, at: int, whole: bool) -> bool:
    """True if a line takes a number from what it gets at a place: of a whole shape, if it indexes or unpacks it at
    once; else if it does not only ask whether there is something."""
    rest = (one for one in dis.get_instructions(code) if one.offset > at)
    first, second = next(rest, None), next(rest, None)
    if first is None or second is None:
        return not whole
    if whole:
        return first.opname == "UNPACK_SEQUENCE" or second.opname == "BINARY_SUBSCR" or second.argrepr == "[]"
    is_asked = "JUMP" in first.opname or first.opname in ("TO_BOOL", "UNARY_NOT")
    return not is_asked and (first.argval, second.opname) != (0, "COMPARE_OP")


def _refused(func: Any, operands: Iterable[Any]) -> Exception:
    """The error for an operator that is not right on a part."""
    name = func if isinstance(func, str) else getattr(func, "__name__", repr(func))
    tensors = list(tensors_of(_flat(operands)))
    held = next(found for one in tensors if (found := held_of(one)) is not None)
    shard, plain = held.shard, plain_name(name)
    if held.is_addend:
        return shard.refuse(
            f"{name} of a sum over the elements of {shard.name}: this rank has added up those that it holds, {shard}",
            "such a sum may be scaled, added to a loss, and differentiated; weft.full_tensor(parameter) is all of the "
            "parameter, for anything else",
        )
    if plain in ELEMENTWISE:
        shapes = " and ".join(str(list(one.shape)) for one in tensors)
        return shard.refuse(
            f"{name} of tensors that do not belong together, {shapes}: this rank holds of {shard.name} {shard}",
            "weft.shard_like(values, parameter) is the part of a full tensor that belongs to a parameter here; " + FULL,
        )
    has_all = size(shard.mine) == shard.shape
    held_here = "other ranks hold" if has_all else f"this rank holds, {shard}"
    called = NORM if _called_in(CLIP) else HOOKED if _called_in(*GRAPH) else None
    remedy = called or (RANDOM if plain in FILLS else FULL)
    return shard.refuse(
        f"{name} needs more of {shard.name} than {held_here}: it would give other numbers than on one device",
        remedy,
    )


def _taken(taker: str, operands: Iterable[Any]) -> Exception:
    """The error for what goes on with all elements."""
    tensor = next(one for one in tensors_of(_flat(operands)) if held_of(one) is not None)
    if taker in WRITERS:
        return _unsaved(tensor)
    error = _refused(TAKERS[taker], (tensor,))
    # torch's comparison wraps whatever else is raised in it
    return error if taker != COMPARES else ErrorMeta(cast(Any, lambda _: error), str(error))


def _unsaved(tensor: Tensor) -> Exception:
    shard = vars(tensor)[HELD].shard
    return cast(Exception, shard.refuse(FILES[0].format(shard.name, shard), FILES[1]))


def _called_in(module: str, function: str | None = None) -> bool:
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == module and function in (None, frame.f_code.co_name):
            return True
        frame = frame.f_back
    return False


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for one in values:
        if isinstance(one, tuple | list):
            yield from _flat(one)
        else:
            yield one
