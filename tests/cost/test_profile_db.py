"""Profiles: what is kept, between which measured kernels others lie, and files that are refused."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.cost.recorded import record, write
from tests.pools import Pools
from weft.cost.compute.complete import complete, overhead_of
from weft.cost.compute.device import Device
from weft.cost.compute.kernel import Kernel
from weft.cost.compute.profiled import Profile, default_path, work_of
from weft.cost.compute.roofline import Roofline
from weft.cost.compute.times import Times
from weft.errors import WeftError

DEVICE = Device("some processor", "cpu", 1 << 34, {"float32": 1e11}, 2e10, 2e-6)
EACH = 10


def product(m: int, n: int, k: int) -> Kernel:
    (found,) = [
        one
        for one in record(lambda: torch.empty(m, k, device="meta") @ torch.empty(k, n, device="meta"))
        if one.op == "mm"
    ]
    return found


def exponential(size: int) -> Kernel:
    (found,) = [one for one in record(lambda: torch.empty(size).exp()) if one.op == "exp"]
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "profile.db"


def test_what_was_measured_is_found_again(path: Path) -> None:
    a, b = product(64, 64, 64), product(64, 64, 32)
    profile = Profile(DEVICE, path)
    assert profile.missing([a, b, a]) == [a, b]
    profile.add([a], {a.key: 3e-5})
    assert profile.missing([a, b, a]) == [b]
    times: Times = Profile(DEVICE, path)
    assert times.seconds(a) == profile.seconds(a) == 3e-5
    assert (profile.how(a), profile.how(b), profile.how(exponential(64))) == ("measured", "interpolated", "roofline")
    profile.add([a], {a.key: 4e-5})
    assert profile.seconds(a) == 4e-5


def test_nothing_that_was_measured_elsewhere_is_found(path: Path) -> None:
    a = product(64, 64, 64)
    Profile(DEVICE, path).add([a], {a.key: 3e-5})
    assert not Profile(DEVICE, path).missing([a])
    for other in (
        Profile(replace(DEVICE, name="another"), path),
        Profile(DEVICE, path, processes=2),
        Profile(DEVICE, path, threads=2),
        Profile(DEVICE, path, torch_version="1.0"),
    ):
        assert other.missing([a]) == [a] and other.how(a) == "roofline"


def test_between_measured_sizes(path: Path) -> None:
    sizes = (64, 128, 512, 1024)
    known = {size: product(size, size, size) for size in sizes}
    profile = Profile(DEVICE, path)
    profile.add(known.values(), {one.key: 1e-6 * size**1.5 for size, one in known.items()})
    found = {size: profile.seconds(product(size, size, size)) for size in range(32, 2049, 32)}
    assert list(found.values()) == sorted(found.values()) and len(set(found.values())) == len(found)
    for low, high in pairwise(sizes):
        assert all(found[low] < found[size] < found[high] for size in found if low < size < high)
    # straight in logarithms
    assert found[256] == pytest.approx(1e-6 * 256**1.5, rel=1e-6)
    # beyond the ends as the roofline grows
    roofline = Roofline(DEVICE)
    grows = roofline.seconds(product(2048, 2048, 2048)) / roofline.seconds(known[1024])
    assert found[2048] == pytest.approx(found[1024] * grows)


def test_other_operators_of_a_family_correct_the_roofline(path: Path) -> None:
    profile, roofline = Profile(DEVICE, path), Roofline(DEVICE)
    known, asked = exponential(1 << 20), record(lambda: torch.empty(1 << 10).tanh())[-1]
    assert profile.seconds(asked) == roofline.seconds(asked)
    profile.add([known], {known.key: 3 * roofline.seconds(known)})
    assert profile.seconds(asked) == pytest.approx(3 * roofline.seconds(asked))


def test_work_grows_with_sizes() -> None:
    assert work_of(product(64, 64, 128)) > work_of(product(64, 64, 64)) > work_of(exponential(8)) == 64


def test_processes_write_at_once(path: Path, pools: Pools) -> None:
    """Both make the file, too: several times, since that is when they may meet."""
    for number in range(10):
        asked = path.with_name(f"{number}.db")
        pools(2).run(write, (str(asked), DEVICE, EACH))
        with sqlite3.connect(asked) as base:
            assert base.execute("SELECT count(*) FROM kernels").fetchone() == (2 * EACH,)
        base.close()


def test_what_others_add_is_seen_when_asked_for(path: Path) -> None:
    a, one, other = product(64, 64, 64), Profile(DEVICE, path), Profile(DEVICE, path)
    before = one.seconds(a)
    other.add([a], {a.key: 1.0})
    assert one.seconds(a) == before
    assert not one.missing([a]) and one.seconds(a) == 1.0


@pytest.mark.parametrize("content", [b"x" * 5000, b"SQLite format 3\0" + b"y" * 5000, b"short"])
def test_a_file_that_is_no_database(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(WeftError, match="profile") as caught:
        Profile(DEVICE, path)
    assert str(path) in str(caught.value) and "move it away" in caught.value.remedy
    assert path.read_bytes() == content


def test_a_damaged_database(path: Path) -> None:
    kernels = [product(64, 64, size) for size in range(16, 400)]
    Profile(DEVICE, path).add(kernels, {one.key: 1e-5 for one in kernels})
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(WeftError, match="damaged"):
        Profile(DEVICE, path)


def test_databases_of_others_and_of_other_versions_are_left_as_they_are(path: Path) -> None:
    path.parent.mkdir()
    with sqlite3.connect(path) as base:
        base.execute("CREATE TABLE songs (name TEXT)")
    base.close()
    content = path.read_bytes()
    with pytest.raises(WeftError, match="another program"):
        Profile(DEVICE, path)
    assert path.read_bytes() == content
    path.unlink()
    Profile(DEVICE, path)
    with sqlite3.connect(path) as base:
        base.execute("PRAGMA user_version = 99")
    base.close()
    with pytest.raises(WeftError, match="layout 99") as caught:
        Profile(DEVICE, path)
    assert "move it away" in caught.value.remedy


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for wrong in (tmp_path, tmp_path / "file" / "profile.db"):
        with pytest.raises(WeftError, match=r"cannot be opened|cannot be used"):
            Profile(DEVICE, wrong)


def test_where_it_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "weft" / "profile.db"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_path() == Path.home() / ".cache" / "weft" / "profile.db"


def test_completing_measures_what_is_missing_once(path: Path) -> None:
    kernels = [*record(lambda: torch.ones(4, 4) @ torch.ones(4, 4)), *record(lambda: torch.ones(4).nonzero())]
    profile = Profile(DEVICE, path)
    refused = complete(profile, kernels)
    assert [key.split(".")[0] for key in refused] == ['["nonzero']
    assert [kernel.op for kernel in profile.missing(kernels)] == ["nonzero"]
    assert overhead_of(profile) == overhead_of(Profile(DEVICE, path)) is not None
    seconds = [profile.seconds(kernel) for kernel in kernels]
    again = Profile(DEVICE, path)
    complete(again, kernels[:-1])
    assert [again.seconds(kernel) for kernel in kernels] == seconds
