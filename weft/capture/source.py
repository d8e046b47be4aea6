"""The user's own lines: of a graph node, of an exception, of a running frame.

Promised: the innermost line that lies in neither torch nor Weft nor the standard library, and in the same package as
the innermost forward (a helper library called by the user's forward is not the user's code; a library's own model
is). File names inside the working directory are relative, so that they do not depend on the machine.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType

import torch

from weft.ir.graph import NOWHERE, Source

FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>[^\n]*)(?:\n[ \t]+(?P<text>[^\n]*))?')
OURS = f"{Path(__file__).absolute().parents[1]}{os.sep}"
TORCH = f"{Path(torch.__file__).absolute().parent}{os.sep}"
LIBRARY = sysconfig.get_path("stdlib") + os.sep
INSTALLED = f"{os.sep}site-packages{os.sep}"
IMPORTING = "<frozen importlib"
"""The files of Python's import system."""


def is_users(file: str) -> bool:
    """Whether a file is neither torch's nor Weft's nor Python's nor made up."""
    is_python = file.startswith(LIBRARY) and INSTALLED not in file
    return not (file.startswith((OURS, TORCH, "<")) or is_python)


def package_of(file: str) -> str:
    """The installed package that a file belongs to; "" for the user's own files."""
    return file.rpartition(INSTALLED)[2].partition(os.sep)[0] if INSTALLED in file else ""


@cache
def is_own(file: str) -> bool:
    """Whether a file is the user's own: one of theirs that is not installed."""
    return is_users(file) and not package_of(file)


def users_frame(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """The frame to show, of a stack from the outermost to the innermost."""
    inside = [i for i, frame in enumerate(frames) if frame.filename.startswith(OURS) and frame.name == "forward"]
    found = [frame for frame in frames[inside[-1] if inside else 0 :] if is_users(frame.filename)]
    if not found:
        return None
    forward = max((i for i, frame in enumerate(found) if frame.name == "forward"), default=0)
    package = package_of(found[forward].filename)
    return next(frame for frame in reversed(found[forward:]) if package_of(frame.filename) == package)


def frames_of_forward() -> list[traceback.FrameSummary]:
    """The frames that run now, from the innermost forward of ours, which calls the user's, to what asked."""
    found = list[traceback.FrameSummary]()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        found.append(traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_name, lookup_line=False))
        if code.co_name == "forward" and code.co_filename.startswith(OURS):
            break
        frame = frame.f_back
    return found[::-1]


def relative(file: str) -> str:
    path = Path(file).absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def source_of_trace(stack_trace: str | None) -> Source:
    """The line in a node's recorded stack."""
    frame = FRAME.search(stack_trace or "")
    if frame is None:
        return NOWHERE
    text = frame["text"] or linecache.getline(frame["file"], int(frame["line"]))
    return Source(relative(frame["file"]), int(frame["line"]), text.strip())


def place_of_error(trace: TracebackType | None) -> str:
    """The line where an exception was raised; "" if none of the user's did."""
    return place_of(users_frame(traceback.extract_tb(trace)))


def place_here() -> str:
    """The line that is running now."""
    return place_of(users_frame(traceback.extract_stack()))


def caller() -> FrameType:
    """What called into Weft."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(OURS):
        frame = frame.f_back
    return frame


def caller_is_users() -> bool:
    """Whether it is the user's own code that called into Weft, not torch on its behalf."""
    return is_users(caller().f_code.co_filename)


def caller_is_forward() -> bool:
    """Whether it is a forward's own code that called into Weft: neither torch nor an import on its behalf."""
    frame: FrameType | None = caller()
    if frame is None or not is_users(frame.f_code.co_filename):
        return False
    while frame is not None and not (frame.f_code.co_name == "forward" and frame.f_code.co_filename.startswith(OURS)):
        if frame.f_code.co_filename.startswith(IMPORTING):
            return False
        frame = frame.f_back
    return frame is not None


def place_of_call() -> str:
    """The line of the user's that called into Weft: the innermost of their own files, else of a package's."""
    frames = [frame for frame in traceback.extract_stack() if is_users(frame.filename)]
    own = [frame for frame in frames if not package_of(frame.filename)] or frames
    return place_of(own[-1] if own else None)


def place_of(frame: traceback.FrameSummary | None) -> str:
    """A frame's line; "" if there is none."""
    if frame is None or not frame.lineno:
        return ""
    return str(Source(relative(frame.filename), frame.lineno, (frame.line or "").strip()))
