"""What depends on a model's own dtype while it runs in float64 (`weft/ops/precision.py`): limits, and constants.

In: the module's own dtype. Out: a context in which `torch.finfo` and `torch.tensor` answer for that dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def precision_of(dtype: torch.dtype) -> Iterator[None]:
    """Let `torch.finfo(torch.float64)` answer as for `dtype`, and `torch.tensor(0.1, dtype=torch.float64)` round as it.

    A model that asks for the limits of its own dtype (`torch.finfo(x.dtype).eps`), or writes a number in it
    (`torch.tensor(0.1, dtype=x.dtype)`), must see the same numbers when it runs in float64 as when it was captured. For
    the reference run only: it is alone in the process then.
    """
    original, made = torch.finfo, torch.tensor

    def finfo(asked: torch.dtype | None = None) -> torch.finfo:
        asked = torch.get_default_dtype() if asked is None else asked
        return original(dtype if asked == torch.float64 else asked)

    def tensor(data: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("dtype") == torch.float64 and not isinstance(data, Tensor):
            kwargs["dtype"] = dtype
        return made(data, **kwargs)

    torch.finfo = finfo  # type: ignore[misc, assignment]
    torch.tensor = tensor  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.finfo = original  # type: ignore[misc]
        torch.tensor = made
