"""Syntax trees of sources, which several rules look at: each is made once, and nobody changes it."""

from __future__ import annotations

import ast
from functools import cache


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)
