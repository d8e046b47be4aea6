"""Recording: a module is built without its values; what would have made them is written down, to be run later.

In: a function that makes a module, a seed. Out: the module with *hollow* parameters (ordinary CPU tensors on memory
that was never touched, which costs nothing) and the Record. Small tensors that depend on no random number are computed
at once, so that constructors may look at them; everything else is written down by storage, so views, `.data` and ties
need no care. Promised: what cannot be written down (a look at a hollow value, a generator of the user's, another
device) raises Unrecordable; nothing is guessed. Seeds that the constructor sets, and generator states that it puts
back, are kept.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from weft.runtime.start.record import At, Entry, Record

SMALL = 1 << 16
"""Elements up to which a tensor that depends on no random number is computed at once."""
SENTINEL = 0x5EED_0000_0000
"""Seeds from here on mark the generator's states while it is recorded: the n-th after n draws."""
FILLS = frozenset(
    f"aten::{name}_"
    for name in (
        *("normal", "uniform", "fill", "zero", "copy", "log_normal"),
        *("exponential", "cauchy", "geometric", "bernoulli", "random"),
    )
)
"""In-place operators that do not read what they overwrite."""
EMPTY = frozenset(
    f"aten::{name}" for name in ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")
)
LOOKS = frozenset(
    {"numpy", "tolist", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage", "__reduce_ex__"}
    | {"share_memory_"}
)
"""Methods that reach for the memory of a tensor, past every operator."""

WHOLE_FUNCTIONS = {"_no_grad_trunc_normal_": ("tensor", "mean", "std", "a", "b")}
"""Functions of torch's `nn.init` that look at what they draw, and their arguments: each is recorded as one operator."""


class Unrecordable(Exception):  # noqa: N818 - says what is the matter
    """The construction cannot be written down."""


@dataclass(frozen=True)
class Recorded:
    """A module with hollow parameters, and how its values come about."""

    module: nn.Module
    record: Record
    strays: dict[int, torch.UntypedStorage]
    """Hollow storages by number that are no parameter's, and that somebody still holds: buffers, plain attributes."""


def record_module(factory: Callable[[], nn.Module], seed: int) -> Recorded:
    """Call the function without making values. Torch's generator is as before afterwards.

    Raises:
        Unrecordable: with the reason, also where the function raises; Python's and NumPy's generators are as before
            then, for the function to be called again."""
    with torch.random.fork_rng(devices=[]), _undone():
        torch.manual_seed(seed)
        recorder = Recorder()
        with _whole_functions(recorder), _Guard(recorder), recorder:
            module = factory()
        if recorder.reason:
            raise Unrecordable(recorder.reason)
        if not isinstance(module, nn.Module):
            raise Unrecordable("it returned no module")
        parameters = dict(module.named_parameters(remove_duplicate=False))
        tensors = {**parameters, **dict(module.named_buffers(remove_duplicate=False))}
        found = {name: recorder.reference(tensor) for name, tensor in tensors.items()}
        raw = frozenset(name for name, tensor in tensors.items() if tensor.numel() and recorder.is_raw(tensor))
    own = {at.storage for name, at in found.items() if name in parameters and isinstance(at, At)}
    strays = {
        number: storage
        for number, storage in enumerate(recorder.storages)
        if number not in own and torch._C._storage_Use_Count(storage._cdata) > 1
    }
    sizes = tuple(storage.nbytes() for storage in recorder.storages)
    return Recorded(module, Record(tuple(recorder.entries), sizes, found, seed, raw), strays)


@contextlib.contextmanager
def _undone() -> Iterator[None]:
    """Whatever ends the construction early: Python's and NumPy's generators are put back, to do it again."""
    python, numpy = random.getstate(), sys.modules.get("numpy")
    drawn = None if numpy is None else numpy.random.get_state()
    try:
        yield
    except Exception as error:
        random.setstate(python)
        if drawn is not None:
            sys.modules["numpy"].random.set_state(drawn)
        if isinstance(error, Unrecordable):
            raise
        raise Unrecordable(f"{type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _whole_functions(recorder: Recorder) -> Iterator[None]:
    """Initialisers that look at what they draw are one operator each."""
    module, (name,) = nn.init, WHOLE_FUNCTIONS
    original = getattr(module, name)

    def recorded(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs.pop("generator", None) is not None or any(isinstance(one, torch.Generator) for one in args):
            recorder.refuse("it draws from a generator of its own")
        with torch._C.DisableTorchFunction():
            recorder.write(original, (tensor, *args), kwargs, (tensor,), fills=True, draws=True)
        return tensor

    setattr(module, name, recorded)
    try:
        yield
    finally:
        setattr(module, name, original)


class _Guard(TorchFunctionMode):
    """Refuses to hand out the memory of hollow tensors."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in LOOKS and args and isinstance(args[0], Tensor):
            with torch._C.DisableTorchFunction():
                if self._recorder.is_hollow(args[0]):
                    self._recorder.refuse(f"it calls {func.__name__}() on a value that is not there yet")
        return func(*args, **(kwargs or {}))


@dataclass
class _Seen:
    """The generator while it is recorded."""

    generator: torch.Generator
    draws: int = 0
    last: Tensor | None = None

    def mark(self) -> None:
        """Note that all draws up to here are known."""
        self.generator.manual_seed(SENTINEL + self.draws)
        self.last = self.generator.get_state()

    def changed(self) -> Tensor | int | None:
        """What somebody has set the generator to since the last mark; None if nobody has."""
        assert self.last is not None, "the first mark is made before anything is drawn"
        now = self.generator.get_state()
        if torch.equal(now, self.last):
            return None
        draws = self.generator.initial_seed() - SENTINEL
        if 0 <= draws <= self.draws and torch.equal(now, torch.Generator().manual_seed(SENTINEL + draws).get_state()):
            return draws
        return now


class Recorder(TorchDispatchMode):
    """Writes down what is done to tensors, by storage."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self.storages: list[torch.UntypedStorage] = []
        self.reason = ""
        self._numbers: dict[int, int] = {}
        self._made: dict[int, torch.UntypedStorage] = {}
        self._raw: set[int] = set()
        self._seen = _Seen(torch.default_generator)
        # the generator is as the first draw is to find it
        self._seen.mark()

    def refuse(self, reason: str) -> None:
        """What is done cannot be written down."""
        self.reason = self.reason or reason
        raise Unrecordable(reason)

    def is_hollow(self, tensor: Tensor) -> bool:
        return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._numbers

    def reference(self, tensor: Tensor) -> At | Tensor:
        """Where a tensor lies; itself if it has its values."""
        if not self.is_hollow(tensor):
            return tensor.detach()
        if tensor.is_conj() or tensor.is_neg():
            self.refuse("it makes conjugate or negative views")
        number = self._numbers[tensor.untyped_storage()._cdata]
        return At(number, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            if any(one.device.type != "cpu" for one in _tensors((args, kwargs))) or not _on_cpu(kwargs.get("device")):
                self.refuse("it makes tensors on another device")
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = _tensors((args, kwargs))
        hollow = any(map(self.is_hollow, inputs))
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if draws and kwargs.get("generator") is not None:
            self.refuse("it draws from a generator of its own")
        if func.is_view or func._schema.name == "aten::set_":
            return func(*args, **kwargs)
        sizes = _sizes(func, args, kwargs)
        if not hollow and not draws and (sizes is None or all(one.numel() <= SMALL for one in sizes)):
            for one in _written(func, args, kwargs).values():
                self._raw.discard(one.untyped_storage()._cdata)
            return self._known(func(*args, **kwargs), raw=func._schema.name in EMPTY)
        if sizes is None:
            self.refuse(f"it calls {func} on a value that is not there yet")
        return self._write_call(func, args, kwargs, sizes, draws)

    def _known(self, results: Any, *, raw: bool) -> Any:
        """Results that have their values, or (raw) memory in which anything may stand."""
        for one in _tensors(results):
            if one.layout is torch.strided:
                storage = one.untyped_storage()
                self._made[storage._cdata] = storage
                if raw:
                    self._raw.add(storage._cdata)
        return results

    def is_raw(self, tensor: Tensor) -> bool:
        """True if nothing has been written where the tensor lies."""
        return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._raw

    def _write_call(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Sequence[Tensor] | None, draws: bool
    ) -> Any:
        assert sizes is not None
        written = _written(func, args, kwargs)
        results: list[Any] = [
            written.get(_alias(one)) if one.alias_info is not None else None for one in func._schema.returns
        ]
        if any(one is None for one in results) and len(sizes) != len(results):
            self.refuse(f"{func} returns a list of tensors")
        made = []
        for position, size in enumerate(sizes):
            fresh = position >= len(results) or results[position] is None
            made.append(self._hollow(size) if fresh else None)
            if fresh:
                results[position] = made[-1]
        if func._schema.name not in EMPTY:
            fills = func._schema.name in FILLS
            self.write(func, args, kwargs, tuple(written.values()), fills=fills, draws=draws, made=made)
        return results[0] if len(results) == 1 else tuple(results)

    def _hollow(self, like: Tensor) -> Tensor:
        """A tensor of that form on memory that nobody touches."""
        tensor = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        self._number(tensor.untyped_storage())
        return tensor

    def _number(self, storage: torch.UntypedStorage) -> int:
        self._numbers[storage._cdata] = len(self.storages)
        self.storages.append(storage)
        return len(self.storages) - 1

    def write(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: Sequence[Tensor],
        *,
        fills: bool,
        draws: bool,
        made: Sequence[Tensor | None] = (),
    ) -> None:
        """Write a call down."""
        covers = set()
        for tensor in written:
            number = self._adopt(tensor, keep=not (fills and _is_all(tensor)))
            others = [one for one in _tensors((args, kwargs)) if one is not tensor]
            if fills and _is_all(tensor) and not any(_same_storage(one, tensor) for one in others):
                covers.add(number)
        refers = self.reference
        state = self._seen.changed() if draws else None
        args, kwargs = tree_map(lambda one: _kept(refers(one)) if isinstance(one, Tensor) else one, (args, kwargs))
        makes = tuple(None if one is None else refers(one) for one in made)
        writes = frozenset(self._numbers[one.untyped_storage()._cdata] for one in written)
        dtype = torch.get_default_dtype()
        self.entries.append(
            Entry(function, args, kwargs, makes, writes, frozenset(covers), draws, state, dtype, _line())  # type: ignore[arg-type]
        )
        if draws:
            self._seen.draws += 1
            self._seen.mark()

    def _adopt(self, tensor: Tensor, *, keep: bool) -> int:
        """The storage of a tensor that is to be overwritten by what is not there yet."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._numbers:
            return self._numbers[storage._cdata]
        self._raw.discard(storage._cdata)
        if storage._cdata not in self._made:
            self.refuse("it changes a tensor that was there before")
        content = torch.empty(0, dtype=torch.uint8).set_(storage).clone() if keep else None
        number = self._number(storage)
        if content is not None:
            whole = At(number, 0, (storage.nbytes(),), (1,), torch.uint8)
            self.entries.append(
                Entry(torch.ops.aten.copy_.default, (whole, content), {}, (), frozenset({number}), frozenset({number}))
            )
        return number


def _line() -> str:
    """The innermost line that runs now and is neither torch's nor ours."""
    own = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(own):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _kept(value: Any) -> Any:
    """A tensor that has its values may lose them: a copy of it as it is now."""
    return value.clone() if isinstance(value, Tensor) else value


def _tensors(tree: Any) -> list[Tensor]:
    """Arguments are plain lists, tuples and dicts: a walk of our own is many times as fast as torch's."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        return []
    return [found for one in tree for found in _tensors(one)]


def _same_storage(a: Tensor, b: Tensor) -> bool:
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def _is_all(tensor: Tensor) -> bool:
    """True if the tensor covers its storage."""
    dense = bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))
    return dense and tensor.storage_offset() == 0 and tensor.nbytes == int(tensor.untyped_storage().nbytes())


def _alias(argument: Any) -> str:
    return ",".join(sorted(argument.alias_info.before_set))


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors that an operator writes to, by the alias that its schema gives them."""
    found = {}
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            if isinstance(value, Tensor):
                found[_alias(argument)] = value
    return found


def _sizes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor] | None:
    """What the results look like; None if that cannot be told without the values."""
    if func is torch.ops.aten._local_scalar_dense.default:
        return None
    there = {key: torch.device("meta") if isinstance(one, torch.device) else one for key, one in kwargs.items()}
    if not _tensors((args, kwargs)) and any(one.name == "device" for one in func._schema.arguments):
        there["device"] = torch.device("meta")
    like = tree_map(lambda one: _meta(one) if isinstance(one, Tensor) else one, (args, there))
    try:
        return _tensors(func(*like[0], **like[1]))
    except (RuntimeError, ValueError, IndexError):
        return None


def _on_cpu(device: torch.device | str | None) -> bool:
    return torch.device(device or "cpu").type == "cpu"


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
