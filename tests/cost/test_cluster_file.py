"""Cluster files: what is written reads back equal; mistakes are told with line and field."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.cost.cluster.cluster import Cluster, Hosts
from weft.cost.cluster.file import from_yaml, load_cluster, to_yaml
from weft.cost.cluster.known import DTYPES, known
from weft.cost.cluster.levels import SHAPES, Level
from weft.cost.cluster.names import named
from weft.cost.compute.device import Device
from weft.cost.links import DEFAULTS, KINDS, Links
from weft.errors import WeftError

LAB = """\
name: lab
hosts: 4
devices: 8
device:
  name: chip
  memory: 80 GiB
  flops:
    bfloat16: 312 TFLOP/s
    float32: 19.5e12
  bandwidth: 2 TB/s
levels:
- {name: nvlink, fabric: nvlink, span: 8, bandwidth: 300 GB/s}
- name: ethernet
  span: 32
  bandwidth: 100 Gb/s
  links: 1
  latency: 20 us
  peer_latency: 15 us
"""

names = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)
rates = st.floats(min_value=1e-3, max_value=1e18, allow_nan=False)
times = st.floats(min_value=0, max_value=10, allow_nan=False)
sources = st.dictionaries(st.sampled_from(["bandwidth", "latency", "note"]), names)
tables = st.one_of(
    st.none(),
    st.sampled_from(list(DEFAULTS.values())),
    st.builds(Links, names, times, times, st.fixed_dictionaries(dict.fromkeys(KINDS, times))),
)
devices = st.one_of(
    st.sampled_from(list(known().devices.values())),
    st.builds(
        Device,
        *(names, st.sampled_from(["cuda", "xpu", "cpu"]), st.integers(1, 1 << 50)),
        *(st.dictionaries(st.sampled_from(DTYPES), rates, min_size=1), rates, times, st.booleans(), sources),
    ).filter(lambda device: device.name not in known().devices and "launch" not in device.sources),
)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    counts = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    inner, times_more = draw(st.integers(1, 4)), draw(st.integers(2, 3))
    spans = [inner, inner * times_more] if inner > 1 else [times_more]
    per_host = spans[-1]
    if sum(counts) > 1:
        spans.append(per_host * sum(counts))

    def levels() -> tuple[Level, ...]:
        return tuple(
            draw(
                st.builds(
                    Level,
                    *(names, st.just(span), rates, times, times, st.sampled_from(list(SHAPES)), st.integers(0, 9)),
                    *(st.floats(min_value=0.01, max_value=1), tables, sources),
                )
            )
            for span in spans
        )

    return Cluster(draw(names), per_host, tuple(Hosts(count, draw(devices), levels()) for count in counts))


@given(clusters())
def test_what_is_written_reads_back_equal(cluster: Cluster) -> None:
    assert from_yaml(to_yaml(cluster)) == cluster


@pytest.mark.smoke
def test_units_and_fabrics(tmp_path: Path) -> None:
    (tmp_path / "lab.yaml").write_text(LAB)
    cluster = load_cluster(tmp_path / "lab.yaml")
    device, (inside, between) = cluster.device(31), cluster.levels
    assert (device.memory, device.flops["float32"], device.bandwidth) == (80 << 30, 19.5e12, 2e12)
    assert (inside.efficiency, inside.peer_latency) == (0.8, pytest.approx(3.4e-6))
    assert (between.bandwidth, between.links, between.latency) == (12.5e9, 1, pytest.approx(20e-6))
    assert "launch" in device.sources and "NCCL" in inside.sources["latency"]


def test_known_devices_bring_their_machines() -> None:
    assert from_yaml("name: 4x8-H100\nhosts: 4\ndevices: 8\ndevice: H100\n") == named("4x8-H100")
    kinds = "kinds:\n- {hosts: 2, device: A100-80GB}\n- {hosts: 2, device: H100}\n"
    assert from_yaml(f"name: 2x8-A100-80GB+2x8-H100\ndevices: 8\n{kinds}") == named("2x8-A100-80GB+2x8-H100")
    assert from_yaml("devices: 2\ndevice: cpu", "here.yaml").name == "here"


def changed(before: str, after: str) -> str:
    assert before in LAB
    return LAB.replace(before, after, 1)


WRONG = [
    (changed("hosts: 4", "host: 4"), 2, "host", "did you mean 'hosts'"),
    (changed("hosts: 4", "hosts: four"), 2, "hosts", "whole number"),
    (changed("hosts: 4", "hosts: 0"), 2, "hosts", "whole number"),
    (changed("hosts: 4", "hosts: true"), 2, "hosts", "whole number"),
    (changed("hosts: 4", "hosts: 4\nhosts: 5"), 3, "hosts", "twice"),
    (changed("devices: 8\n", ""), 1, "", "'devices' is missing"),
    (changed("memory: 80 GiB", "memory: 80 GX"), 6, "device.memory", "GX is no unit of bytes"),
    (changed("memory: 80 GiB", "memory: 80 gib"), 6, "device.memory", "gib is no unit"),
    (changed("memory: 80 GiB", "memory: -1"), 6, "device.memory", "no number >= 0"),
    (changed("memory: 80 GiB", "memory: 0"), 6, "device.memory", "memory is 0"),
    (changed("memory: 80 GiB", "memory: .nan"), 6, "device.memory", "no number >= 0"),
    (changed("memory: 80 GiB", "memory: 1.2.3 GiB"), 6, "device.memory", "no number >= 0"),
    (changed("bfloat16:", "bfloat61:"), 8, "device.flops.bfloat61", "did you mean 'bfloat16'"),
    (changed("  bandwidth: 2 TB/s\n", ""), 4, "device", "'bandwidth' is missing"),
    (changed("fabric: nvlink", "fabric: nvlnk"), 12, "levels[0].fabric", "did you mean 'nvlink'"),
    (changed("span: 8", "spann: 8"), 12, "levels[0].spann", "did you mean 'span'"),
    (changed("span: 32", "span: 16"), 11, "levels", "the last one spans 16 of 32"),
    (changed("links: 1", "links: -1"), 16, "levels[1].links", "whole number"),
    (changed("links: 1", "shape: swtich"), 16, "levels[1].shape", "did you mean 'switch'"),
    (changed("links: 1", "efficiency: 2"), 16, "levels[1].efficiency", "not in (0, 1]"),
    (changed("links: 1", "table: glo"), 16, "levels[1].table", "one of: gloo"),
    (changed("links: 1", "table: {name: x}"), 16, "levels[1].table", "exactly the fields"),
    (changed("  latency: 20 us\n", ""), 13, "levels[1]", "'latency' is missing"),
    (changed("name: lab", "name: [lab]"), 1, "name", "no text"),
    (changed("name: lab", "name: lab\nkinds: []"), 3, "hosts", "beside kinds"),
    (changed("name: lab", "? [a]\n: b"), 1, "", "no name of a field"),
    ("devices: 8\ndevice: h10", 2, "device", "did you mean 'H100'"),
    ("devices: 9\ndevice: H100", 1, "", "has 8 devices, not 9"),
    ("devices: 8\ndevice: 5", 2, "device", "no mapping"),
    ("devices: 8\nkinds: 5", 2, "kinds", "no list"),
    ("devices: 99999999999999\ndevice: cpu", 1, "devices", "too many"),
    ("devices: 8\nlevels: []", 1, "", "'device' is missing"),
    ("devices: 8\ndevice: {name: x, memory: 1, bandwidth: 1, flops: {float32: 1}}", 1, "", "is not known"),
    ("devices: 8\ndevice: H100\nlevels: []", 3, "levels", "spans 0 of 8"),
    ("a: [1\nb: 2", 2, "", "not YAML"),
    ("a: !!python/object:os.system x", 1, "", "not YAML"),
    ("a: &x 1\nb: *x", 2, "", "b"),
    ("- 1", 1, "", "no mapping"),
]


@pytest.mark.parametrize(("text", "line", "field", "wanted"), WRONG)
def test_mistakes_are_told_with_line_and_field(text: str, line: int, field: str, wanted: str) -> None:
    with pytest.raises(WeftError) as caught:
        from_yaml(text, "lab.yaml")
    error = caught.value
    assert wanted in f"{error.message} {error.remedy}" or wanted in error.place, error
    assert error.place.startswith("lab.yaml, line ") and field in error.place, error
    assert f"line {line}" in error.place, error
    assert error.remedy


@pytest.mark.parametrize("text", ["", "a: &x [*x]", "\x00", "x", "[" * 3000, "a: 2001-99-99"])
def test_what_is_no_cluster_is_refused(text: str) -> None:
    with pytest.raises(WeftError):
        from_yaml(text)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match="no cluster file"):
        load_cluster(tmp_path)
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(WeftError, match="cannot be read"):
        load_cluster(tmp_path / "a.yaml")
