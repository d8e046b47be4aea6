"""Notices what a trace cannot hold: state outside the graph that forward changes.

Enters: the module, before and after its forward ran. Leaves: nothing if all is as before; else a `CaptureError` with
the line that did it (found by a second run under a line trace). Watched: attributes of every sub-module (numbers,
containers, plain objects, generators), Python's and NumPy's random state. Reassigned buffers are not errors: they
are returned as updates. Nor are changes inside a plain object (a configuration that notes which loss it found),
attributes set to a number, word or flag (the length of the batch; something was set up at the first call) and forward
hooks put in place on that occasion, if they settle: a second trace, from the changed state, changes nothing more and
gives the same Graph (`api.py`). Tensors that forward keeps, and what it sets beside them, are judged in `caches.py`.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from traceback import FrameSummary
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from weft.capture.example import forward_file, forward_place
from weft.capture.source import is_users, package_of, place_of
from weft.capture.tracing.fingerprint import (
    BY_IDENTITY,
    CONTAINERS,
    DEPTH,
    PLAIN,
    Containers,
    fingerprint,
    holds_same,
    refill,
)
from weft.capture.tracing.modules import computed_attributes
from weft.capture.tracing.refuse import NUMBER_REMEDY
from weft.errors import CaptureError

STANDARD = frozenset(nn.Module().__dict__) - {"training"}

Key = tuple[str, str]
Update = tuple[torch.Tensor, torch.Tensor]


class Watch:
    """The state of a module before its forward.

    Args:
        tolerant: changes inside plain objects and of plain values are noted in `settling` and not refused. What
            attributes were set to stands in `values`.
    """

    def __init__(self, module: nn.Module, *, tolerant: bool = False) -> None:
        self.module, self.tolerant, self.settling = module, tolerant, False
        self.values: dict[Key, Any] = {}
        self.kept = False
        self.attributes = dict(attributes_of(module))
        self.prints = {key: fingerprint(value) for key, value in self.attributes.items()}
        self.containers = Containers(self.attributes.values())
        self.objects = {id(v): (v, dict(vars(v))) for v in plain_objects(self.attributes.values(), DEPTH)}
        self.inner = Containers(one for _, held in self.objects.values() for one in held.values())
        self.hooks = dict(hooks_of(module))
        self.children = {path: (sub, dict(vars(sub)["_modules"])) for path, sub in module.named_modules()}
        self.random = random_states()
        self.buffers = dict(tensors_of(module, "_buffers"))
        self.parameters = dict(tensors_of(module, "_parameters"))
        self.trained = {key: value.requires_grad for key, value in self.parameters.items() if value is not None}

    def restore(self) -> None:
        """Put attributes, containers, parameters and buffers back, each the very object that it was.

        Plain objects and hooks stay as they are: whether they settle is seen in a second trace.
        """
        for _, sub, children in self.exchanged():
            refill(vars(sub)["_modules"], children)
        modules = dict(self.module.named_modules())
        for key in dict(attributes_of(self.module)):
            if key not in self.attributes:
                del modules[key[0]].__dict__[key[1]]
        for (path, name), value in self.attributes.items():
            modules[path].__dict__[name] = value
        self.containers.restore()
        for kind, saved in (("_buffers", self.buffers), ("_parameters", self.parameters)):
            for path, name in set(dict(tensors_of(self.module, kind))) - set(saved):
                del modules[path].__dict__[kind][name]
                modules[path]._non_persistent_buffers_set.discard(name)
            for (path, name), tensor in saved.items():
                modules[path].__dict__[kind][name] = tensor
        restore_random(self.random)

    def restore_objects(self) -> None:
        """Give plain objects their old attributes, attributes their old plain values; take hooks away again."""
        for value, saved in self.objects.values():
            if not holds_same(vars(value), saved):
                refill(vars(value), saved)
        self.inner.restore()
        for path, name in filter(self.is_set, dict(attributes_of(self.module))):
            if (path, name) in self.attributes:
                self.module.get_submodule(path).__dict__[name] = self.attributes[path, name]
            else:
                del self.module.get_submodule(path).__dict__[name]
        for (path, name), saved in self.hooks.items():
            held = self.module.get_submodule(path).__dict__[name]
            if held != saved:
                refill(held, saved)

    def exchanged(self) -> list[tuple[str, nn.Module, dict[str, nn.Module | None]]]:
        """Submodules that have others than they had, by path, with what they had."""
        # export shows a module that has two paths through proxies, which make their children anew when they are asked
        found = ((path, sub, before, vars(sub)["_modules"]) for path, (sub, before) in self.children.items())
        return [one[:3] for one in found if any(one[3].get(name) is not child for name, child in one[2].items())]

    def is_set(self, key: Key) -> bool:
        """Whether an attribute has another plain value than before, or is new and plain: it may settle."""
        held = vars(self.module.get_submodule(key[0]))
        if key[1] not in held or not is_plain(held[key[1]]):
            return False
        return key not in self.attributes or (
            is_plain(self.attributes[key]) and fingerprint(held[key[1]]) != self.prints[key]
        )

    def refuse_changes(self, rerun: Callable[[], Any]) -> None:
        """Raise if forward left a trace outside the graph. `rerun` runs forward once more, to find the line."""
        if random_states() != self.random:
            line = blame(rerun, random_states, self.packages())
            raise CaptureError(
                "forward draws from Python's or NumPy's random generator: the draw would be frozen into the program",
                place=line or forward_place(self.module),
                remedy="draw with torch.rand, torch.randint ..., or outside forward and pass the result in",
            )
        for path, sub, _ in self.exchanged():
            self.restore()
            line = blame(rerun, lambda sub=sub: list(map(id, vars(sub)["_modules"].values())), self.packages())  # type: ignore[misc]
            raise CaptureError(
                f"forward removes or exchanges submodules of {path or type(sub).__name__}: the change would be lost",
                place=line or forward_place(sub),
                remedy="do it in __init__, or call them in another order without storing it",
            )
        for key, value in dict(attributes_of(self.module)).items():
            is_new = key not in self.prints or fingerprint(value) != self.prints[key]
            if not is_new or is_torchs(self.module.get_submodule(key[0]), key[1]):
                continue
            same_object = id(value) in self.objects and self.attributes.get(key) is value
            within = [one.value for one in self.changes_within()] if same_object else value
            if self.tolerant and is_cache(within):
                self.kept = True
            elif self.tolerant and (same_object or self.is_set(key)):
                self.settling = True
                if not same_object:
                    self.values[key] = value
            else:
                self.refuse_attribute(key, rerun)
        self.kept = self.kept or (self.tolerant and bool(self.cached_buffers()))
        if self.kept:
            self.settling, self.values = False, {}
        gone = set(self.attributes) - set(dict(attributes_of(self.module)))
        if gone:
            self.refuse_attribute(min(gone), rerun)
        after = dict(tensors_of(self.module, "_parameters"))
        trained = {key: value.requires_grad for key, value in after.items() if value is not None}
        if after.keys() != self.parameters.keys() or trained != self.trained:
            raise CaptureError(
                "forward adds, removes, freezes or unfreezes parameters",
                place=forward_place(self.module),
                remedy="do it before training, outside forward",
            )

    def changes(self) -> list[Change]:
        """What is another one than before, or holds something else."""
        modules, found = dict(self.module.named_modules()), list[Change]()
        for (path, name), value in attributes_of(self.module):
            if (path, name) not in self.prints or fingerprint(value) != self.prints[path, name]:
                found.append(Change(f"the attribute {dotted((path, name))}", vars(modules[path]), name, value))
        for path, name in self.cached_buffers():
            held = vars(modules[path])["_buffers"]
            found.append(Change(f"the buffer {dotted((path, name))}", held, name, held[name]))
        return [*found, *self.changes_within()]

    def changes_within(self) -> list[Change]:
        """The same of plain objects."""
        return [
            Change(f"the attribute {name} of a {type(owner).__name__}", vars(owner), name, value)
            for owner, saved in self.objects.values()
            for name, value in vars(owner).items()
            if fingerprint(self.inner.before(saved.get(name)), objects=False) != fingerprint(value, objects=False)
        ]

    def cached_buffers(self) -> list[Key]:
        """Buffers that forward made, and those that it made anew with another shape or dtype and that no state dict
        holds."""
        modules, found = dict(self.module.named_modules()), []
        for (path, name), new in tensors_of(self.module, "_buffers"):
            old = self.buffers.get((path, name))
            if new is None or new is old:
                continue
            is_other = old is None or (old.shape, old.dtype) != (new.shape, new.dtype)
            if is_other and (old is None or name in modules[path]._non_persistent_buffers_set):
                found.append((path, name))
        return found

    def refuse_attribute(self, key: Key, rerun: Callable[[], Any]) -> None:
        path, name = key
        owner = self.module.get_submodule(path)
        number = holds_symbol(vars(owner).get(name))
        # from the old state once more, so that the same line does it again
        self.restore()
        self.restore_objects()
        line = blame(rerun, lambda: fingerprint(owner.__dict__.get(name)), self.packages())
        if number:
            raise CaptureError(
                f"forward takes a number from the values in a tensor and keeps it in the attribute {dotted(key)}",
                place=line or forward_place(owner),
                remedy=NUMBER_REMEDY,
            )
        raise CaptureError(
            f"forward changes the attribute {dotted(key)}: the change would be lost",
            place=line or forward_place(owner),
            remedy="make it a buffer (register_buffer), return it, or pass it in",
        )

    def packages(self) -> set[str]:
        """Installed packages that the forwards are written in; "" for the user's own files."""
        files = {forward_file(sub) for sub in self.module.modules()}
        return {package_of(file) for file in files if is_users(file)} or {""}

    def updates(self, rerun: Callable[[], Any], written: Collection[int]) -> list[Update]:
        """Buffers that forward put other tensors in the place of: (old, new). The old ones are put back.

        Args:
            rerun: runs forward once more, to find the line of what is refused.
            written: the memory that forward changes in place.
        """
        modules = dict(self.module.named_modules())
        after, cached = dict(tensors_of(self.module, "_buffers")), self.cached_buffers() if self.tolerant else ()
        rebound = [key for key in {**self.buffers, **after} if after.get(key) is not self.buffers.get(key)]
        for key in rebound:
            if key not in cached and (new := after.get(key)) is not None and self.buffers.get(key) is not None:
                self.refuse_second_names(key, new, {one: after.get(one) for one in self.buffers}, written, rerun)
        found = []
        for key in {**self.buffers, **after}:
            old, new = self.buffers.get(key), after.get(key)
            if new is old or key in cached:
                continue
            if old is None or new is None or old.shape != new.shape or old.dtype != new.dtype:
                raise CaptureError(
                    f"forward changes the shape, dtype or existence of the buffer {dotted(key)}",
                    place=forward_place(modules[key[0]]),
                    remedy="register it in __init__ with its final shape and dtype, or with persistent=False",
                )
            modules[key[0]]._buffers[key[1]] = old
            found.append((old, new))
        return found

    def refuse_second_names(
        self,
        key: Key,
        new: torch.Tensor,
        after: Mapping[Key, torch.Tensor | None],
        written: Collection[int],
        rerun: Callable[[], Any],
    ) -> None:
        """Raise if a buffer that is replaced was, or becomes, a second name of memory that another name changes."""
        old, memory = self.buffers[key], memory_of(new)
        kept = {f"the parameter {dotted(one)}": value for one, value in self.parameters.items()}
        for one, value in after.items():
            is_other = one != key and value is not None
            if is_other and (value is self.buffers[one] or {memory, memory_of(self.buffers[one])} & set(written)):
                kept[f"the buffer {dotted(one)}"] = value
            if one != key and self.buffers[one] is old and value is not new:
                raise CaptureError(
                    f"the buffers {dotted(key)} and {dotted(one)} are one tensor, and forward makes {dotted(key)} "
                    "another one",
                    place=self.line_of(key, rerun),
                    remedy=f"give {dotted(key)} memory of its own (register_buffer(..., tensor.clone()))",
                )
        for label, value in kept.items():
            if value is not None and memory_of(value) == memory:
                raise CaptureError(
                    f"forward sets the buffer {dotted(key)} to what shares memory with {label}: on one device it would "
                    "follow later changes there",
                    place=self.line_of(key, rerun),
                    remedy="set it to a copy (.clone())",
                )

    def line_of(self, key: Key, rerun: Callable[[], Any]) -> str:
        """The line that replaces a buffer."""
        self.restore()
        self.restore_objects()
        owner = self.module.get_submodule(key[0])
        return blame(rerun, lambda: id(owner._buffers.get(key[1])), self.packages()) or forward_place(owner)


