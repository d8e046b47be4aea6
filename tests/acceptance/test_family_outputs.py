"""What a parallel module of a transformers model returns, in `train()` and `eval()`, before and after an update: all
that the model itself returns, in the same type."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import weft
from tests.acceptance.families import FAMILIES, family

ALWAYS = ("Phi3ForCausalLM", "MarianMTModel")
PLANS = ("dp=2", "tp=2", "dp=2,zero=3")
SINGLE = ("XGLMForCausalLM",)
"""They fail in float64 by themselves."""
NOT_CUT = {"FNetForMaskedLM": "dp=2"}
REFUSED = "RwkvForCausalLM"
"""It changes its weights in the first forward of evaluation."""
CASES = [
    pytest.param(name, NOT_CUT.get(name, PLANS[at % 3]), marks=() if name in ALWAYS else pytest.mark.full)
    for at, name in enumerate(FAMILIES)
    if name != REFUSED
]


def same(ours: Any, theirs: Any, *, updated: bool) -> None:
    """What is no tensor and no tuple of tensors (a cache) is not returned."""
    # transformers computes most norms and losses, and so the first gradient, in float32
    near = 1e-5 if theirs.logits.dtype == torch.float64 and not updated else 1e-4
    assert type(ours) is type(theirs)
    assert [key for key in theirs if ours.get(key) is not None] == list(ours.keys())
    for key in (key for key, value in theirs.items() if isinstance(value, Tensor | tuple)):
        for mine, other in zip(*(pytree.tree_leaves(one[key]) for one in (ours, theirs)), strict=True):
            torch.testing.assert_close(mine, other, rtol=near, atol=near, msg=partial("{}: {}".format, key))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "plan"), CASES)
def test_outputs(name: str, plan: str) -> None:
    subject = family(name, dropout=False)
    dtype = torch.float32 if name in SINGLE else torch.float64
    eager = subject.model.to(dtype)
    batch = {key: one.to(dtype) if one.is_floating_point() else one for key, one in subject.example.items()}
    parallel: Any = weft.parallelize(copy.deepcopy(eager), batch, plan, cache=None, emulate=True)
    modules = (eager, parallel)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in modules]
    for step, mode in enumerate((True, False, True, False)):
        for module in modules:
            module.train(mode)
        with torch.set_grad_enabled(mode):
            theirs, ours = (module(**batch) for module in modules)
        same(ours, theirs, updated=step > 0)
        if mode:
            for found, optimizer in zip((theirs, ours), optimizers, strict=True):
                optimizer.zero_grad()
                found.loss.backward()
                optimizer.step()


@pytest.mark.full
def test_weights_that_change_in_evaluation_are_refused() -> None:
    subject = family(REFUSED, dropout=False)
    parallel = weft.parallelize(subject.model, subject.example, "dp=2", cache=None, emulate=True)
    with pytest.raises(weft.WeftError, match="is changed in place"):
        parallel.eval()
