"""The compiler as one function: passes, times, and what it hands over."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from tests.train.eager import mlp
from weft.compile import Timer, compile_program
from weft.compile.passes import uncollected
from weft.errors import ModelFileError, PlanError
from weft.plan import Plan


def test_passes_are_named_and_timed() -> None:
    module, batch = mlp()
    said: list[str] = []
    compiled = compile_program(module, batch, "dp=2", say=said.append)
    assert list(compiled.timings) == said == ["capture", "plan", "lower", "check", "emit"]
    assert all(seconds > 0 for seconds in compiled.timings.values())
    assert compiled.program is not None and compiled.report is not None
    assert compiled.program.devices == compiled.devices == 2 and "program.py" in compiled.files
    assert compiled.program.graph is compiled.graph is compiled.plan.graph
    assert "capture" in str(compiled) and "2 devices" in str(compiled)


def test_a_plan_brings_its_own_graph() -> None:
    module, batch = mlp()
    first = compile_program(module, batch, lambda graph: Plan(graph, 2))
    second = compile_program(module, batch, first.plan)
    assert second.graph is first.graph and second.files == first.files


def test_the_second_time_it_is_in_the_cache(tmp_path: Path) -> None:
    module, batch = mlp()
    first = compile_program(module, batch, "dp=2", folder=tmp_path)
    second = compile_program(module, batch, "dp=2", folder=tmp_path)
    assert list(second.timings) == ["capture", "plan"] and second.program is None
    assert second.files == first.files and second.directory == first.directory and not second.edited
    assert compile_program(module, batch, "tp=2", folder=tmp_path).directory != first.directory
    module.drop.p = 0.2
    assert compile_program(module, batch, "dp=2", folder=tmp_path).directory != first.directory
    assert "from the cache" in str(second)


def test_what_does_not_fit_is_refused() -> None:
    module, batch = mlp()
    with pytest.raises(PlanError):
        compile_program(module, batch, "dp=2", 3)
    with pytest.raises(ModelFileError, match="no loss"):
        compile_program(module.up, batch["x"], "dp=2")


def test_a_pass_that_raises_is_not_timed() -> None:
    timer = Timer()
    with pytest.raises(ZeroDivisionError), timer("divide"):
        _ = 1 / 0
    assert timer.seconds == {}


def test_the_collector_is_on_again_after_compilations_of_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    other, asked = uncollected(), gc.isenabled

    def ends_meanwhile() -> bool:
        found = asked()
        other.__exit__(None, None, None)
        return found

    assert gc.isenabled()
    other.__enter__()
    with monkeypatch.context() as patched:
        patched.setattr(gc, "isenabled", ends_meanwhile)
        with uncollected():
            pass
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off_and_one_that_is_on_comes_back() -> None:
    with pytest.raises(PlanError), uncollected():
        assert not gc.isenabled()
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise PlanError("no", remedy="none")
    assert gc.isenabled()
