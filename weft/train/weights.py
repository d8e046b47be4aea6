"""Weights: where a rank's parts come from.

In: a module, a state dict, or files (safetensors, or torch.save's), and a program whose parts are to be filled. Of
safetensors only this rank's ranges are read; other files are mapped, not loaded, and read tensor by tensor. A
tensor that is missing, or has another shape than planned, is an error.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import RunError
from weft.runtime.initialise import Whole, module_tensors, part_of, stored_parts
from weft.runtime.module import ParallelModule, shapes_of
from weft.runtime.script import Index

Files = str | Path | Sequence[str | Path]
Weights = nn.Module | Mapping[str, Tensor] | Files

SAFETENSORS = ".safetensors"
NUM_SAMPLES = 64


@torch.no_grad()
def fill(program: ParallelModule, weights: Weights) -> None:
    """Give every part that a rank holds its values."""
    whole, place = open_weights(weights), _place(weights)
    shapes = shapes_of(program)
    for name, index in program.stored.items():
        held = program.part(name)
        if held is None:
            continue  # the other name of a tied one
        source = next((each for each in shapes[name].names if each in whole), None)
        if source is None:
            raise RunError(f"no values for {name}", place=place, remedy="give weights of this very model")
        if tuple(whole[source].shape) != shapes[name].shape:
            raise RunError(
                f"{source} has shape {list(whole[source].shape)}, planned as {list(shapes[name].shape)}",
                place=place,
                remedy="give weights of this very model",
            )
        held.copy_(part_of(whole[source], index, source))


def open_weights(weights: Weights) -> Mapping[str, Tensor | Whole]:
    """Whole tensors by name, nothing read yet where that can be."""
    if isinstance(weights, nn.Module):
        return module_tensors(weights)
    if isinstance(weights, Mapping):
        return weights
    paths = [Path(weights)] if isinstance(weights, str | Path) else [Path(path) for path in weights]
    found: dict[str, Tensor | Whole] = {}
    for path in paths:
        if not path.is_file():
            raise RunError(f"no file {path}", remedy="give the files that hold the weights")
        found.update(_open_safetensors(path) if path.suffix == SAFETENSORS else _open_saved(path))
    return found


def sample_hash(module: nn.Module) -> str:
    """A hash of some elements of every tensor: modules made under different seeds differ in it."""
    digest = hashlib.sha256()
    for name, tensor in module_tensors(module).items():
        flat = tensor.detach().reshape(-1)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if flat.numel() and not flat.is_meta:
            at = torch.linspace(0, flat.numel() - 1, min(NUM_SAMPLES, flat.numel())).long()
            digest.update(str(flat[at.to(flat.device)].tolist()).encode())
    return digest.hexdigest()


def _open_saved(path: Path) -> Mapping[str, Tensor]:
    found: Any = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise RunError(f"{path} holds no state dict", place=str(path), remedy="save module.state_dict()")
    return found


def _open_safetensors(path: Path) -> Mapping[str, Whole]:
    try:
        room = importlib.import_module("safetensors")
    except ModuleNotFoundError:
        raise RunError(
            f"{path} cannot be read: safetensors is not installed", remedy="pip install safetensors"
        ) from None
    file = room.safe_open(path, framework="pt", device="cpu")
    return {name: _Entry(file, name) for name in file.keys()}  # noqa: SIM118 - a safetensors file is no dict


@dataclass(frozen=True)
class _Entry:
    """A tensor of a safetensors file."""

    file: Any
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.file.get_slice(self.name).get_shape())

    def read(self, index: Index) -> Tensor:
        """The intervals of the first dim are read from the file, one by one; those of other dims are cut from them."""
        view = self.file.get_slice(self.name)
        if not index or not index[0]:
            return stored_parts({"": self.file.get_tensor(self.name)}, {"": index})[""]
        pieces = [
            stored_parts({"": view[start:stop]}, {"": (((0, stop - start),), *index[1:])})[""]
            for start, stop in index[0]
        ]
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def _place(weights: Weights) -> str:
    if isinstance(weights, str | Path):
        return str(weights)
    return type(weights).__name__
