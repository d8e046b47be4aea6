"""Text models of transformers that nobody looked at one by one: equal to one device, or refused with a reason."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
import transformers

from tests.acceptance.families import FAMILIES, GROUPED, LENGTH, MASKED, ROWS, VOCABULARY, family
from weft.capture import capture
from weft.codegen import generate
from weft.compile.model_file import Subject
from weft.errors import CaptureError
from weft.ir.graph import Graph
from weft.lower import lower
from weft.lower.check import check
from weft.plan.load import load_plan
from weft.verify.compare import Sample, compare
from weft.verify.generated import run_generated
from weft.verify.reference import run_reference

ALWAYS = ("GPTNeoXForCausalLM", "Phi3ForCausalLM", "AlbertForMaskedLM", "MarianMTModel")
"""A fused query-key-value matrix, a fused gate, shared layers, two sides."""
CASES = [
    pytest.param(name, recipe, marks=() if name in ALWAYS else pytest.mark.full)
    for name, recipe in itertools.product(FAMILIES, ("dp=2", "tp=2"))
]


@cache
def prepared(name: str) -> tuple[Subject, Graph, Sample]:
    subject = family(name)
    return subject, capture(subject.model, subject.example), run_reference(subject, seed=7, wide=True)


@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_family(name: str, recipe: str) -> None:
    subject, graph, reference = prepared(name)
    program = lower(load_plan(recipe, graph))
    check(program)
    ours = run_generated(generate(program), program.graph, subject, seed=7, wide=True, reference=reference)
    assert not ours.disagreements
    worst = max(compare(ours, reference), key=lambda found: found.value)
    assert worst.value < 1e-9, worst


REFUSED = [
    # clips a parameter in forward
    ("Gemma3nForCausalLM", {**GROUPED, "layer_types": ["full_attention"] * 2, "num_kv_shared_layers": 0}, "changed in"),
    # branches on whether any token is attended to by all
    ("LongformerForMaskedLM", {**MASKED, "attention_window": 4}, "depends on the values"),
]


@pytest.mark.full
@pytest.mark.parametrize(("name", "settings", "reason"), REFUSED)
def test_refused(name: str, settings: dict[str, object], reason: str) -> None:
    architecture = getattr(transformers, name)
    model = architecture(architecture.config_class(**settings)).train()
    words = torch.randint(4, VOCABULARY, (ROWS, LENGTH))
    with pytest.raises(CaptureError, match=reason) as caught:
        capture(model, {"input_ids": words, "labels": words})
    assert caught.value.place and caught.value.remedy
