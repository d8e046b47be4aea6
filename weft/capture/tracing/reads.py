"""What forward reads besides its inputs: globals, attributes, environment variables, torch's default dtype.

Enters: a second forward (`repeat.py`), which runs the user's code alone. Leaves: the names that are read by the lines
that ran, each with its first line: globals by the user's own files, attributes by those of libraries too. A name that
the code itself sets is left out: it is no input from outside. Which objects the names belong to is not known here: a
rank looks at what goes by these names near its module (`checks/outside.py`).
"""

from __future__ import annotations

import dis
import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from traceback import FrameSummary
from types import CodeType, FrameType, ModuleType
from typing import Any
from unittest import mock

import torch
from torch import nn

from weft.capture.source import TORCH, is_users, package_of, place_here, place_of
from weft.runtime.checks.outside import Outside, owners_of
from weft.runtime.program.reads import Reads

LAYERS = f"{TORCH}nn{os.sep}modules{os.sep}"
MACHINERY = frozenset(f"{LAYERS}{name}.py" for name in ("module", "container"))
GLOBAL, ATTRIBUTE = ("LOAD_GLOBAL", "LOAD_NAME"), ("LOAD_ATTR", "LOAD_METHOD")
SET = ("STORE_ATTR", "STORE_GLOBAL", "DELETE_ATTR", "DELETE_GLOBAL")


class Reader:
    """Notes which lines run, and what they ask the process for."""

    def __init__(self) -> None:
        self._lines: dict[CodeType, set[int]] = {}
        self._modules: dict[CodeType, str] = {}
        self._environ: dict[str, str] = {}
        self._gradients: dict[tuple[str, ...], str] = {}
        self._default_dtype = ""

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While this is entered, lines are noted."""
        read, previous = type(os.environ).__getitem__, sys.gettrace()
        default_dtype = torch.get_default_dtype

        def noting(environ: Any, key: str) -> str:
            if environ is os.environ and _asks(sys._getframe(1)):
                self._environ.setdefault(key, place_here())
            return read(environ, key)

        def telling() -> torch.dtype:
            if _asks(sys._getframe(1)):
                self.note_default_dtype()
            return default_dtype()

        with (
            mock.patch.object(type(os.environ), "__getitem__", noting),
            mock.patch.object(torch, "get_default_dtype", telling),
        ):
            sys.settrace(self._on_call)
            try:
                yield
            finally:
                sys.settrace(previous)

    def note_default_dtype(self) -> None:
        """A tensor is made in torch's default dtype, or that is asked for."""
        self._default_dtype = self._default_dtype or place_here()

    def note_gradients(self, names: tuple[str, ...]) -> None:
        """Forward asks whether a tensor requires a gradient that depends on these parameters."""
        self._gradients.setdefault(names, place_here())

    def found(self, module: nn.Module, changed: Collection[str], used: Collection[int]) -> Reads:
        """What was read, and stands for something.

        Args:
            changed: names of what forward itself changes.
            used: the identities of the tensors that it computes with.
        """
        globals, names, stored = dict[tuple[str, str], str](), dict[str, str](), set(changed)
        for code, lines in self._lines.items():
            for one in dis.get_instructions(code):
                line = one.positions.lineno if one.positions is not None else None
                if one.opname in SET:
                    stored.add(one.argval)
                if line not in lines:
                    continue
                place = place_of(FrameSummary(code.co_filename, line, code.co_name))
                if one.opname in GLOBAL:
                    if _is_told(self._modules[code], one.argval) and not package_of(code.co_filename):
                        globals.setdefault((self._modules[code], one.argval), place)
                elif one.opname in ATTRIBUTE or (one.opname == "LOAD_CONST" and _is_name(one.argval)):
                    names.setdefault(one.argval, place)
        reads = Reads(
            tuple((*key, place) for key, place in globals.items() if key[1] not in stored),
            tuple((name, place) for name, place in names.items() if name not in stored),
            tuple(self._environ.items()),
            tuple((place, names) for names, place in self._gradients.items()),
            self._default_dtype,
            None,
        )
        known = Outside(reads, owners_of(module))
        while more := {name: place for name, place in known.getters.items() if name not in {*names, *stored}}:
            names.update(more)
            reads = replace(reads, names=(*reads.names, *more.items()))
            known = Outside(reads, owners_of(module))
        tensors = [label for label, one in known.tensors.items() if id(one) in used]
        return reads.only(known.globals, known.names, tensors)

    def _on_call(self, frame: FrameType, _event: str, _arg: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        if code not in self._lines:
            if not _is_read(code.co_filename):
                return None
            self._lines[code] = set()
            self._modules[code] = frame.f_globals.get("__name__", "")
        return self._on_line

    def _on_line(self, frame: FrameType, event: str, _arg: Any) -> Callable[..., Any]:
        if event == "line":
            self._lines[frame.f_code].add(frame.f_lineno)
        return self._on_line


def _is_read(file: str) -> bool:
    """The user's files, and those of torch's layers, which read their attributes."""
    return is_users(file) or (file.startswith(LAYERS) and file not in MACHINERY)


def _asks(frame: FrameType | None) -> bool:
    """Whether the user's own code asks, through the standard library if need be."""
    while frame is not None and frame.f_code.co_filename.startswith("<frozen"):
        frame = frame.f_back
    return frame is not None and is_users(frame.f_code.co_filename)


def _is_name(value: Any) -> bool:
    """True for a word that may be an attribute's: `getattr(config, "scale")`."""
    return isinstance(value, str) and value.isidentifier()


def _is_told(module: str, name: str) -> bool:
    """Whether a name is a global that may be another one later: none of Python's, no module or class of torch's."""
    space = vars(sys.modules[module]) if module in sys.modules else {}
    if name not in space:
        return False
    value = space[name]
    owner = sys.modules.get(value.__module__) if isinstance(value, type) else value
    return not isinstance(owner, ModuleType) or is_users(getattr(owner, "__file__", None) or "<")
