"""Random operators cut by their rules draw the same numbers however they are cut, and as the eager model draws them."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributions.dirichlet import _Dirichlet

from tests.ops.cases import Form
from tests.ops.cells import STREAM, prove_cells, whole_case
from weft.runtime.operators.calls import resolve
from weft.verify.draw_mode import DrawMode


def prove_drawn(target: str, form: Form) -> None:
    """Whole by the local call, against the eager operator under DrawMode; then cut in every way."""
    args, kwargs = form
    it = whole_case(target, args, kwargs, draw=form.draw, fixed=form.fixed)
    leaves = [
        value.clone().requires_grad_(value.is_floating_point() and i not in form.fixed)
        for i, value in enumerate(it.values)
    ]
    left = iter(leaves)
    bound: list[Any] = [next(left) if isinstance(arg, torch.Tensor) else arg for arg in args]
    with DrawMode(STREAM) as mode:
        eager = _Dirichlet.apply if "dirichlet" in target else resolve(target)
        results = eager(*bound, **kwargs)
    assert mode.num_draws == 1
    results = results if isinstance(results, tuple) else (results,)
    for result, expected in zip(results, it.results, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-13, atol=1e-13)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if results[0].requires_grad and wanted:
        known = [grad for grad in it.gradients if grad is not None]
        for grad, expected in zip(torch.autograd.grad(results[0], wanted, it.cotangents[0]), known, strict=True):
            torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-12)
    prove_cells(it)
    assert it.rule.cuttable or len(it.results[0].shape) < 2, f"nothing of {target} can be cut"
