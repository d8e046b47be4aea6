"""Tests of capture capture."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.captures import CAPTURES


@pytest.fixture(autouse=True, scope="module")
def anew() -> Iterator[None]:
    """Nothing is taken from what was captured before."""
    with CAPTURES.sleep():
        yield
