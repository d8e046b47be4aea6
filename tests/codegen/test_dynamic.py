"""One program for all sizes of marked dims: equal to one device at sizes that nobody compiled it for."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import weft
from weft.codegen.sizes.affine import Expression, fit, fit_quotient
from weft.codegen.sizes.logical import logical_lines
from weft.compile import Compiled, compile_program
from weft.compile.model_file import Subject
from weft.errors import CaptureError, PlanError, WeftError
from weft.ir.graph import Graph
from weft.plan.plan import Plan
from weft.runtime.jobs.launch import Pool
from weft.runtime.program.batch import BatchMismatch, Form
from weft.runtime.program.files import files_of
from weft.runtime.program.sizes import evaluate
from weft.verify import verify
from weft.verify.compare import compare
from weft.verify.generated import run_generated
from weft.verify.reference import run_reference

GOLDEN = Path(__file__).parent / "golden"


class Small(nn.Module):
    """One block with fused attention, dropout inside of it and after it, and a bounded table if asked for."""

    def __init__(self, limit: int | None = None) -> None:
        super().__init__()
        self.tokens = nn.Embedding(24, 16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Dropout(0.1))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 24, bias=False)
        self.limit = limit
        if limit is not None:
            self.register_buffer("mask", torch.ones(limit, limit).tril().bool())

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(idx)
        B, T, C = x.shape
        q, k, v = (part.view(B, T, 4, 4).transpose(1, 2) for part in self.qkv(self.norm(x)).split(C, dim=2))
        mask = None if self.limit is None else self.mask[:T, :T]
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=0.1 * self.training, is_causal=mask is None)
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(B, T, C)), 0.1, self.training)
        x = x + self.mlp(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def small(limit: int | None = None) -> nn.Module:
    torch.manual_seed(0)
    return Small(limit)


def batch(size: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(24, (size, length + 1), generator=torch.Generator().manual_seed(size * length))
    return tokens[:, :-1].clone(), tokens[:, 1:].clone()


def marked(size: int, length: int, *dims: int) -> tuple[torch.Tensor, ...]:
    return tuple(weft.dynamic(one, *(dims or (0, 1))) for one in batch(size, length))


@cache
def compiled(plan: str, size: int = 4, length: int = 6) -> Compiled:
    return compile_program(small(), marked(size, length), plan)


def apart(found: Compiled, model: nn.Module, example: Any, pool: Any = None) -> float:
    """How far the program lies from one device on a batch."""
    subject = Subject(model, example)
    reference = run_reference(subject, seed=3, wide=True)
    ours = run_generated(found.files, found.graph, subject, seed=3, wide=True, reference=reference, pool=pool)
    assert not ours.disagreements
    return max(found.value for found in compare(ours, reference))


def form_of(found: Compiled) -> Form:
    return Form.from_json(files_of(found.files).about["batch"])


PLANS = [
    ("tp=2", 4, ((3, 9), (2, 17), (7, 5))),
    ("dp=2", 4, ((4, 6), (6, 9), (2, 17), (8, 5))),
    ("tp=2,megatron,sp", 4, ((3, 8),)),
    ("dp=2,coshard=2", 4, ((6, 9),)),
    ("dp=3", 7, ((7, 6), (10, 5))),
]


@pytest.mark.parametrize(
    ("plan", "size", "others"),
    [pytest.param(*one, id=one[0], marks=pytest.mark.full if one[0] == "dp=3" else ()) for one in PLANS],
)
def test_one_program_is_equal_to_one_device_at_other_sizes(
    plan: str, size: int, others: tuple[tuple[int, int], ...]
) -> None:
    found = compiled(plan, size)
    for other in others:
        assert apart(found, small(), batch(*other)) < 1e-12, other


def test_on_processes() -> None:
    with Pool(2, preload=("weft.verify.generated",)) as pool:
        assert apart(compiled("dp=2"), small(), batch(6, 9), pool) < 1e-12


class Triangle(nn.Module):
    """A triangle, of which each rank's diagonal begins elsewhere: the first rank's does not depend on the sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.up, self.down = nn.Embedding(11, 6), nn.Linear(6, 9), nn.Linear(9, 11)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        h = self.up(self.tokens(idx))
        length = idx.shape[1]
        mixed = torch.ones(length, length).tril().to(h) @ h
        return (
            F.cross_entropy(self.down(h).flatten(0, 1), targets.flatten())
            + mixed.std()
            + h.reshape(h.shape[0], -1).softmax(0)[0, 0]
        )


