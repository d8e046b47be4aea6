"""Shapes of operators that torch knows for fewer arguments than it computes.

Enters: nothing. Leaves: while `known_shapes()` is entered, fake tensors pass through `_grouped_mm` in any float dtype:
its kernels take float32 too, torch's own shape function bfloat16 alone; and through `_ctc_loss` with lengths that are
tensors, for which torch has no shape function at all. Promised: what was registered before is put back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode, fake_impls

GROUPED = torch.ops.aten._grouped_mm.default
CTC = torch.ops.aten._ctc_loss.Tensor


@contextmanager
def known_shapes() -> Iterator[None]:
    """While this is entered, fake tensors know more shapes."""
    held = fake_impls.op_implementations_dict
    added = {one: fake for one, fake in ((GROUPED, fake_grouped_mm), (CTC, fake_ctc_loss)) if one not in held}
    held.update(added)
    try:
        yield
    finally:
        for one in added:
            del held[one]


def fake_ctc_loss(
    mode: FakeTensorMode,
    _operator: torch._ops.OpOverload,
    scores: Tensor,
    targets: Tensor,
    *_rest: object,
    **_named: object,
) -> tuple[Tensor, Tensor]:
    """A loss for each row; and the sums over alignments, whose length only the run knows, for backward alone."""
    with mode:
        rows = list(scores.shape[1:2])
        return scores.new_empty(rows), scores.new_empty([*rows, scores.shape[0], 2 * targets.shape[-1] + 1])


def fake_grouped_mm(
    mode: FakeTensorMode,
    _operator: torch._ops.OpOverload,
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """An empty result: groups divide the rows of `a`, the columns of `b`, or what is contracted."""
    if (offs is None) != (a.ndim == b.ndim == 3):
        raise RuntimeError("offs tells the groups of 2-d matrices, and batches of matrices have none")
    if (a.ndim == 3 or b.ndim == 3) and a.shape[-1] != b.shape[-2]:
        raise RuntimeError(f"matrices of widths {a.shape[-1]} and {b.shape[-2]} cannot be multiplied")
    batch = list(a.shape[:1]) if offs is None else list(offs.shape) if a.ndim == b.ndim == 2 else []
    with mode:
        return a.new_empty([*batch, a.shape[-2], b.shape[-1]], dtype=out_dtype or a.dtype)
