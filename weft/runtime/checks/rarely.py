"""Rarely: a check that takes too long for every call.

In: the check, which gives what is wrong, or "". Out: the same, in calls in which it runs: the first, the second, the
fourth and so on, then so seldom that it takes a small share of the time that calls take.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from time import perf_counter

EARLY = 64
"""Up to this call, each time twice as many calls have been made."""
SHARE = 1 / 1000
"""Of the time, at most, that the check may take later."""


class Rarely:
    """Asked in every call.

    Args:
        check: gives what is wrong, or "".
        thread: in which it is asked; in others nothing is wrong.
    """

    def __init__(self, check: Callable[[], str], thread: int) -> None:
        self._check, self._thread = check, thread
        self._calls, self._next = 0, 1
        self._looked, self._at = 0, perf_counter()

    def __call__(self) -> str:
        if get_ident() != self._thread:
            return ""
        self._calls += 1
        return self._look() if self._calls >= self._next else ""

    def _look(self) -> str:
        begin = perf_counter()
        found = self._check()
        end, calls = perf_counter(), self._calls
        each = (begin - self._at) / (calls - self._looked)
        pause = calls if calls < EARLY else max(EARLY, int((end - begin) / (SHARE * max(each, 1e-6))))
        self._looked, self._at, self._next = calls, end, calls + pause
        # what is wrong stays so until it is mended: the next call looks again
        if found:
            self._next = calls + 1
        return found
