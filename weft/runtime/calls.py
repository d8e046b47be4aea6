"""From the name of a call to the function that runs it.

In: `LIBRARY.OPERATOR.OVERLOAD` of torch (`aten`, or a user's own library), or `weft.NAME` of this runtime. Out: a
callable. Which names of this runtime exist is written down here and nowhere else; an unknown one raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from weft.runtime import (
    attention,
    distances,
    embedding,
    experts,
    losses,
    norms,
    pointwise,
    random,
    reductions,
    sampling,
)

FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "alpha_dropout": random.alpha_dropout,
        "aminmax": reductions.aminmax,
        "attention": attention.attention,
        "batch_norm": norms.batch_norm,
        "bernoulli": random.bernoulli,
        "cauchy": sampling.cauchy,
        "cosine": distances.cosine,
        "cross_entropy": losses.cross_entropy,
        "ctc_part": losses.ctc_part,
        "distance": distances.distance,
        "dropout": random.dropout,
        "embedding_bag": embedding.embedding_bag,
        "embedding_bag_part": embedding.embedding_bag_part,
        "embedding_part": embedding.embedding_part,
        "entropy": losses.entropy,
        "expect": pointwise.expect,
        "exponential": random.exponential,
        "extreme": reductions.extreme,
        "extreme_and_index": reductions.extreme_and_index,
        "extreme_index": reductions.extreme_index,
        "geometric": sampling.geometric,
        "group_norm": norms.group_norm,
        "grouped_mm": experts.grouped_mm,
        "layer_norm": norms.layer_norm_out,
        "log_normal": sampling.log_normal,
        "logsumexp": reductions.logsumexp,
        "loss_part": losses.loss_part,
        "masked_scatter": pointwise.masked_scatter,
        "mean_part": reductions.mean_part,
        "multinomial": sampling.multinomial,
        "nanmean_part": reductions.nanmean_part,
        "native_dropout": random.native_dropout,
        "native_layer_norm": norms.layer_norm,
        "native_rms_norm": norms.rms_norm,
        "poisson": sampling.poisson,
        "prod": reductions.prod,
        "rand": random.rand,
        "randint": random.randint,
        "randn": random.randn,
        "randperm": random.randperm,
        "rms_norm": norms.rms_norm_out,
        "rrelu": random.rrelu,
        "soft_cross_entropy": losses.soft_cross_entropy,
        "softmax": reductions.softmax,
        "triangle": pointwise.triangle,
        "truth": reductions.truth,
        "vector_norm": distances.vector_norm,
        "variance": reductions.variance,
        "variance_only": reductions.variance_only,
        "weight_norm": norms.weight_norm,
    }
)
"""The functions behind `weft.NAME`."""


def resolve(target: str) -> Callable[..., Any]:
    """The function that a call's target names.

    >>> resolve("aten.relu.default")
    <OpOverload(op='aten.relu', overload='default')>
    """
    room, *names = target.split(".")
    if room == "weft" and len(names) == 1 and names[0] in FUNCTIONS:
        return FUNCTIONS[names[0]]
    if room != "weft" and len(names) == 2 and hasattr(getattr(torch.ops, room), names[0]):
        return getattr(getattr(getattr(torch.ops, room), names[0]), names[1])  # type: ignore[no-any-return]
    raise LookupError(f"no function is called {target!r}")
