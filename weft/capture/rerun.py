"""Rerun: forward's Python runs once more, and has to call of torch what it called when the program was made.

In: a module, the arguments of a call, the modes that it was captured in. Out: nothing as long as its forward makes the
same calls, of the same functions, with the same numbers, on the same parameters; else the first line that differs.
Whatever forward reads (an attribute, a class, a registry, memory that it shares) and however that was changed, it
shows here, if it changes what is computed. Which modes and hooks the module has, and which of its parameters are
trained, is as it was at the first run: the module lives on beside the program, and may be used for something else.

Promised: tensors are fake, nothing is computed, and the module and all random states are as before; nobody else may
look at the module meanwhile. A forward that keeps something, that needs values, or that by itself makes other calls
each time, is not known in this way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from weft.capture.example import Example, flatten_example, forward_place
from weft.capture.source import place_here
from weft.capture.tracing.modules import refuse_modules, without_computed
from weft.capture.tracing.repeat import plain
from weft.capture.tracing.surroundings import Surroundings
from weft.capture.tracing.trace import fakes_of, quiet_torch, stand_ins
from weft.capture.tracing.watch import Watch
from weft.runtime.program.surface import Modes, modes_kept, set_modes
from weft.runtime.weights.precision import Precision, Rules

Said = tuple[Any, ...]
"""A torch call in a form that compares."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
ARRAY = 65536
"""Bytes of an array that are compared."""


def identity(tensor: Tensor) -> Tensor:
    """As it is saved."""
    return tensor


class StoppedError(Exception):
    """The call that was looked for is here."""


class Fake(FakeTensorMode):
    """Tensors without values. What they call themselves, to find out shapes, depends on what they know already:
    of TorchScript's operators a listener hears it."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.inside = 0
        """How many operators are being answered."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.inside += 1
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.inside -= 1


class Listener(TorchFunctionMode):
    """Notes every torch call.

    Args:
        mode: of the tensors.
        names: of tensors, by identity.
        stop: the number of the call at which to stop.
    """

    def __init__(self, mode: Fake, names: dict[int, str], stop: int | None = None) -> None:
        super().__init__()
        self._mode = mode
        self.calls, self.place = list[Said](), ""
        self._names, self._stop = dict(names), stop
        self._alive = list[Any]()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if self._mode.inside:
            return func(*args, **given)
        with torch._C.DisableTorchFunction():
            self.calls.append((func, tuple(given), *map(self._said, pytree.tree_leaves((args, given)))))
        if len(self.calls) - 1 == self._stop:
            self.place = place_here()
            raise StoppedError
        result = func(*args, **given)
        for at, one in enumerate(pytree.tree_leaves(result)):
            if isinstance(one, Tensor) and id(one) not in self._names:
                self._names[id(one)] = f"{len(self.calls)}.{at}"
        # an identity stays that of one tensor
        self._alive.append(result)
        return result

    def _said(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self._names.get(id(leaf)) or plain(leaf)
        if hasattr(leaf, "tobytes") and getattr(leaf, "nbytes", ARRAY + 1) <= ARRAY:
            return leaf.tobytes()
        return plain(leaf)


class Rerun:
    """What a module's forward calls of torch.

    Args:
        example: the arguments of a call.
        modes: what is in training mode.
    """

    def __init__(self, module: nn.Module, example: Any, modes: Modes, precision: Precision | None) -> None:
        refuse_modules(module)
        self.example, self.modes = example, modes
        self._module, self._precision = module, precision
        self._example: Example = flatten_example(module, example)
        self._hooks = [(sub, name, vars(sub)[name].copy()) for sub in module.modules() for name in HOOKS]
        self._mode, self._lock = Fake(), Lock()
        self._fakes = list(fakes_of(module, precision, self._mode, moved=False))
        with self._mode:
            self._inputs = stand_ins(self._example)
        self._names = {id(fake): f"held {at}" for at, (_, _, _, fake) in reversed(list(enumerate(self._fakes)))}
        self._names |= {id(one): f"input {at}" for at, one in enumerate(self._inputs)}
        self._first: list[Said] | None = None
        self._is_learned = False

    def learn(self) -> None:
        """What forward does now is what it is to do."""
        if not self._is_learned:
            self._first, self._is_learned = self._learned(), True

    def difference(self) -> str:
        """Where forward does something else than at the first run, which this is if there was none; "" if it does the
        same."""
        if torch._C._len_torch_function_stack():
            return ""
        self.learn()
        if self._first is None:
            return ""
        with self._lock:
            now = self._calls()
            if now == self._first:
                return ""
            if now != self._calls():
                # it makes other calls each time
                self._first = None
                return ""
            pairs = enumerate(zip(now or (), self._first, strict=False))
            at = next((at for at, (one, before) in pairs if one != before), None)
            place = "" if at is None else self._place(at)
        return f"forward does something else at {place or forward_place(self._module)} than when the program was made"

    def _learned(self) -> list[Said] | None:
        """What a forward calls that keeps nothing."""
        surroundings = Surroundings(self._module)
        try:
            calls = self._calls(strict=True)
            return None if surroundings.filled() or surroundings.changed() or surroundings.kept() else calls
        finally:
            surroundings.restore()

    def _calls(self, *, strict: bool = False) -> list[Said] | None:
        """What forward calls now; None if it raises, or if it is to keep nothing (`strict`) and does."""
        listener, watch = Listener(self._mode, self._names), Watch(self._module, tolerant=True)
        try:
            self._run(listener)
            return None if strict and (watch.changes() or watch.exchanged()) else listener.calls
        except Exception:  # noqa: BLE001 - the user's code on tensors without values
            return None
        finally:
            watch.restore()
            watch.restore_objects()

    def _place(self, number: int) -> str:
        """The line of a call."""
        listener, watch = Listener(self._mode, self._names, number), Watch(self._module, tolerant=True)
        try:
            with suppress(Exception):
                self._run(listener)
        finally:
            watch.restore()
            watch.restore_objects()
        return listener.place

    def _run(self, listener: Listener) -> None:
        precision = self._precision
        tensors = self._inputs if precision is None else precision.inputs(self._inputs)
        args, kwargs = self._example.arguments(tensors)
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(quiet_torch())
            stack.callback(torch.set_rng_state, torch.get_rng_state())
            stack.enter_context(modes_kept(self._module))
            set_modes(self._module, self.modes)
            stack.enter_context(without_computed(self._module))
            stack.enter_context(self._put())
            stack.enter_context(_disable_current_modes())
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            # the caller's would be given fake tensors, and may end this
            stack.enter_context(saved_tensors_hooks(identity, identity))
            stack.enter_context(self._mode)
            stack.enter_context(listener)
            with nullcontext() if precision is None else Rules(precision):
                self._module(*args, **kwargs)

    @contextmanager
    def _put(self) -> Iterator[None]:
        """The module with fake parameters and buffers, which have the attributes of the real ones, and the hooks that
        it had."""
        hooks = [(vars(sub), name, vars(sub)[name]) for sub, name, _ in self._hooks]
        for sub, name, before in self._hooks:
            vars(sub)[name] = before
        bare = [dict(vars(fake)) for *_, fake in self._fakes]
        for held, name, real, fake in self._fakes:
            vars(fake).update(vars(real))
            held[name] = fake
        try:
            yield
        finally:
            for held, name, now in hooks:
                held[name] = now
            for held, name, real, _ in self._fakes:
                held[name] = real
            for before, (*_, fake) in zip(bare, self._fakes, strict=True):
                vars(fake).clear()
                vars(fake).update(before)
