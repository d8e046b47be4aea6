"""The compiler: from a model file or module, an example and a plan to the files of a program, as a list of passes."""

from __future__ import annotations

from weft.compile.passes import Compiled, Timer, compile_program, compile_subject

__all__ = ["Compiled", "Timer", "compile_program", "compile_subject"]