@dataclass(frozen=True)
class Change:
    """What forward kept: how it is told, the dict that holds it, its name there, and the value."""

    label: str
    space: Any
    name: str
    value: Any


def dotted(key: Key) -> str:
    return ".".join(filter(None, key))


def memory_of(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else int(tensor.untyped_storage()._cdata)


def is_made(leaf: Any) -> bool:
    """Whether a value stands for what a forward computes: a tensor, or a size."""
    return isinstance(leaf, FakeTensor) or (isinstance(leaf, torch.SymInt) and not free_unbacked_symbols(leaf))


def is_cache(value: Any) -> bool:
    """Whether a value holds what forward made, and else nothing that could hold such."""
    leaves = pytree.tree_leaves(value)
    return any(map(is_made, leaves)) and all(
        is_made(one) or is_plain(one) or isinstance(one, BY_IDENTITY) for one in leaves
    )


def plain_objects(values: Iterable[Any], depth: int) -> Iterator[Any]:
    """Those among some values, in containers there, and in such objects."""
    for one in values if depth else ():
        if is_plain_object(one):
            yield one
            yield from plain_objects(vars(one).values(), depth - 1)
        elif isinstance(one, (*CONTAINERS, tuple)):
            yield from plain_objects(one.values() if isinstance(one, dict) else one, depth - 1)


def attributes_of(module: nn.Module) -> Iterator[tuple[Key, Any]]:
    for path, sub in module.named_modules():
        for name, value in list(vars(sub).items()):
            if name not in STANDARD:
                yield (path, name), value


def hooks_of(module: nn.Module) -> Iterator[tuple[Key, Any]]:
    """The hooks of every sub-module, by kind."""
    for path, sub in module.named_modules():
        for name in sorted(STANDARD):
            if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")) and vars(sub)[name] is not None:
                yield (path, name), dict(vars(sub)[name])


def is_torchs(module: nn.Module, name: str) -> bool:
    """What torch sets by itself: second references that recurrent modules keep to their own parameters, and weights
    that hooks compute (`modules.py`)."""
    is_second = isinstance(module, nn.RNNBase) and name in ("_flat_weights", "_flat_weight_refs")
    return is_second or any(sub is module and name == one for sub, one in computed_attributes(module))


def holds_symbol(value: Any) -> bool:
    """Whether a value is, or a container holds, a number that stands for a value in a tensor."""
    if isinstance(value, dict):
        return any(map(holds_symbol, value.values()))
    if isinstance(value, list | tuple | deque | set):
        return any(map(holds_symbol, value))
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def is_plain(value: Any) -> bool:
    """A number, word or flag, or nothing."""
    return type(value) in PLAIN


def is_plain_object(value: Any) -> bool:
    """An object with attributes of its own that is no module, tensor, container, class or function."""
    is_known = isinstance(value, (*BY_IDENTITY, *CONTAINERS)) or callable(value)
    return hasattr(value, "__dict__") and not is_known


def tensors_of(module: nn.Module, kind: str) -> Iterator[tuple[Key, torch.Tensor | None]]:
    for path, sub in module.named_modules():
        for name, tensor in list(vars(sub)[kind].items()):
            yield (path, name), tensor


def random_states() -> tuple[Any, ...]:
    """Python's and, if loaded, NumPy's global random state, in a form that compares."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate(), None
    kind, keys, *rest = numpy.random.get_state()
    return random.getstate(), (kind, tuple(keys.tolist()), *rest)


def restore_random(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])


def blame(run: Callable[[], Any], state: Callable[[], Any], packages: set[str]) -> str:
    """Run again and name the first line of these packages after which `state()` differs; "" if none does."""
    before = state()
    lines: list[str] = []
    found: list[str] = []

    def on_line(frame: Any, event: str, _arg: Any) -> Any:
        if found:
            return None
        if lines and state() != before:
            found.append(lines[-1])
            return None
        if event == "line" or (event == "return" and is_users(frame.f_back.f_code.co_filename)):
            shown = frame if event == "line" else frame.f_back
            lines[:] = [place_of(FrameSummary(shown.f_code.co_filename, shown.f_lineno, ""))]
        return on_line

    def on_call(frame: Any, _event: str, _arg: Any) -> Any:
        file = frame.f_code.co_filename
        return on_line if is_users(file) and package_of(file) in packages and not found else None

    previous = sys.gettrace()
    sys.settrace(on_call)
    try:
        run()
    finally:
        sys.settrace(previous)
    return found[0] if found else (lines[-1] if lines and state() != before else "")
