"""The pools of `tests/pools.py`, under the name that tests of processes import."""

from __future__ import annotations

from tests.pools import Pools

__all__ = ["Pools"]
