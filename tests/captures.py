"""Captures that tests share: what was captured once in a session is not captured again.

Many tests compile the same model under many plans, and capturing it takes longer than all that follows. The key is the
content of the module and of the example: attributes, what tensors are like, values of all tensors but parameters (a
capture does not read those, which `tests/capture` shows), and the settings of torch that a forward may ask for. Classes
and functions count by identity, or, of a model file, by the text of the file. A module that holds something else that
cannot be written down is captured each time. Graphs are frozen: tests may have the same one. Tests of capture itself do
without (`tests/capture/conftest.py`).
"""

from __future__ import annotations

import hashlib
import io
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from weft.capture import api
from weft.ir.graph import Graph

LARGE = 1 << 20
"""Bytes of a tensor whose values are not looked at: what holds it is captured each time."""
_BY_IDENTITY = (type, FunctionType, BuiltinFunctionType, ModuleType, CodeType, torch._ops.OpOverload)

Captured = Callable[..., Graph]


class TooLargeError(Exception):
    """A tensor whose values would have to be compared is large."""


class _Writer(pickle.Pickler):
    """Writes down what a capture depends on."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.kept: list[object] = []
        """What counts by identity: it must stay alive as long as its key."""
        self._storages: dict[int, int] = {}

    def persistent_id(self, value: object) -> object:
        if not isinstance(value, _BY_IDENTITY):
            return None
        text = _of_model_file(value)
        if text is not None:
            return text
        self.kept.append(value)
        return id(value)

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, MethodType):
            return tuple, ((value.__func__, value.__self__),)
        if isinstance(value, Tensor):
            return tuple, (self._tensor(value),)
        return NotImplemented

    def _tensor(self, value: Tensor) -> tuple[object, ...]:
        like = (type(value), value.dtype, value.device.type, tuple(value.shape), value.requires_grad, value.layout)
        if value.layout != torch.strided:
            raise pickle.PicklingError(f"a tensor of layout {value.layout}")
        storage = self._storages.setdefault(value.untyped_storage()._cdata, len(self._storages))
        values = b"" if isinstance(value, nn.Parameter) or value.is_meta else _values(value)
        return (*like, value.stride(), value.storage_offset(), storage, values, vars(value))


def _of_model_file(value: object) -> tuple[str, ...] | None:
    """What a class or function of a model file is known by; None of any other: those are loaded once."""
    name, home = getattr(value, "__qualname__", ""), getattr(value, "__module__", None)
    if home is None or home in sys.modules or not name or "<" in name:
        return None
    functions = [value, *vars(value).values()] if isinstance(value, type) else [value]
    files = [Path(one.__code__.co_filename) for one in functions if isinstance(one, FunctionType)]
    # what dataclasses and the like write is of no file
    found = next((file for file in files if file.is_file()), None)
    return None if found is None else (str(found), found.read_text(encoding="utf-8"), name)


def _values(value: Tensor) -> bytes:
    if value.numel() * value.element_size() > LARGE:
        raise TooLargeError
    return value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@dataclass
class Captures:
    """What was captured in this session, by the content of what it was captured from."""

    capture: Captured
    """Captures anew."""
    known: dict[bytes, tuple[Graph, list[object]]] = field(default_factory=dict)
    found: int = 0
    asleep: bool = False

    def __call__(self, module: nn.Module, flat: Any, dynamic: Mapping[str, tuple[int, ...]], watch: Any) -> Graph:
        key, kept = (None, []) if self.asleep else key_of(module, flat, dict(dynamic))
        if key is not None and key in self.known:
            self.found += 1
            return self.known[key][0]
        graph = self.capture(module, flat, dynamic, watch)
        # a forward may have changed what it was captured from, for good
        if key is not None and key_of(module, flat, dict(dynamic))[0] == key:
            self.known[key] = graph, kept
        return graph

    @contextmanager
    def sleep(self) -> Iterator[None]:
        """Everything is captured anew."""
        before, self.asleep = self.asleep, True
        try:
            yield
        finally:
            self.asleep = before


def key_of(*content: object) -> tuple[bytes | None, list[object]]:
    """A key of the content, and what must stay alive with it; None if it cannot be written down."""
    file = io.BytesIO()
    writer = _Writer(file)
    try:
        writer.dump((content, _settings()))
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError, RecursionError, TooLargeError):
        return None, []
    return hashlib.sha256(file.getbuffer()).digest(), writer.kept


def _settings() -> tuple[object, ...]:
    """Of torch, which a forward may ask for."""
    return (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
    )


CAPTURES = Captures(api.captured)
