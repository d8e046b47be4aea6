"""The cost table: calibration, formulas, files."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.cost.links import DEFAULTS, KINDS, Links, default_links, from_json, load
from weft.errors import WeftError

MEASURED = {"all_reduce": 70, "all_gather": 112, "reduce_scatter": 124, "all_to_all": 28, "broadcast": 20}


@pytest.mark.parametrize("kind", MEASURED)
def test_gloo_gives_back_what_was_measured(kind: str) -> None:
    assert 1e3 * default_links("gloo").seconds(kind, 2, 32 << 20) == pytest.approx(MEASURED[kind], rel=0.02)


def test_an_exchange_both_ways_costs_two_sends() -> None:
    assert 1e3 * default_links("gloo").seconds("exchange", 2, 32 << 20) == pytest.approx(2 * 26, rel=0.1)


def test_rings_carry_shares_of_the_buffer() -> None:
    links = Links("ring", 1.0, 0.0, dict.fromkeys(KINDS, 1.0))
    assert links.seconds("all_reduce", 4, 8) == 1 + 12
    assert links.seconds("all_gather", 4, 8) == 1 + 6
    assert links.seconds("broadcast", 4, 8) == 1 + 8
    assert links.seconds("all_to_all", 1, 8) == pytest.approx(8, rel=1e-5)


def test_more_peers_cost_more() -> None:
    for links in DEFAULTS.values():
        for kind in MEASURED:
            assert links.seconds(kind, 8, 0) > links.seconds(kind, 2, 0) > 0


def test_a_table_is_saved_and_loaded(tmp_path: Path) -> None:
    for name, links in DEFAULTS.items():
        links.save(tmp_path / name)
        assert load(tmp_path / name) == links


GLOO = DEFAULTS["gloo"].to_json()
BROKEN = ["{", "[]", '{"name": "x"}', GLOO.replace("0.0002", '"fast"'), GLOO.replace("0.0002", "-1")]


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_table_is_refused(text: str) -> None:
    with pytest.raises(WeftError):
        from_json(text, place="links.json")


def test_an_unknown_backend_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match="gloo"):
        default_links("pigeons")
    with pytest.raises(WeftError, match="no such file"):
        load(tmp_path / "none.json")
