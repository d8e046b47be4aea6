"""Shards of a Hugging Face folder: can a model start from their tensors as they lie there?

In: a folder, and a module of its configuration, hollow or not. Out: True if the safetensors files have every tensor of
the state dict under its own name (or that of one it is tied to), in its shape and dtype, and no other. Then each rank
may read its own ranges; otherwise transformers must load the model: it renames and converts. Only headers are read.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES |= {"I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool}


def has_all_of(folder: Path, module: nn.Module) -> bool:
    """True if the files of the folder are the module's state dict, tensor by tensor."""
    files = sorted(folder.glob("*.safetensors"))
    if not files or (len(files) > 1 and not any(folder.glob("*.safetensors.index.json"))):
        return False
    found: dict[str, Any] = {}
    for file in files:
        header = _header(file)
        if header is None:
            return False
        found.update(header)
    # the same tensor under several names is the same object
    state = module.state_dict(keep_vars=True)
    there = {id(tensor) for name, tensor in state.items() if name in found}
    return (
        found.keys() <= state.keys()
        and all(id(tensor) in there for tensor in state.values())
        and all(_is_like(found[name], state[name]) for name in found)
    )


def _is_like(entry: Mapping[str, Any], tensor: torch.Tensor) -> bool:
    return tuple(entry["shape"]) == tuple(tensor.shape) and DTYPES.get(entry["dtype"]) == tensor.dtype


def _header(path: Path) -> dict[str, Any] | None:
    """What a safetensors file says that it holds; None if it is none."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            found = json.loads(file.read(min(length, path.stat().st_size)))
    except (struct.error, ValueError):
        return None
    if not isinstance(found, dict):
        return None
    found.pop("__metadata__", None)
    return found
