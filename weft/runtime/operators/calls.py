"""From the name of a call to the function that runs it.

In: `LIBRARY.OPERATOR.OVERLOAD` of torch (`aten`, or a user's own library), or `weft.NAME` of this runtime. Out: a
callable. Which names of this runtime exist is written down here and nowhere else; an unknown one raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any

import torch

from weft.runtime import random, sampling
from weft.runtime.operators import attention, distances, embedding, experts, losses, norms, pointwise, reductions

_LIBRARIES: Mapping[ModuleType, str] = {
    attention: "attention",
    distances: "cosine distance vector_norm",
    embedding: "embedding_bag embedding_bag_part embedding_part",
    experts: "grouped_mm",
    losses: "cross_entropy ctc_part entropy loss_part soft_cross_entropy",
    norms: "batch_norm group_norm layer_norm native_layer_norm native_rms_norm rms_norm weight_norm",
    pointwise: "expect masked_scatter triangle",
    random: "alpha_dropout bernoulli dropout exponential native_dropout rand randint randn randperm rrelu",
    reductions: (
        "aminmax extreme extreme_and_index extreme_index logsumexp mean_part nanmean_part prod softmax truth "
        "variance variance_only"
    ),
    sampling: "cauchy dirichlet gamma geometric log_normal multinomial poisson",
}
"""What programs may call, by the file in which it stands."""

FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {name: getattr(library, name) for library, names in _LIBRARIES.items() for name in names.split()}
)
"""The functions behind `weft.NAME`."""


def resolve(target: str) -> Callable[..., Any]:
    """The function that a call's target names.

    >>> resolve("aten.relu.default")
    <OpOverload(op='aten.relu', overload='default')>
    """
    library, *names = target.split(".")
    if library == "weft" and len(names) == 1 and names[0] in FUNCTIONS:
        return FUNCTIONS[names[0]]
    if library != "weft" and len(names) == 2 and hasattr(getattr(torch.ops, library), names[0]):
        return getattr(getattr(getattr(torch.ops, library), names[0]), names[1])  # type: ignore[no-any-return]
    raise LookupError(f"no function is called {target!r}")
