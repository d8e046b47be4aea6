"""Shards of a Hugging Face folder: can a model start from their tensors as they lie there?

In: a folder, and a module of its configuration, hollow or not. Out: True if the safetensors files have every tensor of
the state dict under its own name (or that of one it is tied to), in its shape and dtype, and no other. Then each rank
may read its own ranges; otherwise transformers must load the model: it renames and converts. Only headers are read.
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from weft.compile.weight_files import INDEX, SAFETENSORS, open_files
from weft.errors import RunError


def has_all_of(folder: Path, module: nn.Module) -> bool:
    """True if the files of the folder are the module's state dict, tensor by tensor."""
    if len(list(folder.glob(f"*{SAFETENSORS}"))) > 1 and not any(folder.glob(f"*{SAFETENSORS}{INDEX}")):
        return False
    try:
        found = open_files(folder)
    except RunError:
        # what is wrong with them is for transformers to say
        return False
    # the same tensor under several names is the same object
    state = module.state_dict(keep_vars=True)
    there = {id(tensor) for name, tensor in state.items() if name in found}
    return (
        found.keys() <= state.keys()
        and all(id(tensor) in there for tensor in state.values())
        and all(
            (tuple(one.shape), one.dtype) == (tuple(state[name].shape), state[name].dtype)
            for name, one in found.items()
        )
    )
