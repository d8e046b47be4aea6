"""What forward asks objects for by name, whether they have it or not, and the modules that it imports.

Enters: a forward that runs (`reads.py`). Leaves: by kind of object (`kind_of`) the names that the user's code asks for
with `getattr`, `hasattr` or under `except AttributeError`, and what its functions import when they are called; each
with its first line. What an object does not have, it may have in a later call.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from traceback import FrameSummary
from types import FrameType, ModuleType
from typing import Any
from unittest import mock

from torch import Tensor

from weft.capture.source import is_users, package_of, place_of
from weft.runtime.program.reads import kind_of

is_users_file = cache(is_users)


class Asked:
    """Notes names, and who was asked for them."""

    def __init__(self) -> None:
        self.names: dict[tuple[str, str], str] = {}
        """By kind and name."""
        self.imported: dict[tuple[str, str], str] = {}
        """By module and name in it; "" for the module itself."""

    @contextmanager
    def noting(self) -> Iterator[None]:
        """While this is entered, what the user's code asks for is noted."""
        get, has, load = builtins.getattr, builtins.hasattr, builtins.__import__

        def noting_get(owner: Any, name: str, *default: Any) -> Any:
            self.note(sys._getframe(1), owner, name)
            return get(owner, name, *default)

        def noting_has(owner: Any, name: str) -> bool:
            self.note(sys._getframe(1), owner, name)
            return has(owner, name)

        def noting_load(name: str, *args: Any, **kwargs: Any) -> Any:
            found = load(name, *args, **kwargs)
            self._note_import(sys._getframe(1), found, args[2] if len(args) > 2 else kwargs.get("fromlist"))
            return found

        with (
            mock.patch.object(builtins, "getattr", noting_get),
            mock.patch.object(builtins, "hasattr", noting_has),
            mock.patch.object(builtins, "__import__", noting_load),
        ):
            yield

    def note(self, frame: FrameType, owner: Any, name: Any) -> None:
        """A line asks an object for a name."""
        if not is_users_file(frame.f_code.co_filename) or type(name) is not str or isinstance(owner, Tensor):
            return
        if (key := (kind_of(owner), name)) not in self.names:
            self.names[key] = _place(frame)

    def note_missing(self, frame: FrameType, error: BaseException) -> None:
        """A line has asked for an attribute that is not there."""
        if isinstance(error, AttributeError) and error.name is not None and error.obj is not None:
            self.note(frame, error.obj, error.name)

    def _note_import(self, frame: FrameType, found: Any, names: Any) -> None:
        file = frame.f_code.co_filename
        # when a module is loaded nothing is read by forward
        if not is_users_file(file) or package_of(file) or frame.f_code.co_name == "<module>":
            return
        if isinstance(found, ModuleType) and is_users_file(getattr(found, "__file__", None) or "<"):
            for name in names or ("",):
                self.imported.setdefault((found.__name__, name), _place(frame))


def _place(frame: FrameType) -> str:
    code = frame.f_code
    return place_of(FrameSummary(code.co_filename, frame.f_lineno, code.co_name))
