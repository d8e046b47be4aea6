"""The user's own lines: of a graph node, of an exception, of a running frame.

Promised: the innermost line that lies in neither torch nor Weft; file names inside the working directory are
relative, so that they do not depend on the machine.
"""

from __future__ import annotations

import linecache
import os
import re
import traceback
from types import FrameType, TracebackType

import torch

from weft.ir.graph import NOWHERE, Source

FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*(?:\n[ \t]+(?P<text>[^\n]*))?')
OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def is_users(file: str) -> bool:
    """Whether a file is neither torch's nor Weft's nor made up."""
    return not (file.startswith((OURS, TORCH, "<")) or "/contextlib.py" in file or "/importlib/" in file)


def relative(file: str) -> str:
    inside = os.path.abspath(file).startswith(os.getcwd() + os.sep)
    return os.path.relpath(file) if inside else file


def source_of_trace(stack_trace: str | None) -> Source:
    """The innermost line of the user's in a node's recorded stack."""
    for frame in reversed(list(FRAME.finditer(stack_trace or ""))):
        if is_users(frame["file"]):
            text = (frame["text"] or linecache.getline(frame["file"], int(frame["line"]))).strip()
            return Source(relative(frame["file"]), int(frame["line"]), text)
    return NOWHERE


def source_of_error(trace: TracebackType | None) -> Source:
    """The innermost line of the user's in an exception's traceback."""
    for frame in reversed(traceback.extract_tb(trace)):
        if is_users(frame.filename) and frame.lineno is not None:
            return Source(relative(frame.filename), frame.lineno, (frame.line or "").strip())
    return NOWHERE


def place_of_frame(frame: FrameType) -> str:
    file = frame.f_code.co_filename
    text = linecache.getline(file, frame.f_lineno).strip()
    return str(Source(relative(file), frame.f_lineno, text))
