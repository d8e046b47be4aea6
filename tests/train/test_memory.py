"""Memory: what is expected of a rank is what its live tensors take; parts are what the stage of ZeRO promises."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.cli import main
from weft.compile import compile_subject
from weft.compile.model_file import Subject, load_model_file
from weft.errors import RunError
from weft.runtime.checks.ledger import Bytes
from weft.runtime.jobs.launch import Pool
from weft.train.memory.expected import alike_ranks, expect_memory, expect_rank
from weft.train.memory.limit import check_limit
from weft.train.memory.measured import measure

GPT = Path(__file__).parents[2] / "examples" / "gpt.py"
NEAR = 0.02
"""How far from its promise a stage may be."""
STATE = ("parameters", "kept", "gradients", "optimizer", "buffers")


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Processes in which nothing else has run: what lives in them is counted."""
    with Pool(2, preload=("weft.train.memory.measured",)) as pool:
        yield pool


@pytest.mark.parametrize(
    "plan",
    [
        "dp=2,zero=1",
        *(pytest.param(plan, marks=pytest.mark.full) for plan in ("dp=2,zero=3,recompute=full", "tp=2")),
        "pp=2,microbatches=4",
    ],
)
def test_expected_is_measured(plan: str, pool: Pool) -> None:
    subject = load_model_file(GPT)
    compiled = compile_subject(subject, plan)
    expected = [one.bytes for one in expect_memory(compiled.files, subject)]
    for mine, live in zip(expected, measure(str(GPT), compiled.files, pool=pool), strict=True):
        for kind in (*STATE, "activations"):
            assert mine.as_json()[kind] == live.as_json()[kind], (plan, kind, mine, live)
        # memory that an earlier step has left and this one uses again is not seen
        assert mine.peak == pytest.approx(live.peak, rel=0.1), (plan, mine, live)


def promised(stage: int, ranks: int, whole: int) -> dict[str, float]:
    """Bytes of parameters, gradients after a step, and AdamW's state. Whole gradients of stage 1 are gone by then."""
    part = whole / ranks
    return {"parameters": part if stage == 3 else whole, "gradients": part, "optimizer": 2 * part}


def check_promise(found: Bytes, stage: int, ranks: int, whole: int) -> None:
    live = found.as_json()
    live["parameters"] += live["kept"]
    for kind, size in promised(stage, ranks, whole).items():
        # what other processes see too comes in whole pages
        assert live[kind] == pytest.approx(size, rel=NEAR, abs=mmap.PAGESIZE), (stage, ranks, kind, found)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 2, 3])
def test_stage_keeps_its_promise(stage: int, pool: Pool) -> None:
    subject = load_model_file(GPT)
    whole = sum(parameter.nbytes for parameter in subject.model.parameters())
    compiled = compile_subject(subject, f"dp=2,zero={stage}")
    for found in measure(str(GPT), compiled.files, pool=pool):
        check_promise(found, stage, 2, whole)


