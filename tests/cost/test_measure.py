"""Measured links: the fit gives the times back, and two processes really are measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.cli import main
from weft.cost.links import KINDS, default_links, load
from weft.cost.measure import LARGE, SMALL, fit, measure_links
from weft.errors import WeftError


@pytest.mark.parametrize("processes", [2, 4])
def test_the_fit_gives_the_times_back(processes: int) -> None:
    known = default_links("gloo")
    times = {kind: {size: known.seconds(kind, processes, size) for size in (SMALL, LARGE)} for kind in KINDS}
    found = fit("gloo", times, processes)
    for kind in KINDS:
        assert found.seconds(kind, processes, LARGE) == pytest.approx(times[kind][LARGE], rel=0.02)


def test_what_cannot_be_measured() -> None:
    with pytest.raises(WeftError, match="'nccl'"):
        measure_links("nccl")
    with pytest.raises(WeftError, match="nobody to talk to"):
        measure_links(processes=1)


def test_the_command_measures_and_the_table_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "links.json"
    assert main(["profile", "-o", str(path), "--json"]) == 0
    found = load(path)
    assert all(rate > 0 for rate in found.rates.values()) and found.latency > 0
    assert json.loads(capsys.readouterr().out.strip().splitlines()[-1])["latency"] == found.latency
    example = Path(__file__).parents[2] / "examples" / "mlp.py"
    assert main(["verify", str(example), "--plan", "dp=2", "--links", str(path)]) == 0
    assert main(["verify", str(example), "--plan", "dp=2", "--links", str(tmp_path / "absent.json")]) == 2
