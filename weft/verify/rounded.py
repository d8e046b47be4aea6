"""Rounding judged: training in another precision (`runtime/precision.py`) on devices, against one device.

In: the steps in float64 (the truth), by the definition on one device, and on the devices. Out: how far the two lie from
the truth, by kind, and whether the devices are about as near to it as one device is: for every tensor, their error is
at most SLACK times that of one device, and some roundings. An error is the root mean square of the difference, over
that of the tensor or, if it is larger, of all float tensors of its kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from weft.runtime.weights.precision import Precision
from weft.verify.compare import KINDS, Difference, Rounded, Sample, Tensors, scale_of, wide

SLACK = 2.0
ROUNDINGS = 4
"""Of `compute`: sums in another order, parts of a sum rounded by themselves."""


def judge_rounding(ours: Sample, one: Sample, truth: Sample, precision: Precision) -> Rounded:
    """Are the devices as near to float64 as one device is?"""
    allowed = ROUNDINGS * torch.finfo(precision.compute).eps
    mine, theirs, wrong = [], [], []
    for kind, right, found, plain in zip(KINDS, *(sample.by_kind() for sample in (truth, ours, one)), strict=True):
        if not plain:
            continue
        scale = scale_of(right)
        errors = {
            name: (_error(found, right, name, scale), _error(plain, right, name, scale)) for name in sorted(right)
        }
        mine.append(_largest(kind, {name: error for name, (error, _) in errors.items()}))
        theirs.append(_largest(kind, {name: error for name, (_, error) in errors.items()}))
        # the other way round, so that what is no number is wrong too
        wrong += [f"{kind} {name}" for name, (a, b) in errors.items() if not a <= SLACK * b + allowed]
    wrong += [f"copies of {text}" for text in ours.disagreements]
    return Rounded(str(precision), tuple(mine), tuple(theirs), tuple(wrong))


def _error(found: Tensors, right: Tensors, name: str, scale: float) -> float:
    wanted = wide(right[name])
    mine = wide(found[name]) if name in found else torch.zeros_like(wanted)
    # what is infinite in both, as in a mask, is equal
    difference = torch.where(mine == wanted, 0.0, mine - wanted)
    apart = float(difference.abs().square().mean().sqrt()) if difference.numel() else 0.0
    below = max(scale_of({name: wanted}), scale)
    return apart / below if below else apart


def _largest(kind: str, errors: Mapping[str, float]) -> Difference:
    worst = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]), default="")
    return Difference(kind, errors.get(worst, 0.0), worst)