LARGE_GPT = f"""
import runpy
import torch
small = runpy.run_path({str(GPT)!r})
VOCABULARY, WIDTH, LAYERS, LENGTH = 8192, 448, 7, 16
small["GPT"].__init__.__globals__.update(VOCABULARY=VOCABULARY, WIDTH=WIDTH, LAYERS=LAYERS, HEADS=7)
model = small["model"]


def example():
    tokens = torch.randint(VOCABULARY, (12, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
"""


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "groups"), [(2, 1), (3, 1), (4, 1), (4, 2)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stage_of_twenty_million(stage: int, ranks: int, groups: int, tmp_path: Path) -> None:
    path = tmp_path / "large.py"
    path.write_text(LARGE_GPT)
    subject = load_model_file(path)
    whole = sum(parameter.nbytes for parameter in subject.model.parameters())
    assert 19e6 < whole / 4 < 22e6
    compiled = compile_subject(subject, f"dp={ranks},zero={stage},zero_groups={groups}")
    for found in measure(str(path), compiled.files):
        check_promise(found, stage, ranks // groups, whole)


class Layers(nn.Module):
    """Products and tanhs: each tanh keeps its result, each product what it multiplies."""

    width, depth = 64, 4

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(self.layer(), self.layer()) for _ in range(self.depth // 2))

    def layer(self) -> nn.Module:
        return nn.Sequential(nn.Linear(self.width, self.width, bias=False), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def rank0(module: nn.Module, plan: str, rows: int = 256) -> Bytes:
    subject = Subject(module, (torch.zeros(rows, Layers.width),))
    return expect_rank(compile_subject(subject, plan).files, subject, 0)


def test_activations_by_hand() -> None:
    kept = Layers.depth * 256 * Layers.width * 4
    assert rank0(Layers(), "dp=1").activations == pytest.approx(kept, rel=0.01)
    # each rank takes its rows of the input
    half = (kept + 256 * Layers.width * 4) / 2
    assert rank0(Layers(), "dp=2").activations == pytest.approx(half, rel=0.01)
    # gathered weights are not among what is kept
    assert rank0(Layers(), "dp=2,zero=3").activations == pytest.approx(half, rel=0.01)


def test_recomputed_is_not_kept() -> None:
    kept, again = rank0(Layers(), "dp=1"), rank0(Layers(), "dp=1,recompute=blocks.*")
    # the results of all blocks but the last, which nobody needs
    results = Layers.depth // 2 - 1
    assert again.activations == pytest.approx(kept.activations * results / Layers.depth, rel=0.01)


def test_no_memory_is_needed_to_foresee() -> None:
    with torch.device("meta"):
        module = Layers()
    found = rank0(module, "dp=2,zero=3")
    part = Layers.depth * Layers.width**2 * 4 // 2
    assert (found.parameters, found.gradients) == (part, part)
    assert found.optimizer == pytest.approx(2 * part, rel=0.01)


def test_alike_ranks() -> None:
    subject = Subject(Layers(), (torch.zeros(10, Layers.width),))
    assert alike_ranks(compile_subject(subject, "dp=2,zero=3")) == [(0, 1)]
    # 10 rows over 4: two ranks have three of them
    assert alike_ranks(compile_subject(subject, "dp=4")) == [(0, 1), (2, 3)]
    pieces = compile_subject(subject, "dp=2,pp=2,microbatches=5")
    assert alike_ranks(pieces) == [(0, 1), (2, 3)]


def test_optimizer_is_the_users() -> None:
    module = Layers()
    whole = sum(parameter.nbytes for parameter in module.parameters())
    for make, factor in (
        (lambda given: torch.optim.SGD(given, lr=0.1), 0),
        (lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9), 1),
        (lambda given: torch.optim.AdamW(given, lr=0.1, fused=True), 2),
    ):
        subject = Subject(module, (torch.zeros(8, Layers.width),), optimizer=make)
        found = expect_rank(compile_subject(subject, "dp=1").files, subject, 0)
        assert found.optimizer == pytest.approx(factor * whole, abs=64), factor


def test_limit_is_refused_with_the_breakdown() -> None:
    subject = Subject(Layers(), (torch.zeros(256, Layers.width),))
    compiled = compile_subject(subject, "dp=2")
    peak = max(one.bytes.peak for one in expect_memory(compiled.files, subject))
    check_limit(compiled.files, subject, peak)
    with pytest.raises(RunError) as raised:
        check_limit(compiled.files, subject, peak - 1)
    for word in ("parameters 64 KiB", "optimizer state 128 KiB", "saved activations", "zero=3"):
        assert word in str(raised.value), (word, str(raised.value))


def test_parallelize_has_a_limit() -> None:
    example = torch.zeros(8, Layers.width)
    weft.parallelize(Layers(), (example,), plan="dp=2", emulate=True, cache=None, memory_limit="1GiB")
    with pytest.raises(RunError, match="16 KiB are allowed"):
        weft.parallelize(Layers(), (example,), plan="dp=2", emulate=True, cache=None, memory_limit="16KiB")
    with pytest.raises(RunError, match="no amount of memory"):
        weft.parallelize(Layers(), (example,), plan="dp=2", emulate=True, cache=None, memory_limit="lots")


def test_train_has_a_limit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ["train", str(GPT), "--plan", "dp=2", "--memory-limit", "100KiB", "--cache", str(tmp_path), "--json"]
    assert main(options) == 2
    assert "100 KiB are allowed" in json.loads(capsys.readouterr().out.splitlines()[-1])["error"]


WIDE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4096, 4096, bias=False) for _ in range(12))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def model():
    return Net()


def example():
    return torch.zeros(4, 4096)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory cannot be reset here")
def test_a_limit_is_checked_before_a_weight_is_made(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "wide.py"
    path.write_text(WIDE)
    options = ["train", str(path), "--plan", "dp=2", "--memory-limit", "1GiB", "--cache", str(tmp_path / "cache")]
    most_memory()
    before = most_memory()
    assert main(options) == 2
    assert "1 GiB are allowed: optimizer state 1.5 GiB, parameters 768 MiB" in capsys.readouterr().err
    assert most_memory() - before < 256 << 20, "the weights are 768 MiB"


def most_memory() -> int:
    """The most that this process has held since the last call."""
    (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")
    return int(line.split()[1]) * 1024


def test_show_memory(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["show", str(GPT), "--plan", "dp=2,zero=3", "--memory", "--json"]
    assert main(options) == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["memory"]
    assert row["ranks"] == [0, 1] and row["measured"] is None
    assert main([*options, "--measure"]) == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["memory"]
    assert row["ranks"] == [0, 1]
    assert row["expected"]["parameters"] == row["measured"]["parameters"] > 0
