"""A worker whose launcher has gone ends without a word."""

from __future__ import annotations

import os
from multiprocessing import Pipe

import pytest

from weft.runtime.jobs import worker


class Failing:
    """Stands for the transport of a rank that fails."""

    def fail(self, error: BaseException) -> Failing:
        return self

    def to_json(self) -> str:
        return "{}"


def test_a_failure_that_nobody_hears_of_is_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    here, there = Pipe()
    there.close()
    worker.end_failed(Failing(), here, ValueError("the first"))  # type: ignore[arg-type]
    assert codes == [worker.FAILED]
