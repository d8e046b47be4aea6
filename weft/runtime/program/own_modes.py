"""Own modes: what a `train()` or `eval()` of the model's own makes of the modes, and of nothing else.

In: the original module, the modes that are set now, and the call. Out: the modes after it. The module is as it was
afterwards, whatever the call does. A call that changes weights, buffers or attributes (one that merges adapters into
weights, say) is refused: programs would not follow. Writes to tensors are stopped before they happen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from weft.errors import RunError
from weft.runtime.program.surface import STANDARD, Modes, has_own_modes, joined, modes_of, set_modes

ONE = threading.Lock()
"""Ranks that are threads have one original."""
Change = Callable[[nn.Module], object]
"""What sets modes: `train(mode)` or `eval()`."""
TABLES = ("_parameters", "_buffers", "_modules")
REMEDY = (
    "let train() and eval() set modes alone, and do the rest in a method that is called before parallelize(); to "
    "evaluate with other weights, load parallel.full_state_dict() into a module of its own"
)


def modes_after(module: nn.Module, change: Change, path: str = "", now: Modes | None = None) -> Modes:
    """What a call on a submodule makes of the modes; the module stays as it is.

    Args:
        path: of the submodule.
        now: the modes before it, if they are not the module's.
    """
    with ONE:
        state, found = _State(module), Modes()
        writes = _NoWrites(state.tensors)
        try:
            if now is not None:
                set_modes(module, now)
            with writes, suppress(_WrittenError):
                change(module.get_submodule(path))
            found = modes_of(module)
        finally:
            changed = [*writes.names, *state.restore()]
    if changed:
        raise _refusal(module, changed[0])
    return found


class _WrittenError(Exception):
    """A tensor of the module was to be changed."""


class _NoWrites(TorchDispatchMode):
    """Stops what would change a tensor of the module."""

    def __init__(self, tensors: list[tuple[str, Tensor]]) -> None:
        super().__init__()
        self.names: list[str] = []
        self._names = {one.untyped_storage()._cdata: name for name, one in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | (kwargs or {})
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for one in pytree.tree_leaves(given.get(argument.name)):
                    name = self._names.get(one.untyped_storage()._cdata) if isinstance(one, Tensor) else None
                    if name is not None:
                        # the module may catch the error
                        self.names.append(name)
                        raise _WrittenError(name)
        return func(*args, **(kwargs or {}))


class _State:
    """All of a module that a method of its own may change."""

    def __init__(self, module: nn.Module) -> None:
        self._subs = [(path, sub, dict(vars(sub))) for path, sub in module.named_modules()]
        self._held = [(path, name, value, _copy(value)) for path, name, value in self._containers()]
        self.tensors = [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]
        self._memory = [(name, one, one.detach(), one.requires_grad) for name, one in self.tensors]

    def _containers(self) -> Iterator[tuple[str, str, Any]]:
        for path, _, values in self._subs:
            for name, value in values.items():
                if type(value) in (dict, list, set) and (name not in STANDARD or name in TABLES):
                    yield path, name, value

    def restore(self) -> list[str]:
        """Put all back; the names of what was changed, modes left out."""
        changed = []
        for path, sub, before in self._subs:
            others = _others(vars(sub), before)
            changed += [joined(path, name) for name in others if name not in STANDARD or name in TABLES]
            vars(sub).clear()
            vars(sub).update(before)
        for path, name, value, before in self._held:
            if not _same_items(value, before):
                changed.append(joined(path, next(_others(value, before)) if name in TABLES else name))
                value.clear()
                value.extend(before) if isinstance(value, list) else value.update(before)
        for name, one, memory, required in self._memory:
            if one.untyped_storage()._cdata != memory.untyped_storage()._cdata:
                changed.append(name)
                one.data = memory
            if one.requires_grad != required:
                changed.append(f"requires_grad of {name}")
                one.requires_grad_(required)
        return changed


def _copy(value: Any) -> Any:
    return type(value)(value)


def _same(one: Any, other: Any) -> bool:
    plain = isinstance(one, bool | int | float | str | None) and type(one) is type(other)
    return one is other or (plain and one == other)


def _others(value: dict[str, Any], before: dict[str, Any]) -> Iterator[str]:
    """The keys of what is another than before."""
    gone = object()
    return (key for key in {**before, **value} if not _same(value.get(key, gone), before.get(key, gone)))


def _same_items(value: Any, before: Any) -> bool:
    if isinstance(value, dict):
        return not any(True for _ in _others(value, before))
    return value == before if isinstance(value, set) else len(value) == len(before) and all(map(_same, value, before))


def _refusal(module: nn.Module, name: str) -> RunError:
    """Names the method of the innermost submodule around what it changes."""
    own = [(path, sub) for path, sub in module.named_modules() if has_own_modes(sub)]
    around = [(path, sub) for path, sub in own if not path or f"{name}.".startswith(f"{path}.")]
    _, sub = max(around or own, key=lambda one: len(one[0]))
    kind = type(sub)
    methods = [getattr(sub, each) for each in ("train", "eval") if getattr(kind, each) is not getattr(nn.Module, each)]
    code = getattr(getattr(methods[0], "__func__", None), "__code__", None) if methods else None
    return RunError(
        f"{methods[0].__name__ if methods else 'train'}() of {kind.__name__} changes {name}, and programs follow its "
        "modes only",
        place="" if code is None else f"{_relative(code.co_filename)}:{code.co_firstlineno}",
        remedy=REMEDY,
    )


def _relative(file: str) -> str:
    path = Path(file).absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
