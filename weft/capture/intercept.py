"""What torch.export would lose: opaque autograd functions, checkpoint regions, layer-drop of zero.

Enters: a running trace. Leaves: marker calls in the traced graph (operators of the library `weft`, which exist only
inside `intercept()`), and an `Interception` that says what they stand for.

- `autograd.Function`: export inlines forward and drops the user's backward. Each call becomes one
  `weft.function(key, tensors)`.
- `torch.utils.checkpoint`: export erases it. The region becomes `weft.enter(...)` ... `weft.leave(...)`.
- `torch.rand([]) < 0.0`: a branch on data that can go one way only. It is answered with False.

Promised: everything patched is put back, also after an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch._ops import _get_dispatch_mode_pre_dispatch  # type: ignore[attr-defined]
from torch.autograd.function import _SingleLevelFunction
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

from weft.errors import CaptureError

FUNCTION, ENTER, LEAVE = "weft.function.default", "weft.enter.default", "weft.leave.default"


@dataclass(frozen=True)
class Applied:
    """One call of an `autograd.Function`: the class, and how its arguments nest.

    Called with the flattened arguments it applies the function, its own backward intact, and returns the tensors among
    the outputs: one as itself, several as a tuple.
    """

    cls: type
    leaves: tuple[Any, ...]
    """Flattened arguments; None where a tensor stands."""
    tensors: tuple[int, ...]
    """Positions of the tensors among the leaves."""
    spec: pytree.TreeSpec

    def __call__(self, *leaves: Any) -> Any:
        outputs = original_apply(self.cls, *pytree.tree_unflatten(leaves, self.spec))
        tensors = tuple(leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor))
        return tensors[0] if len(tensors) == 1 else tensors

    def arguments(self, tensors: Sequence[Any]) -> list[Any]:
        """The flattened arguments with these tensors put in their places."""
        leaves = list(self.leaves)
        for position, tensor in zip(self.tensors, tensors, strict=True):
            leaves[position] = tensor
        return leaves

    @property
    def name(self) -> str:
        return self.cls.__qualname__.replace("<locals>.", "")


@dataclass
class Interception:
    """What the markers of one trace stand for."""

    functions: list[Applied] = field(default_factory=list)
    outputs: dict[int, Any] = field(default_factory=dict)
    """For each function call, its outputs' tree with True where a tensor stands."""
    regions: int = 0

    def apply(self, cls: type, *args: Any) -> Any:
        """Stands in for `Function.apply` while tracing."""
        if not is_tracing():
            return original_apply(cls, *args)
        if cls is checkpoint.CheckpointFunction:
            run, _, *rest = args
            with self.region(reentrant=True, tensors=tensors_of(rest)):
                return run(*rest)
        leaves, spec = pytree.tree_flatten(args)
        positions = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        fixed = tuple(None if i in positions else leaf for i, leaf in enumerate(leaves))
        key = len(self.functions)
        self.functions.append(Applied(cls, fixed, positions, spec))
        made = torch.ops.weft.function(key, [leaves[i] for i in positions])
        flat, out_spec = pytree.tree_flatten(self.outputs[key])
        given = iter(made)
        return pytree.tree_unflatten([next(given) if leaf is TENSOR else leaf for leaf in flat], out_spec)

    def infer(self, key: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Shapes and dtypes of an opaque function's outputs; refuses one that writes into its inputs."""
        applied = self.functions[key]
        versions = [tensor._version for tensor in tensors]
        with torch.no_grad():
            outputs = original_apply(applied.cls, *pytree.tree_unflatten(applied.arguments(tensors), applied.spec))
        if versions != [tensor._version for tensor in tensors]:
            raise CaptureError(
                f"the autograd.Function {applied.name} changes its input in place",
                remedy="return a new tensor from its forward",
            )
        flat, spec = pytree.tree_flatten(outputs)
        kinds = [TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in flat]
        self.outputs[key] = pytree.tree_unflatten(kinds, spec)
        return [torch.empty_like(leaf) for leaf in flat if isinstance(leaf, torch.Tensor)]

    @contextmanager
    def region(self, *, reentrant: bool, tensors: list[torch.Tensor]) -> Iterator[None]:
        """A checkpoint region: all that is traced inside is to be recomputed."""
        self.regions += 1
        number = self.regions
        torch.ops.weft.enter(number, reentrant, tensors)
        yield
        torch.ops.weft.leave(number)

    def checkpoint_generator(self, _function: Any, *rest: Any, **kwargs: Any) -> Iterator[None]:
        """Stands in for the generator that surrounds a non-reentrant checkpoint."""
        with self.region(reentrant=False, tensors=tensors_of((rest, kwargs))):
            yield


class _TensorMark:
    """Stands for a tensor in an output tree."""


TENSOR = _TensorMark()


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def is_tracing() -> bool:
    """Whether the user's own code runs, not the inside of an operator."""
    return _get_dispatch_mode_pre_dispatch(torch._C._TorchDispatchModeKey.PROXY) is not None


def original_apply(cls: type, *args: Any) -> Any:
    """`cls.apply`, going round the interception."""
    return super(_SingleLevelFunction, cls).apply(*args)  # type: ignore[misc]


class LayerDrop(TorchFunctionMode):
    """Answers `torch.rand(...) < c` with False where c <= 0: a uniform draw is never negative."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.lt, torch.less, torch.Tensor.lt, torch.Tensor.__lt__, torch.Tensor.less) and len(args) == 2:
            drawn, bound = args
            if isinstance(bound, int | float) and bound <= 0 and any(drawn is draw for draw in self.draws):
                return False
        result = func(*args, **kwargs)
        if func is torch.rand and result.numel() == 1:
            self.draws.append(result)
        return result


@contextmanager
def intercept() -> Iterator[Interception]:
    """While this is entered, traced calls leave markers."""
    found = Interception()
    library = torch.library.Library("weft", "FRAGMENT")
    library.define("function(int key, Tensor[] tensors) -> Tensor[]")
    library.define("enter(int region, bool reentrant, Tensor[] tensors) -> ()")
    library.define("leave(int region) -> ()")
    torch.library.register_fake("weft::function", found.infer, lib=library)
    torch.library.register_fake("weft::enter", lambda region, reentrant, tensors: None, lib=library)
    torch.library.register_fake("weft::leave", lambda region: None, lib=library)
    # Without outputs the markers look dead to export's own clean-up; random draws count even if dead.
    lasting = torch.fx.node._side_effectful_functions
    markers = {torch.ops.weft.enter.default, torch.ops.weft.leave.default, torch.ops.weft.function.default}
    _SingleLevelFunction.apply = classmethod(found.apply)  # type: ignore[attr-defined]
    lasting.update(markers)
    try:
        with mock.patch.object(checkpoint, "_checkpoint_without_reentrant_generator", found.checkpoint_generator):
            yield found
    finally:
        del _SingleLevelFunction.apply  # type: ignore[attr-defined]
        lasting.difference_update(markers)
        library._destroy()
