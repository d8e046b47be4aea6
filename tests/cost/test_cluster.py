"""Clusters: costs of collectives near published ones, shapes of groups, mixed hosts, flat tables."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.cost.cluster.cluster import Cluster, Hosts
from weft.cost.cluster.collectives import shape_of
from weft.cost.cluster.known import find_device
from weft.cost.cluster.levels import Level
from weft.cost.cluster.names import named
from weft.cost.links import DEFAULTS, KINDS
from weft.errors import PlanError, WeftError

GIB = 1 << 30
TALKING = [kind for kind in KINDS if kind != "local"]


def bus(cluster: Cluster, group: range, kind: str = "all_reduce") -> float:
    """GB/s as nccl-tests counts them."""
    return KINDS[kind].factor(len(group)) * GIB / cluster.seconds(kind, group, GIB) / 1e9


def lab(*levels: Level, devices: int = 8, name: str = "H100") -> Cluster:
    return Cluster("lab", devices, (Hosts(levels[-1].span // devices, find_device(name), levels),))


@pytest.mark.smoke
def test_one_host_is_within_what_benchmarks_report() -> None:
    assert 300 < bus(named("8-H100"), range(8)) < 450
    assert 220 < bus(named("8-A100-80GB"), range(8)) < 250
    assert 110 < bus(named("dgx1-v100x8"), range(8)) < 140
    assert 300 < bus(named("8-MI300X"), range(8)) < 340


def test_across_hosts_all_network_cards_work() -> None:
    cluster = named("16x8-H100")
    assert 0.9 * 360 < bus(cluster, range(128)) <= 8 * 50 * 0.9 + 20 < 450, "8 cards of 50 GB/s, 90% of it"
    assert cluster.algorithm("all_reduce", range(128), GIB).startswith("hierarchical")
    # slow cards: the network counts, whatever is inside
    slow = named("16x8-A100-80GB")
    assert bus(slow, range(128)) == pytest.approx(8 * 25 * 0.9, rel=0.08)


def test_one_member_of_each_host_has_its_share_of_the_cards() -> None:
    for name, share in (("16x8-H100", 50), ("dgx1-v100x32", 12.5 / 2)):
        cluster = named(name)
        group = range(0, cluster.size, 8)
        assert bus(cluster, group) == pytest.approx(share * 0.9, rel=0.05)
    assert cluster.seconds("all_reduce", group, GIB, at_once=1) < 0.6 * cluster.seconds("all_reduce", group, GIB)


def test_one_card_for_eight_devices() -> None:
    inside = Level("nvlink", 8, 300e9, 1e-5, 1e-6)
    cluster = lab(inside, Level("ib", 32, 12.5e9, 1e-5, 1e-5, links=1))
    column, alone = (cluster.seconds("broadcast", range(0, 32, 8), GIB, at_once=n) for n in (None, 1))
    assert column == pytest.approx(8 * alone, rel=0.01)
    assert cluster.seconds("broadcast", range(0, 32, 8), GIB, at_once=2) == pytest.approx(2 * alone, rel=0.01)
    assert cluster.seconds("broadcast", range(32), GIB) == pytest.approx(alone, rel=0.01), "one ring uses it at a time"


def test_small_all_reduces_go_along_trees_and_large_ones_do_not() -> None:
    cluster = named("64x8-H100")
    assert cluster.algorithm("all_reduce", range(512), 1024) == "tree (LL)"
    assert cluster.algorithm("all_reduce", range(8), 1024) == "ring (LL)"
    assert cluster.algorithm("all_reduce", range(8), GIB) == "ring (simple)"
    assert cluster.algorithm("all_to_all", range(512), GIB).startswith("direct")
    assert 5e-6 < cluster.seconds("all_reduce", range(8), 1024) < 40e-6


def test_an_all_to_all_across_hosts_is_limited_by_what_leaves_a_host() -> None:
    cluster = named("2x8-H100")
    assert cluster.seconds("all_to_all", range(16), GIB) == pytest.approx(GIB * 8 / 16 / 45e9, rel=0.02)


def test_a_pair_sends_by_one_link() -> None:
    cluster = named("2x8-H100")
    assert cluster.seconds("exchange", (0, 1), GIB) == pytest.approx(GIB / 360e9, rel=0.02)
    assert cluster.seconds("exchange", (7, 8), GIB) == pytest.approx(GIB / 45e9, rel=0.02)


@pytest.mark.parametrize("kind", TALKING)
def test_more_bytes_and_more_members_take_longer(kind: str) -> None:
    cluster = named("2048x8-A100-80GB")
    sizes = [0, 1, 1 << 10, 1 << 16, 1 << 20, 1 << 26, GIB]
    for exponent in range(1, 15):
        times = [cluster.seconds(kind, range(1 << exponent), size) for size in sizes]
        assert times == sorted(times) and times[0] > 0
        if exponent > 1:
            fewer = [cluster.seconds(kind, range(1 << (exponent - 1)), size) for size in sizes]
            assert all(less <= more * (1 + 1e-9) for less, more in zip(fewer, times, strict=True)), exponent


def test_meshes_use_the_links_to_members() -> None:
    mesh, switch = (
        lab(Level("mesh", 8, 448e9, 0, 0, shape=shape)).seconds("exchange", (0, 1), GIB) for shape in ("mesh", "switch")
    )
    assert mesh == pytest.approx(7 * switch)
    whole = [lab(Level("mesh", 8, 448e9, 0, 0, shape=shape)) for shape in ("mesh", "switch")]
    assert len({cluster.seconds("all_reduce", range(8), GIB) for cluster in whole}) == 1
    ring = lab(Level("ring", 8, 448e9, 0, 0, shape="ring"))
    assert ring.seconds("all_reduce", range(8), GIB) == whole[1].seconds("all_reduce", range(8), GIB)
    assert ring.seconds("all_to_all", range(8), GIB) == 2 * whole[1].seconds("all_to_all", range(8), GIB)
    pcie = lab(Level("pcie", 8, 25e9, 0, 0, shape="pcie", links=2))
    assert pcie.seconds("broadcast", range(8), GIB) == pytest.approx(GIB / (25e9 / 4))
    assert pcie.seconds("broadcast", (0, 1), GIB, at_once=1) == pytest.approx(GIB / 25e9)


@given(
    st.lists(st.integers(0, 95), min_size=1, unique=True), st.sampled_from([(4, 8, 96), (8, 24, 96), (96,), (1, 96)])
)
def test_shapes_count_members_of_islands(ranks: list[int], spans: tuple[int, ...]) -> None:
    shape = shape_of(tuple(ranks), spans, (0, 48))
    for span, islands, fewest, most in zip(spans, shape.islands, shape.fewest, shape.most, strict=False):
        found = Counter(rank // span for rank in ranks)
        assert (len(found), min(found.values()), max(found.values())) == (islands, fewest, most)
    assert shape.islands[-1] == 1 and shape.islands[:-1].count(1) == 0
    assert shape.kinds == tuple(sorted({int(rank >= 48) for rank in ranks}))


@given(st.sets(st.integers(0, 31), min_size=1), st.sampled_from(TALKING), st.integers(0, GIB), st.integers(0, 5))
def test_any_group_has_a_cost(ranks: set[int], kind: str, size: int, seed: int) -> None:
    group = random.Random(seed).sample(sorted(ranks), len(ranks))
    for name in ("dgx1-v100x32", "dgx2-v100x32", "4x8-MI250X", "2x8-A100-80GB+2x8-H100", "4x8-cpu"):
        cluster = named(name)
        took = cluster.seconds(kind, group, size)
        assert 0 < took < 1e3 and took == cluster.seconds(kind, tuple(sorted(ranks)), size)
        assert took <= cluster.seconds(kind, group, size + 1000)
        assert cluster.seconds(kind, group, size, at_once=1) <= took


@pytest.mark.parametrize("name", ["16x8-H100", "dgx1-v100x32", "128x8-A100-80GB", "4x8-MI250X"])
def test_flat_tables_are_exact_for_large_buffers_and_never_high_for_none(name: str) -> None:
    cluster = named(name)
    for group in (range(cluster.size), range(8), range(0, cluster.size, 8), range(4, 12)):
        links = cluster.links(group)
        for kind in TALKING:
            assert links.seconds(kind, len(group), 64 << 20) == pytest.approx(cluster.seconds(kind, group, 64 << 20))
            assert links.seconds(kind, len(group), 0) <= cluster.seconds(kind, group, 0) * (1 + 1e-9)
            assert links.rates[kind] >= 0
        assert links.seconds("local", 1, GIB) == pytest.approx(cluster.seconds("local", group, GIB))
    assert cluster.links() is cluster.links(list(range(cluster.size)))


def test_ranks_of_this_machine_have_the_table_that_programs_use() -> None:
    cluster = named("4-cpu")
    assert cluster.links() == DEFAULTS["gloo"] and cluster.links((1, 3)) == DEFAULTS["gloo"]
    for kind in KINDS:
        wanted = DEFAULTS["gloo"].seconds(kind, 3, 1 << 20)
        assert cluster.seconds(kind, (0, 1, 2), 1 << 20) == pytest.approx(wanted)
    assert cluster.algorithm("all_reduce", range(4), 8) == "measured"
    assert not cluster.device(3).overlaps


def test_mixed_hosts_are_as_fast_as_the_slowest() -> None:
    mixed, old, new = named("2x8-A100-80GB+2x8-H100"), named("4x8-A100-80GB"), named("4x8-H100")
    assert [mixed.device(rank).name for rank in (0, 15, 16, 31)] == ["A100-80GB", "A100-80GB", "H100", "H100"]
    assert mixed.hosts == 4 and mixed.size == 32
    for kind in TALKING:
        assert mixed.seconds(kind, range(8), GIB) == old.seconds(kind, range(8), GIB)
        assert mixed.seconds(kind, range(16, 32), GIB) == new.seconds(kind, range(16), GIB)
        assert mixed.seconds(kind, range(8, 24), GIB) == old.seconds(kind, range(16), GIB)
    assert "A100-80GB" in str(mixed) and "H100" in str(mixed)


def test_large_clusters_cost_no_more_to_make() -> None:
    cluster = named("2048x8-H100")
    assert cluster.size == 16_384 and cluster.device(16_383).name == "H100"
    groups = [range(start, 16_384, 16) for start in range(16)] * 200
    assert len({cluster.seconds("all_reduce", group, GIB) for group in groups}) == 1
    assert cluster.seconds("all_gather", tuple(range(1024)), GIB) == cluster.seconds("all_gather", range(1024), GIB)


def test_a_plan_for_more_devices_is_refused() -> None:
    cluster = named("2x8-H100")
    assert cluster.fits(16) and not cluster.fits(17)
    cluster.refuse(16)
    for ask in (
        lambda: cluster.refuse(32),
        lambda: cluster.device(31),
        lambda: cluster.seconds("all_reduce", (0, 31), 1),
    ):
        with pytest.raises(PlanError, match="32 devices, cluster 2x8-H100 has 16") as caught:
            ask()
        assert "16" in caught.value.remedy


def test_clusters_travel_between_processes() -> None:
    cluster = named("2x8-A100-80GB+2x8-H100")
    cluster.seconds("all_reduce", range(32), GIB)
    assert pickle.loads(pickle.dumps(cluster)) == cluster


GOOD = Level("nvlink", 8, 300e9, 1e-5, 1e-6)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"bandwidth": 0.0}, "bandwidth"),
        ({"bandwidth": float("nan")}, "bandwidth"),
        ({"latency": -1.0}, "latency"),
        ({"peer_latency": float("inf")}, "peer_latency"),
        ({"efficiency": 1.5}, "efficiency"),
        ({"links": -1}, "links"),
        ({"span": 0}, "span"),
        ({"shape": "swich"}, "shape: 'swich'"),
    ],
)
def test_levels_without_sense_are_refused(change: dict[str, object], wanted: str) -> None:
    with pytest.raises(WeftError, match=wanted):
        replace(GOOD, **change)  # type: ignore[arg-type]


def test_clusters_without_sense_are_refused() -> None:
    device = find_device("H100")
    rows = [
        (8, (Hosts(2, device, (GOOD,)),), "the last one spans 8 of 16"),
        (8, (Hosts(1, device, ()),), "the last one spans 0 of 8"),
        (8, (Hosts(2, device, (replace(GOOD, span=5), replace(GOOD, span=16))),), "16 after one of 5"),
        (8, (Hosts(2, device, (replace(GOOD, span=4), replace(GOOD, span=16))),), "none spans the 8 devices"),
        (8, (Hosts(0, device, (GOOD,)),), "no devices"),
        (8, (), "no devices"),
        (8, (Hosts(1, device, (GOOD,)), Hosts(1, device, (replace(GOOD, span=16),))), "different spans"),
    ]
    for devices, kinds, wanted in rows:
        with pytest.raises(WeftError, match=wanted):
            Cluster("lab", devices, kinds)
