"""RankTensor: what `state_dict()` gives on a rank that does not hold all of the model.

In: tensors of a rank, and how to refuse. Out: the same tensors, in the same memory, of a type that is computed with,
copied and loaded like any other, and that is not written to a file: pickled (`torch.save`), handed to safetensors or to
torch's distributed checkpoints. A framework that saves `model.state_dict()` on rank 0 would write that rank's shards in
place of the model, and nobody would know before the file is needed. Promised: what is computed from one is an ordinary
tensor; a copy of one, on whatever device and in whatever dtype, is one again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from weft.errors import Refuse

PARTS = (
    "state_dict() of this rank is about to be saved, and it has this rank's shards only, not the model",
    "full = parallel.full_state_dict() on every rank, and save that on one; parallel.local_state_dict() is what this "
    "rank holds, for files of which every rank writes its own",
)
COPIES = frozenset(
    {
        Tensor.detach,
        Tensor.clone,
        Tensor.contiguous,
        Tensor.cpu,
        Tensor.cuda,
        Tensor.to,
        Tensor.float,
        Tensor.double,
        Tensor.half,
        Tensor.bfloat16,
        Tensor.pin_memory,
        Tensor.requires_grad_,
        torch.clone,
        torch.detach,
        Tensor.data.__get__,  # type: ignore[attr-defined]
    }
)
"""What gives the same values again."""
WRITERS = ("safetensors",)
"""Packages that write the memory of tensors."""
DEPTH = 6
"""Frames between one of them and a method of a tensor."""


class RankTensor(Tensor):
    """A tensor of one rank's state dict."""

    _refuse: Refuse

    @classmethod
    def of(cls, tensor: Tensor, refuse: Refuse) -> Self:
        """The tensor, in the same memory."""
        found = tensor.as_subclass(cls)
        found._refuse = refuse
        return found

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            given = args[0] if args and isinstance(args[0], RankTensor) else None
            if given is not None and _is_written():
                raise given._refuse(*PARTS)
            found = func(*args, **(kwargs or {}))
            if given is not None and func in COPIES and isinstance(found, Tensor):
                return RankTensor.of(found, given._refuse)
            return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        found: Tensor = self.clone()
        memo[id(self)] = found
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self._refuse(*PARTS)

    def __create_write_items__(self, name: str, value: Any) -> Any:
        """Asked by torch.distributed.checkpoint, which takes an ordinary tensor for the same on every rank."""
        raise self._refuse(*PARTS)


def _is_written() -> bool:
    frame = sys._getframe(2)
    for _ in range(DEPTH):
        if frame.f_globals.get("__name__", "").partition(".")[0] in WRITERS:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
