"""Where ranks compute: decided from what all of them see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import weft
from tests.models import MLP
from weft.errors import RunError
from weft.runtime.jobs import devices
from weft.runtime.jobs.devices import Chosen, Seen, choose, look, told_place
from weft.runtime.jobs.launch import Pool
from weft.runtime.links.backend import BACKENDS

HERE = Seen(host="a", kind="cuda", count=4, backend="nccl")
NONE = Seen(host="a")


def on_host(one: Seen, size: int, **told: object) -> list[Seen]:
    """The ranks of a host, told by a launcher."""
    return [replace(one, local=(rank, size), **told) for rank in range(size)]  # type: ignore[arg-type]


def chosen(seen: Sequence[Seen]) -> list[str]:
    found = [choose(seen, rank) for rank in range(len(seen))]
    assert len({(one.backend, one.why, one.idle) for one in found}) == 1 or found[0].backend == "nccl"
    return [f"{one.device} {one.backend}" for one in found]


def test_a_device_for_each_rank() -> None:
    assert chosen(on_host(HERE, 4)) == [f"cuda:{rank} nccl" for rank in range(4)]
    one = choose(on_host(HERE, 2), 0)
    assert str(one) == "2 ranks on cuda over nccl: every rank has one of its own, 2 more here are not used"


def test_two_hosts() -> None:
    both = [*on_host(HERE, 2), *on_host(replace(HERE, host="b"), 2)]
    assert chosen(both) == ["cuda:0 nccl", "cuda:1 nccl"] * 2


def test_a_launcher_that_tells_no_place() -> None:
    ranks = [replace(HERE, host=host) for host in "abab"]
    assert chosen(ranks) == ["cuda:0 nccl", "cuda:0 nccl", "cuda:1 nccl", "cuda:1 nccl"]


def test_one_visible_device_per_rank() -> None:
    alone = replace(HERE, count=1)
    assert chosen([replace(one, first=str(at)) for at, one in enumerate(on_host(alone, 4))]) == ["cuda:0 nccl"] * 4
    shared = on_host(replace(alone, first="0"), 2)
    assert chosen(shared) == ["cpu gloo"] * 2
    assert "ranks 0 and 1 of a host would share cuda:0" in choose(shared, 1).idle


def test_too_few_devices_are_told() -> None:
    found = choose(on_host(HERE, 8), 3)
    assert str(found) == "8 ranks on cpu over gloo: 8 ranks of a host see 4 of cuda"
    assert found.idle.startswith("this host has 4 of cuda, and the job runs on the CPU: 8 ranks of a host see 4")
    with pytest.raises(RunError, match="device='cuda' is asked for, and 8 ranks of a host see 4 of cuda"):
        choose(on_host(HERE, 8, asked="cuda"), 0)


def test_no_devices_no_warning() -> None:
    found = choose(on_host(NONE, 2), 0)
    assert (str(found), found.idle) == ("2 ranks on cpu over gloo: rank 0 sees no accelerator", "")


def test_hosts_that_differ() -> None:
    assert "rank 2 sees no accelerator" in choose([*on_host(HERE, 2), *on_host(replace(NONE, host="b"), 1)], 0).idle


def test_a_device_that_no_backend_of_this_build_carries() -> None:
    found = choose(on_host(replace(HERE, backend=""), 2), 0)
    assert found.why == "this build of torch has no backend for cuda" and found.device.type == "cpu"
    assert choose([replace(HERE, backend="", local=(0, 1))], 0).device == torch.device("cuda:0")


def test_what_is_asked_for() -> None:
    assert chosen(on_host(HERE, 4, asked="cpu")) == ["cpu gloo"] * 4
    assert not choose(on_host(HERE, 4, asked="cpu"), 0).idle
    assert chosen(on_host(HERE, 2, over="gloo")) == ["cpu gloo"] * 2
    assert chosen(on_host(HERE, 2, over="nccl")) == ["cuda:0 nccl", "cuda:1 nccl"]
    own = [replace(one, asked=f"cuda:{3 - at}") for at, one in enumerate(on_host(HERE, 2))]
    assert chosen(own) == ["cuda:3 nccl", "cuda:2 nccl"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"asked": "cuda:1"}, "ranks 0 and 1 of a host would share cuda:1"),
        ({"asked": "cuda:7"}, "rank 0 sees 4, numbered from 0, and cuda:7 is not among them"),
        ({"asked": "xpu"}, "rank 0 sees no xpu"),
        ({"asked": "cuda", "over": "gloo"}, "backend='gloo' carries tensors on cpu, and device='cuda' is asked for"),
    ],
)
def test_what_cannot_be_had_is_refused(asked: dict[str, str], message: str) -> None:
    with pytest.raises(RunError, match=message):
        choose(on_host(HERE, 2, **asked), 0)


def test_ranks_that_ask_for_different_things() -> None:
    both = [replace(HERE, asked="cuda"), replace(HERE, asked="cpu")]
    for rank in range(2):
        with pytest.raises(RunError, match="rank 0 asks for device='cuda', rank 1 for device='cpu'"):
            choose(both, rank)


def test_a_device_that_nobody_has_is_not_a_matter_of_processes() -> None:
    for count in (1, 2):
        with pytest.raises(RunError, match=r"no cuda\n  try: see what weft doctor tells of this machine"):
            choose(on_host(NONE, count, asked="cuda"), 0)


def test_no_limit_is_too_long_for_a_backend() -> None:
    assert BACKENDS["nccl"].limit(30).total_seconds() == 300
    assert BACKENDS["nccl"].limit(1e15) == BACKENDS["gloo"].limit(1e15)


def test_words_of_launchers() -> None:
    assert told_place({"OMPI_COMM_WORLD_LOCAL_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}) == (2, 8)
    assert told_place({"RANK": "3", "WORLD_SIZE": "8", "SLURM_LOCALID": "3"}) is None
    assert Seen.from_json(HERE.to_json()) == HERE
    assert Seen.from_json(on_host(HERE, 2)[1].to_json()) == on_host(HERE, 2)[1]


def test_words_that_name_no_device() -> None:
    with pytest.raises(RunError, match=r"device='gpu' is no device\n  try: .*cpu, cuda, xpu"):
        look("gpu")
    assert look("cpu:0").asked == "cpu:0"
    with pytest.raises(RunError, match=r"device='cpu:1' is no device: the CPU of a host is one\n  try: 'cpu'"):
        look("cpu:1")
    with pytest.raises(RunError, match="backend='ncl' is none of Weft's\n  try: did you mean 'nccl'"):
        look(backend="ncl")
    if not dist.is_nccl_available():
        with pytest.raises(RunError, match="backend='nccl' is not in this build of torch"):
            look(backend="nccl")


def test_what_a_machine_with_devices_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerators as torch would tell of them."""
    there = SimpleNamespace(
        is_available=lambda: True, current_accelerator=lambda: torch.device("cuda"), device_count=lambda: 2
    )
    monkeypatch.setattr(torch, "accelerator", there)
    monkeypatch.setattr(dist, "is_backend_available", lambda name: True)
    found = look(environment={"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "4,5"})
    assert (found.kind, found.count, found.backend, found.local, found.first) == ("cuda", 2, "nccl", (1, 2), "4,5")
    there.device_count = lambda: 1
    monkeypatch.setattr(devices, "_identity", lambda kind: "GPU-7")
    assert look(environment={"CUDA_VISIBLE_DEVICES": "0"}).first == "GPU-7"


def test_it_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    one = Chosen(torch.device("cpu"), "gloo", 3, "said once", "idle")
    with pytest.warns(UserWarning, match="idle"):
        one.tell()
    one.tell()
    assert capsys.readouterr().err == "weft: 3 ranks on cpu over gloo: said once\n"


def test_parallelize_alone() -> None:
    model, example = MLP(), (torch.zeros(4, 6), torch.zeros(4, 6))
    with pytest.raises(RunError, match="device='cuda' is asked for, and this process sees no cuda"):
        weft.parallelize(model, example, "dp=1", device="cuda", cache=None)
    for timeout in (0, -1, "5", True):
        with pytest.raises(RunError, match=f"timeout={timeout!r} is no time"):
            weft.parallelize(model, example, "dp=1", timeout=timeout, cache=None)  # type: ignore[arg-type]
    with pytest.raises(RunError, match="backend=3 is no backend"):
        weft.parallelize(model, example, "dp=1", backend=3, cache=None)  # type: ignore[arg-type]
    with pytest.raises(RunError, match="backend='gloo' is asked for, and emulate=True runs all ranks"):
        weft.parallelize(model, example, "dp=2", emulate=True, backend="gloo", cache=None)
    assert weft.parallelize(model, example, "dp=1", device="cpu", cache=None) is not None


def test_pools_and_verify() -> None:
    with pytest.raises(RunError, match="device='cuda' is asked for"):
        Pool(2, device="cuda")
    with pytest.raises(RunError, match="devices are emulated"):
        weft.verify(MLP(), (torch.zeros(4, 6), torch.zeros(4, 6)), plan="dp=2", device="cpu")
