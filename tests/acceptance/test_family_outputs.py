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
SUMS_IN_FLOAT32 = tuple(f"{name}ForCausalLM" for name in ("Olmo2", "Glm4", "Exaone4", "BitNet", "Youtu"))
"""Their norms, which are in float32, are cut by tp: the order of a sum in float32 differs."""
NOT_CUT = {"FNetForMaskedLM": "dp=2"}
REFUSED = "RwkvForCausalLM"
"""It changes its weights in the first forward of evaluation."""
CASES = [
    pytest.param(name, NOT_CUT.get(name, PLANS[at % 3]), marks=() if name in ALWAYS else pytest.mark.full)
    for at, name in enumerate(FAMILIES)
    if name != REFUSED
]


def same(ours: Any, theirs: Any, *, exact: bool, near: float) -> None:
    """What is no tensor and no tuple of tensors (a cache) is not returned."""
    assert type(ours) is type(theirs)
    assert [key for key in theirs if ours.get(key) is not None] == list(ours.keys())
    for key in (key for key, value in theirs.items() if isinstance(value, Tensor | tuple)):
        for mine, other in zip(*(pytree.tree_leaves(one[key]) for one in (ours, theirs)), strict=True):
            limit = 1e-9 if exact and other.dtype == torch.float64 else near
            torch.testing.assert_close(mine, other, rtol=limit, atol=limit, msg=partial("{}: {}".format, key))


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
        # transformers computes most losses, and so the first gradient, in float32
        exact = name not in SUMS_IN_FLOAT32 and (step == 0 or theirs.loss.dtype == torch.float64)
        same(ours, theirs, exact=exact, near=1e-4 if name in (*SINGLE, *SUMS_IN_FLOAT32) else 1e-5)
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
