"""Training in bfloat16 on processes gives the emulator's bits."""

from __future__ import annotations

import pytest

from tests.acceptance.subjects import gpt, llama
from tests.pieces import compile_pieces
from tests.processes.conftest import Pools
from weft.codegen import generate
from weft.compile.pieces import is_in_pieces
from weft.compile.subject import capture_subject, in_precision, make_plan
from weft.ir.graph import Graph
from weft.lower import lower
from weft.plan.plan import Plan
from weft.runtime.weights.precision import Precision
from weft.verify.generated import run_generated
from weft.verify.processes import compare_with_emulator, one_thread

PLANS = [
    pytest.param("dp=2", None),
    pytest.param("dp=2", "float32"),
    pytest.param("dp=2,zero=1", "float32", marks=pytest.mark.full),
    pytest.param("dp=2,tp=2,zero=2", "float32"),
    pytest.param("dp=2,zero=3", "float32"),
    pytest.param("tp=2", "float32", marks=pytest.mark.full),
    pytest.param("pp=2,microbatches=4", "float32"),
    pytest.param("pp=2,microbatches=4,schedule=zb-h1", "float32", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("plan", "reduce"), PLANS)
@pytest.mark.parametrize("name", ["gpt", pytest.param("llama", marks=pytest.mark.full)])
def test_the_bits_of_the_emulator(name: str, plan: str, reduce: str | None, pools: Pools) -> None:
    subject = in_precision(gpt(tied=True) if name == "gpt" else llama(), Precision(reduce=reduce))  # type: ignore[arg-type]
    graph = capture_subject(subject)

    def make(other: Graph) -> Plan:
        return make_plan(plan, other, subject, None)

    made = make(graph)
    files = compile_pieces(subject, made, make).files() if is_in_pieces(made) else generate(lower(made))
    with one_thread():
        here = run_generated(files, graph, subject, seed=0, wide=False)
        there = run_generated(files, graph, subject, seed=0, wide=False, pool=pools(made.devices))
    assert not here.disagreements and not there.disagreements
    found = compare_with_emulator(there, here, made.devices)
    assert found.equal_bits, found
