"""Clusters by name: the grammar, sources of numbers, what is refused; what is detected here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from weft.cost.cluster import detect as detection
from weft.cost.cluster.detect import accelerators, cores, detect, match
from weft.cost.cluster.file import from_yaml, to_yaml
from weft.cost.cluster.known import known
from weft.cost.cluster.names import EXAMPLES, cluster_of, named
from weft.errors import WeftError

KINDS = ["V100-16GB", "V100-32GB", "A100-40GB", "A100-80GB", "H100", "H200", "B200", "MI250X", "MI300X", "cpu"]
SIZES = dict.fromkeys(("8-A100-80GB", "dgx2-v100x8", "2x4-A100-40GB", "4x2-MI250X"), 8)
SIZES |= dict.fromkeys(("2x8-A100-80GB", "16x1-H100", "dgx2-v100x16"), 16)
SIZES |= dict.fromkeys(("4x8-H100", "dgx1-v100x32", "dgx2-v100x32", "2x8-h100+2x8-H200"), 32)
SIZES |= {"4-cpu": 4, "1-H100": 1, "3x5-B200": 15, "dgx1-v100x4": 4, "2x3-cpu": 6}


@pytest.mark.smoke
@pytest.mark.parametrize("name", SIZES)
def test_names(name: str) -> None:
    cluster = cluster_of(name)
    assert cluster.size == SIZES[name] and cluster.name == name
    assert from_yaml(to_yaml(cluster)) == cluster
    assert all(cluster.seconds("all_reduce", range(n + 1), 1 << 20) > 0 for n in range(cluster.size))
    assert name in str(cluster) and len(str(cluster).splitlines()) <= 12


def test_all_kinds_are_known() -> None:
    assert sorted(known().devices) == sorted(KINDS)
    for kind in KINDS:
        assert named(f"2x2-{kind}").size == 4


def test_every_number_has_a_source() -> None:
    for device in known().devices.values():
        assert {"memory", "flops", "bandwidth", "launch"} <= set(device.sources), device.name
        assert device.flops["float32"] <= max(device.flops.values())
    for name, machine in known().machines.items():
        for level in (*machine.inside, machine.between):
            wanted = {"bandwidth", "latency", "peer_latency", "efficiency", *(["links"] if level.links else [])}
            assert wanted <= set(level.sources), (name, level.name)
    text = named("2x8-H100").describe(sources=True)
    assert "efficiency: assumption" in text and "flops: NVIDIA H100" in text


def test_known_values() -> None:
    h100, a100 = named("8-H100").device(0), named("8-A100-80GB").device(7)
    assert (h100.flops["bfloat16"], h100.flops["float32"], h100.bandwidth) == (989.4e12, 66.9e12, 3350e9)
    assert (a100.flops["bfloat16"], a100.flops["tf32"], a100.memory) == (312e12, 156e12, 80 << 30)
    assert [level.bandwidth for level in named("2x8-A100-80GB").levels] == [300e9, 25e9]
    assert [(level.span, level.links) for level in named("dgx1-v100x32").levels] == [(8, 0), (32, 4)]
    assert [(level.span, level.links) for level in named("dgx2-v100x32").levels] == [(16, 0), (32, 8)]
    # half of a host has half of its cards, and of a mesh the links to those that are there
    assert [level.links for level in named("2x4-H100").levels] == [0, 4]
    assert named("4-MI300X").levels[0].bandwidth == 3 * 64e9
    assert [level.span for level in named("2x4-MI250X").levels] == [2, 4, 8]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("2x8-A100-80G", "A100-80GB"),
        ("8-A100", "'A100-40GB' or 'A100-80GB'"),
        ("8-H10O", "did you mean 'H100'"),
        ("dgx3-v100x32", "dgx"),
        ("dgx1-v100x12", "dgx1-v100x"),
        ("dgx1-v100x0", "dgx1-v100x8"),
        ("64-H100", "8x8-H100"),
        ("2x16-V100-32GB", "4x8-V100-32GB"),
        ("0x8-H100", "2x8-A100-80GB"),
        ("8-", "DEVICES-KIND"),
        ("", "DEVICES-KIND"),
        ("cpus", "did you mean 'cpu'"),
        ("gpu", "kinds: V100-16GB"),
        ("2x8-H100+2x4-H200", "as many devices in each host"),
        ("nowhere.yaml", "check the path"),
        ("9999999999999x8-H100", "DEVICES-KIND"),
    ],
)
def test_unknown_names_are_refused_with_what_was_meant(text: str, wanted: str) -> None:
    with pytest.raises(WeftError) as caught:
        cluster_of(text)
    assert wanted in caught.value.remedy and caught.value.message


def test_examples_in_remedies_work() -> None:
    assert all(cluster_of(name).size for name in EXAMPLES)


def test_files_are_found(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(to_yaml(named("2x8-H100")))
    assert cluster_of(str(path)) == named("2x8-H100")


def test_this_machine() -> None:
    assert cluster_of("cpu").size == cores() > 0
    assert cluster_of("cpu").device(0).memory > 1 << 20
    if not torch.accelerator.is_available():
        assert detect() == cluster_of("cpu")


@pytest.mark.parametrize(
    ("name", "gib", "wanted"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", 79.1, "H100"),
        ("NVIDIA H200", 139.8, "H200"),
        ("NVIDIA B200", 178.4, "B200"),
        ("Tesla V100-SXM2-16GB", 15.8, "V100-16GB"),
        ("Tesla V100-SXM3-32GB", 31.7, "V100-32GB"),
        ("AMD Instinct MI300X", 191.9, "MI300X"),
        ("AMD Instinct MI250X", 63.9, "MI250X"),
    ],
)
def test_drivers_names(name: str, gib: float, wanted: str) -> None:
    assert match(name, int(gib * 2**30)).name == wanted
    cluster = accelerators("cuda", name, int(gib * 2**30), 8)
    assert cluster.size == 8 and cluster.device(0).memory == int(gib * 2**30)
    assert "driver" in cluster.device(0).sources["memory"]


@pytest.mark.parametrize(
    "name", ["NVIDIA H100 PCIe", "NVIDIA A100-PCIE-40GB", "NVIDIA H100 NVL", "NVIDIA L40S", "MI300"]
)
def test_other_accelerators_are_refused_rather_than_guessed(name: str) -> None:
    with pytest.raises(WeftError, match="not known"):
        match(name, 80 << 30)


def test_accelerators_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    one = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=85_000_000_000)
    found = [one, one]
    fake = SimpleNamespace(
        accelerator=SimpleNamespace(
            is_available=lambda: True,
            current_accelerator=lambda: SimpleNamespace(type="cuda"),
            device_count=lambda: len(found),
        ),
        get_device_module=lambda device: SimpleNamespace(get_device_properties=lambda index: found[index]),
    )
    monkeypatch.setattr(detection, "torch", fake)
    assert detect().name == "2-H100" and detect().device(1).memory == 85_000_000_000
    found.append(SimpleNamespace(name="NVIDIA H200", total_memory=1))
    with pytest.raises(WeftError, match="several kinds"):
        detect()