def test_a_table_that_only_one_rank_needs_sizes_for() -> None:
    torch.manual_seed(0)
    example = tuple(weft.dynamic(one % 11, 0, 1) for one in batch(7, 5))
    found, model = compile_program(Triangle(), example, "tp=2"), Triangle()
    assert '"values": [0, {"size": "(length + 1) // 2"}]' in found.files["parts.json"].decode()
    for other in ((7, 5), (3, 9)):
        assert apart(found, model, tuple(one % 11 for one in batch(*other))) < 1e-12, other


def test_the_text_speaks_of_sizes() -> None:
    text = compiled("dp=2").files["program.py"].decode()
    assert "batch, length = idx.shape" in text
    assert ".reshape(batch // 2, length, 4, 4)  # (batch // 2, length, 4, 4)" in text
    assert "self.draw(0, (batch, 4, length, length)" in text
    # what is cut unevenly stands in a table of expressions
    uneven = compiled("dp=3", 7).files
    assert 'self.sized("size_dp", batch, length)' in uneven["program.py"].decode()
    assert '{"size": "(batch + 2) // 3"}' in uneven["parts.json"].decode()


def test_sizes_that_the_plan_cannot_cut_are_refused() -> None:
    form = form_of(compiled("dp=2"))
    form.bind(batch(6, 3), {})
    with pytest.raises(BatchMismatch, match=r"idx of the batch has 5 in dim 0 \(batch\).*a multiple of 2"):
        form.bind(batch(5, 3), {})
    with pytest.raises(BatchMismatch, match=r"targets of the batch is \[6, 4\].*\[batch, length\].*length is 3"):
        form.bind((batch(6, 3)[0], batch(6, 4)[1]), {})
    with pytest.raises(BatchMismatch, match="sizes from 2 on"):
        form.bind(batch(6, 1), {})
    uneven = form_of(compiled("dp=3", 7))
    with pytest.raises(BatchMismatch, match="1 more than a multiple of 3"):
        uneven.bind(batch(6, 3), {})


def test_unmarked_dims_are_fixed() -> None:
    found = compile_program(small(), marked(4, 6, 1), "dp=2")
    form = form_of(found)
    form.bind(batch(4, 9), {})
    with pytest.raises(BatchMismatch, match=r"idx of the batch is \[6, 9\].*weft\.dynamic"):
        form.bind(batch(6, 9), {})
    assert apart(found, small(), batch(4, 9)) < 1e-12


def test_marks_of_torch_count() -> None:
    example = batch(4, 6)
    for one in example:
        torch._dynamo.mark_dynamic(one, 1)
    assert form_of(compile_program(small(), example, "tp=2")).sizes[0].name == "length"


def test_a_table_of_the_model_bounds_the_length() -> None:
    found = compile_program(small(16), marked(4, 6), "dp=2")
    form = form_of(found)
    form.bind(batch(4, 16), {})
    with pytest.raises(BatchMismatch, match="length <= 16"):
        form.bind(batch(4, 17), {})
    assert apart(found, small(16), batch(2, 11)) < 1e-12


class Branching(Small):
    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = super().forward(idx, targets)
        if idx.shape[0] * idx.shape[1] > 20:
            loss = loss * 2
        return loss


def test_a_decision_of_forward_holds_or_the_batch_is_refused() -> None:
    torch.manual_seed(0)
    found = compile_program(Branching(), marked(4, 6), "dp=2")
    form = form_of(found)
    form.bind(batch(4, 8), {})
    with pytest.raises(BatchMismatch, match=r"batch\*length > 20 \(at .*idx\.shape\[0\] \* idx\.shape\[1\] > 20"):
        form.bind(batch(4, 4), {})


class Fixed(Small):
    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if idx.shape[1] == 6:
            return super().forward(idx, targets)
        return super().forward(idx, targets) * 2


class Added(Small):
    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return super().forward(idx + targets * 0, targets)


def test_a_dim_that_cannot_vary_is_refused_with_the_line() -> None:
    with pytest.raises(CaptureError, match="cannot vary") as caught:
        compile_program(Fixed(), marked(4, 6), "dp=2")
    assert "dim 1 of idx" in caught.value.message and "if idx.shape[1] == 6" in caught.value.place
    assert "weft.dynamic" in caught.value.remedy
    with pytest.raises(CaptureError, match=r"dim 1 of idx .* fixes it to 6"):
        idx, targets = marked(4, 6, 0)
        compile_program(Added(), (weft.dynamic(idx, 1), targets), "dp=2")


