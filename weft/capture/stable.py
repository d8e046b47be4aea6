"""Functions that a trace cannot hold, in a form that it can.

Enters: a call that forward makes. Leaves: None where it may run as it stands, else the call that takes its place.
Promised: where the two would differ, the new one raises, here or in the run.

`x.data` is a tensor that export knows nothing of, and so a constant: `x.detach()` has the same values and memory. To
set it is to change x unseen, which is refused.

`torch.bincount(x, minlength=n)` is longer than n only if some value is n or more. Whoever gives a length wants that
length: counts are added into n places, and a value beyond them raises. Without a length the call is refused.

Recurrent layers with dropout between them are called one by one (`recurrent.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weft.capture.recurrent import by_layers, drops_between
from weft.capture.source import place_here
from weft.errors import CaptureError

GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def stable_form(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], Any] | None:
    """What to call instead of `func(*args, **kwargs)`; None for itself."""
    if func in (torch.bincount, torch.Tensor.bincount):
        return lambda: _bincount(*args, **kwargs)
    if drops_between(func, args, kwargs):
        return lambda: by_layers(func, args)
    if func == GET_DATA:
        return args[0].detach  # type: ignore[no-any-return]
    if func == SET_DATA:
        raise CaptureError(
            "forward sets the .data of a tensor, which a graph does not see",
            place=place_here(),
            remedy="compute a new tensor, or copy_() into a buffer",
        )
    if func is nn.functional.one_hot and _classes(*args, **kwargs) < 0:
        raise _unknown("one_hot", "the number of classes", "give num_classes=...")
    return None


def _bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    if minlength <= 0:
        raise _unknown("bincount", "how many counts there are", "give minlength=..., one more than the largest value")
    if weights is None:
        weights = torch.ones_like(input, dtype=torch.int64)
    elif weights.dtype != torch.float32:
        weights = weights.double()
    places = torch.zeros(minlength, dtype=weights.dtype, device=input.device)
    # counts have no gradient
    return places.scatter_add(0, input.long(), weights.detach())


def _classes(tensor: Tensor, num_classes: int = -1) -> int:
    return num_classes


def _unknown(name: str, what: str, remedy: str) -> CaptureError:
    return CaptureError(
        f"{name} takes {what} from the values in a tensor, and shapes must be known before the run",
        place=place_here(),
        remedy=remedy,
    )
