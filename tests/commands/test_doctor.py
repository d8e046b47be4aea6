"""`weft doctor`: what it says of machines, made up and real, and of collectives that fail."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.commands import trial_bodies as bodies
from tests.pools import Pools
from weft.cli import main
from weft.commands import doctor, machine
from weft.commands.machine import Line, Machine, choice_line, environment_lines, facts, look_around
from weft.commands.trials import TRIALS, trial
from weft.runtime.jobs.devices import Seen, choose
from weft.runtime.jobs.launch import Entry, Pool

SEEN = Seen(host="a", kind="cuda", count=4, backend="nccl")
GPUS = Machine(
    SEEN,
    torch="2.13.0, built for cuda 12.8, NCCL 2.27.5, driver 570.86",
    devices=("NVIDIA H100, 80.0 GiB",) * 4,
    cores=64,
    memory="512.0 GiB of memory",
)
CPU = Machine(Seen(host="a"), cores=8)
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)


def by_name(found: Machine, ranks: int = 4) -> dict[str, Line]:
    return {line.name: line for line in facts(found, ranks)}


def wrong(found: Machine = GPUS, ranks: int = 4, **variables: str) -> list[str]:
    lines = environment_lines(replace(found, environment=variables), ranks)
    assert all(bool(line.remedy) == (line.state == "warning") for line in lines)
    return [line.text for line in lines if line.state == "warning"]


def test_a_machine_with_devices() -> None:
    lines = by_name(GPUS)
    assert {line.state for line in lines.values()} == {"ok"}
    assert lines["devices"].text == "4 of cuda: 4 x NVIDIA H100, 80.0 GiB"
    assert lines["host"].text == "64 cores, 512.0 GiB of memory" and "gloo" in lines["backends"].text
    assert lines["peer access"].text == "every device reads the memory of every other"
    assert wrong(GPUS) == []


@pytest.mark.parametrize(
    ("found", "name", "text", "remedy"),
    [
        (replace(GPUS, apart=((0, 1), (1, 0))), "peer access", "0 -> 1 and 1 more", "PCIe ACS"),
        (replace(GPUS, shm=64 << 20), "/dev/shm", "0.1 GiB free: NCCL", "--shm-size"),
        (replace(CPU, unseen="this host has an NVIDIA GPU"), "devices", "none: this host has", "--device cpu"),
    ],
)
def test_what_looks_wrong(found: Machine, name: str, text: str, remedy: str) -> None:
    line = by_name(found)[name]
    assert line.state == "warning" and text in line.text and remedy in line.remedy
    assert [one.name for one in by_name(found).values() if one.state != "ok"] == [name]


def test_a_cpu_that_is_meant_is_ok() -> None:
    found = replace(CPU, seen=replace(CPU.seen, asked="cpu"), unseen="this host has an NVIDIA GPU")
    assert {line.state for line in by_name(found).values()} == {"ok"}


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES=: all devices are hidden"),
        ({"MASTER_ADDR": "host7"}, "MASTER_ADDR is set, and MASTER_PORT is not"),
        ({"NCCL_P2P_DISABLE": "1"}, "NCCL_P2P_DISABLE=1: devices do not read each other's memory"),
        (
            {"LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "8", "OMP_NUM_THREADS": "1"},
            "this is rank 4 of its host, which has 4 devices",
        ),
        ({"OMP_NUM_THREADS": "64"}, "OMP_NUM_THREADS is 64: 64 threads in each of 4 ranks of a host with 64 cores"),
        (
            {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"},
            "OMP_NUM_THREADS is not set: 64 threads in each of 8 ranks",
        ),
    ],
)
def test_variables(variables: dict[str, str], text: str) -> None:
    (found,) = wrong(**variables)
    assert text in found


def test_variables_that_are_right() -> None:
    assert not wrong(CUDA_VISIBLE_DEVICES="0,1", NCCL_DEBUG="INFO", OMP_NUM_THREADS="16", NCCL_P2P_DISABLE="0")


def test_the_choice_is_that_of_a_job() -> None:
    ranks = [replace(SEEN, local=(rank, 8)) for rank in range(8)]
    line = choice_line(choose(ranks, 0), SEEN)
    assert line.text == "8 ranks on cpu over gloo: 8 ranks of a host see 4 of cuda" and line.state == "warning"
    assert line.remedy.startswith("Start one process for each device")
    bare = replace(SEEN, backend="")
    assert "backend for cuda" in choice_line(choose([bare, bare], 0), bare).remedy
    assert choice_line(choose([replace(SEEN, local=(rank, 4)) for rank in range(4)], 0), SEEN).state == "ok"


def test_ranks_if_none_are_asked_for() -> None:
    asked = ({}, {"asked": "cuda"}, {"asked": "cuda:1"}, {"asked": "cpu"}, {"over": "gloo"}, {"over": "nccl"})
    assert [doctor.default_ranks(replace(SEEN, **one)) for one in asked] == [4, 4, 1, 2, 2, 4]
    assert doctor.default_ranks(Seen(asked="cuda")) == 2


def test_torch_is_asked_for_names_memory_and_links(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = SimpleNamespace(
        get_device_properties=lambda at: SimpleNamespace(name=f"card {at}", total_memory=8 << 30),
        can_device_access_peer=lambda a, b: a < b,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23\nGCC version: 12.3.0")
    monkeypatch.setattr(machine, "DRIVER", driver)
    found = look_around(replace(SEEN, count=2), {"A": "b"})
    assert found.devices == ("card 0, 8.0 GiB", "card 1, 8.0 GiB") and found.torch.endswith(", driver 570.86.15")
    assert found.apart == ((1, 0),) and found.environment == {"A": "b"} and not found.unseen


def test_why_torch_sees_no_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "HARDWARE", {str(tmp_path): "a GPU"})
    monkeypatch.setattr(torch.version, "cuda", None)
    assert look_around(CPU.seen).unseen == "this host has a GPU, and torch is built for the CPU alone"
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch, "zeros", mock.Mock(side_effect=RuntimeError("The driver is too old. Update it.\nSee x")))
    assert look_around(CPU.seen).unseen == "torch is built for cuda 12.8 and sees no device (The driver is too old)"


def attempted(pool: Pool, timeout: float, body: object, name: str) -> Line:
    remedy = doctor.REMEDIES["gloo"]
    return doctor.attempt(name, timeout, lambda: doctor.tried(pool, name, body), remedy)  # type: ignore[arg-type]


def test_collectives_that_fail_at_once(pools: Pools) -> None:
    line = attempted(pools(2), 60.0, bodies.wrong, "all-reduce")
    assert (line.name, line.state, line.text) == ("all-reduce", "failed", "rank 1 has a wrong result")
    assert "127.0.0.1" in line.remedy
    line = attempted(pools(2), 60.0, bodies.killed, "barrier")
    assert line.failed and "rank 1 failed" in line.text and "killed by SIGKILL" in line.text


def test_collectives_between_devices(pools: Pools) -> None:
    """The transport of devices, over gloo."""
    found = [doctor.tried(pools(3), name, bodies.between_devices) for name in TRIALS]
    assert all(text.endswith((" s", " ms")) for text in found)


@pytest.mark.parametrize(
    ("body", "why"), [(bodies.deserted, "rank 0 waited 0.7 s"), (bodies.endless, "killed by SIGKILL")]
)
def test_a_collective_that_does_not_end_is_the_last(body: Entry, why: str) -> None:
    """By the transport, which keeps time on a CPU, or by the launcher."""
    with Pool(2, timeout=0.7) as pool:
        pool.run(trial, "processes")
        begin = time.monotonic()
        *before, line = doctor.run_all(pool, {"timeout": 0.7}, lambda text: None, body)
    assert [one.name for one in before] == ["processes"]
    assert (line.name, line.state) == ("barrier", "failed") and why in line.text
    assert line.text.startswith("did not end within 0.7 s: ")
    assert time.monotonic() - begin < 60


def test_a_real_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor", "--device", "cpu", "--json"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert max(map(len, table)) <= 80 and table[-1].startswith("0 failed, ")
    lines = {line["name"]: line for line in json.loads(last)["lines"]}
    assert lines["choice"]["text"] == "2 ranks on cpu over gloo: asked for"
    wanted = {"barrier", "all-reduce", "all-gather", "reduce-scatter", "point to point", "verify dp=2", "verify tp=2"}
    assert wanted <= lines.keys() and all(lines[name]["state"] == "ok" for name in wanted)


def test_nothing_is_run_if_that_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(Pool, "start", None)
    assert main(["doctor", "--device", "cpu", "--no-run"]) == 0
    out = capsys.readouterr().out
    assert "barrier" not in out and "unset CUDA_VISIBLE_DEVICES" in out and "2 ranks on cpu over gloo: asked for" in out
    assert out.splitlines()[-1].startswith("0 failed, ")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is one")
def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cuda"]) == 2
    told = capsys.readouterr()
    assert "no accelerator" in told.out and "device='cuda' is asked for, and rank 0 sees no cuda" in told.err


@pytest.mark.parametrize("words", [["--ranks", "0"], ["--device", "gpu"], ["--backend", "mpi"], ["--timeout", "-1"]])
def test_wrong_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    assert "try:" in capsys.readouterr().err


def test_a_launched_process_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert main(["doctor"]) == 2
    assert "RANK=3 says that a launcher has started this one" in capsys.readouterr().err