def test_a_plan_that_changes_with_the_size_is_refused() -> None:
    def plan(graph: Graph) -> Plan:
        size = graph.tensors["idx"].sizes[0]
        return Plan(graph, 2).trans("**", weft.copy(2, axis=f"axis_of_{size}"))

    with pytest.raises(PlanError, match=r"different at other sizes of dim 0 of idx") as caught:
        compile_program(small(), marked(4, 6, 0), plan)
    assert "unmarked" in caught.value.remedy


def test_marks_are_checked() -> None:
    with pytest.raises(WeftError, match="no dim 2"):
        weft.dynamic(torch.zeros(3, 3), 2)
    with pytest.raises(WeftError, match="no dim is given"):
        weft.dynamic(torch.zeros(3, 3))
    assert weft.dynamic(weft.dynamic(torch.zeros(3, 3), 0), -1)._weft_dynamic == {0, 1}


def test_verify_tells_of_other_sizes() -> None:
    result = verify(small(), marked(4, 6), plan="dp=2")
    assert result.equal and len(result.sizes) == 2
    assert all(one.equal and one.sizes != {"batch": 4, "length": 6} for one in result.sizes)
    assert "at batch" in str(result) and len(result.as_json()["sizes"]) == 2


def test_parallelize_trains_on_batches_of_all_sizes(tmp_path: Path) -> None:
    model = small().double().eval()
    parallel = weft.parallelize(model, marked(4, 6), "dp=2,recompute=mlp", emulate=True, cache=tmp_path)
    sizes = [(4, 6), (6, 9), (2, 5), (4, 6)]
    # two forwards before their backwards: what runs again does so at its own sizes
    (parallel(*batch(*sizes[0])) + parallel(*batch(*sizes[1]))).backward()
    (model(*batch(*sizes[0])) + model(*batch(*sizes[1]))).backward()
    whole = dict(model.named_parameters())
    for name, parameter in parallel.ranks[0].named_parameters():
        torch.testing.assert_close(parameter.grad, whole[name].grad)
    for size in sizes:
        torch.testing.assert_close(parallel(*batch(*size)), model(*batch(*size)))


def test_without_marks_nothing_changes() -> None:
    plain = compile_program(small(), batch(4, 6), "dp=2")
    assert "batch" not in plain.files["program.py"].decode()
    assert ".reshape(2, 6, 4, 4)  # (2, 6, 4, 4)" in plain.files["program.py"].decode()


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*/program.py")), ids=lambda path: path.parent.name)
def test_statements_are_broken_again_as_the_emitter_breaks_them(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    lines = logical_lines(text)
    assert "".join(f"{row}\n" for line in lines for row in line.rows) == text
    body = [line for line in lines if line.indent >= 2 and line.code and not line.code.endswith(":")]
    body += [line for line in lines if line.code.startswith("def ")]
    assert [line.laid_out() for line in body] == [list(line.rows) for line in body]


SAMPLES = [{"b": 4, "t": 6}, {"b": 6, "t": 15}, {"b": 10, "t": 9}, {"b": 8, "t": 30}]


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (lambda b, t: 7, "7"),
        (lambda b, t: b // 2, "b // 2"),
        (lambda b, t: b * t, "b * t"),
        (lambda b, t: b // 2 * t, "b // 2 * t"),
        (lambda b, t: t + 1, "t + 1"),
        (lambda b, t: (b + 2) // 2, "(b + 2) // 2"),
        (lambda b, t: b + t, "b + t"),
        (lambda b, t: 2 * t * t - 1, "2 * t * t - 1"),
    ],
)
def test_rules_are_found(rule: Any, text: str) -> None:
    found = fit([rule(**sample) for sample in SAMPLES], SAMPLES, 4)
    assert found is not None and found.text({"b": 2}) == text
    assert all(evaluate(text, sample) == rule(**sample) for sample in SAMPLES)


def test_no_rule_is_made_up() -> None:
    assert fit([min(sample["t"], 9) for sample in SAMPLES], SAMPLES, 4) is None
    assert fit([3, 5, 6, 9], SAMPLES, 4) is None
    assert fit([sample["t"] // 2 for sample in SAMPLES], SAMPLES, 4) is None
    assert fit_quotient([1 / (sample["b"] * sample["t"]) for sample in SAMPLES], SAMPLES) == "1 / (b * t)"
    assert fit_quotient([0.1, 0.2, 0.3, 0.5], SAMPLES) is None


def test_expressions() -> None:
    assert Expression(((1, ("b",)),), 2).text({}) == "b // 2"
    assert evaluate("min(a, 3) * (b % 2 == 1) + -1", {"a": 5, "b": 3}) == 2
    with pytest.raises(ValueError, match="no expression"):
        evaluate("__import__('os')", {"a": 1})
