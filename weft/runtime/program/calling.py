"""Calling: the original forward's signature, and calls brought into the form of the example.

In: the signature, and which arguments of the example are positional. Out: `parallel.forward` with that signature, as
frameworks look at it; arguments that are given by position or by name, as the original takes them, in the one form that
programs were made for. A call that cannot be brought into it stays as it is, and is refused or served elsewhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor

from weft.runtime.program.batch import BatchMismatch

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a forward."""
NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Calling:
    """How the original is called.

    Args:
        num_args: of the example's arguments, how many are positional; keywords: the names of the others.
    """

    signature: inspect.Signature
    num_args: int
    keywords: tuple[str, ...] = ()

    def arranged(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
        """The arguments in the form of the example, if they are the same ones. An argument that the example leaves
        out may be given as its default. Raises BatchMismatch if what `**kwargs` takes has another order."""
        given = tuple(args), dict(kwargs)
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError:
            return given
        found: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            kind = self.signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                return given
            found.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
        names = [one.name for one in self.signature.parameters.values() if one.kind in NAMED][: self.num_args]
        wanted = (*names, *self.keywords)
        if len(names) < self.num_args or any(name not in found for name in wanted):
            return given
        if any(not self._is_default(name, found[name]) for name in found if name not in wanted):
            return given
        more = [name for name in kwargs if name not in self.signature.parameters]
        own = [name for name in self.keywords if name in more]
        if more != own:
            raise BatchMismatch(
                f"the keyword arguments {more} have another order than in the example, {own}: forward takes them as "
                "**kwargs, and may go over them in their order"
            )
        return tuple(found[name] for name in names), {name: found[name] for name in self.keywords}

    def _is_default(self, name: str, value: Any) -> bool:
        if name not in self.signature.parameters or isinstance(value, Tensor):
            return False
        default = self.signature.parameters[name].default
        return value is default or (type(value) is type(default) and bool(value == default))


def calling_of(forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Calling | None:
    """How a forward is called, and was with the example; None if nobody can tell."""
    try:
        return Calling(inspect.signature(forward), len(args), tuple(kwargs))
    except (TypeError, ValueError):
        return None


class Signed:
    """A forward of a class that has, on each instance, the signature of the instance's original."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self.__doc__ = forward.__doc__

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
        if instance is None:
            return self._forward
        return MethodType(instance.__dict__.get(SIGNED, self._forward), instance)


SIGNED = "_signed_forward"
"""The attribute of a module that holds its forward."""


def sign(module: Any, calling: Calling | None) -> None:
    """Let the forward of a module have a signature of its own. It is not bound: that would hold the module."""
    if calling is None:
        return
    forward: FunctionType = type(module).forward
    own = FunctionType(forward.__code__, forward.__globals__, "forward", forward.__defaults__, forward.__closure__)
    vars(own).update(vars(forward))
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    taken = list(calling.signature.parameters.values())
    if any(one.name == "self" for one in taken):
        first = first.replace(name="module_")
    vars(own)["__signature__"] = calling.signature.replace(parameters=[first, *taken])
    own.__doc__ = forward.__doc__
    module.__dict__[SIGNED] = own
