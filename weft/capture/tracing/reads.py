"""What forward reads besides its inputs: globals, attributes, environment variables, torch's default dtype.

Enters: a second forward (`repeat.py`), which runs the user's code alone. Leaves: the names that are read by the lines
that ran, each with its first line: globals by the user's own files, attributes by those of libraries too, and names
that objects are asked for and may not have (`asked.py`). A name that
the code itself sets is left out: it is no input from outside. Which objects the names belong to is not known here: a
rank looks at what goes by these names near its module (`checks/outside.py`).
"""

from __future__ import annotations

import dis
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from traceback import FrameSummary
from types import CodeType, FrameType, ModuleType
from typing import Any
from unittest import mock

import torch
from torch import nn

from weft.capture.source import TORCH, is_own, is_users, place_here, place_of
from weft.capture.tracing.asked import Asked
from weft.runtime.checks.outside import Outside, owners_of
from weft.runtime.program.reads import ANY, OVER, Reads

LAYERS = f"{TORCH}nn{os.sep}modules{os.sep}"
MACHINERY = frozenset(f"{LAYERS}{name}.py" for name in ("module", "container"))
GLOBAL, ATTRIBUTE = ("LOAD_GLOBAL", "LOAD_NAME"), ("LOAD_ATTR", "LOAD_METHOD")
DICTS = frozenset({"vars", "globals", "locals", "dir", "__dict__", "_modules", "_parameters", "_buffers"})
"""What gives attributes or globals as a dict or list, in which any name may be looked for."""
CHILDREN = frozenset(
    {"children", "named_children", "modules", "named_modules", "parameters", "named_parameters", "buffers"}
    | {"named_buffers", "state_dict", "_modules", "_parameters", "_buffers"}
)
"""What gives whatever a module holds."""
SET = ("STORE_ATTR", "STORE_GLOBAL", "DELETE_ATTR", "DELETE_GLOBAL")


Names = dict[tuple[str, str], str]
"""By a module or kind of object and a name: the first line."""


class Reader:
    """Notes which lines run, and what they ask the process for."""

    def __init__(self) -> None:
        self._lines: dict[CodeType, set[int]] = {}
        self._modules: dict[CodeType, str] = {}
        self._environ: dict[str, str] = {}
        self._gradients: dict[tuple[str, ...], str] = {}
        self._default_dtype = ""
        self._asked = Asked()

    @property
    def lines(self) -> Mapping[CodeType, Collection[int]]:
        """Those that ran, by their code."""
        return self._lines

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
            self._asked.noting(),
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
        globals, asked = Names(self._asked.imported), Names(self._asked.names)
        names, stored = dict[str, str](), set(changed)
        for code, lines in self._lines.items():
            for opname, value, line in _instructions(code):
                if opname in SET:
                    stored.add(value)
                if line not in lines:
                    continue
                place = place_of(FrameSummary(code.co_filename, line, code.co_name))
                if opname in GLOBAL:
                    self._note_global(code, value, place, globals, asked)
                elif opname in ATTRIBUTE or (opname == "LOAD_CONST" and _is_name(value)):
                    names.setdefault(value, place)
                for key in self._listed(code, opname, value):
                    asked.setdefault(key, place)
        for (_, name), place in self._asked.names.items():
            names.setdefault(name, place)
        reads = Reads(
            tuple((*key, place) for key, place in globals.items() if key[1] not in stored),
            tuple((name, place) for name, place in names.items() if name not in stored),
            tuple(self._environ.items()),
            tuple((place, names) for names, place in self._gradients.items()),
            self._default_dtype,
            None,
            tuple((*key, place) for key, place in asked.items() if key[1] not in stored),
        )
        known = Outside(reads, owners_of(module))
        while more := {name: place for name, place in known.getters.items() if name not in {*names, *stored}}:
            names.update(more)
            reads = replace(reads, names=(*reads.names, *more.items()))
            known = Outside(reads, owners_of(module))
        tensors = [label for label, one in known.tensors.items() if id(one) in used]
        return reads.only(known.globals, known.names, tensors)

    def _note_global(
        self,
        code: CodeType,
        name: str,
        place: str,
        globals: dict[tuple[str, str], str],
        asked: dict[tuple[str, str], str],
    ) -> None:
        """A global that a function of the user's own reads: one that is not there is one of Python's, and may be hidden
        by another."""
        module = self._modules[code]
        if not is_own(code.co_filename) or module not in sys.modules:
            return
        if name not in vars(sys.modules[module]):
            asked.setdefault((module, name), place)
        elif _is_told(module, name):
            globals.setdefault((module, name), place)

    def _listed(self, code: CodeType, opname: str, value: Any) -> Iterator[tuple[str, str]]:
        """What a function that lists all that an object or a module holds may look for there."""
        if not is_own(code.co_filename):
            return
        if opname in ATTRIBUTE and value in CHILDREN:
            yield OVER, value
        if opname == "LOAD_CONST" and not DICTS.isdisjoint(code.co_names):
            for name in filter(_is_name, value if isinstance(value, tuple | frozenset) else (value,)):
                yield ANY, name
                if "globals" in code.co_names:
                    yield self._modules[code], name

    def _on_call(self, frame: FrameType, _event: str, _arg: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        if code not in self._lines:
            if not _is_read(code.co_filename):
                return None
            self._lines[code] = set()
            self._modules[code] = frame.f_globals.get("__name__", "")
        return self._on_line

    def _on_line(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        if event == "line":
            self._lines[frame.f_code].add(frame.f_lineno)
        elif event == "exception":
            self._asked.note_missing(frame, arg[1])
        return self._on_line


def _instructions(code: CodeType) -> Iterable[tuple[str, Any, int | None]]:
    """What a function does, each with its line."""
    for one in dis.get_instructions(code):
        yield one.opname, one.argval, one.positions.lineno if one.positions is not None else None


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
