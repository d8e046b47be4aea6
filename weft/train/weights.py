"""Weights: where a rank's parts come from.

In: a module, a state dict, or files (safetensors, or torch.save's); the graph; what a rank
stores. Out: the rank's parts by tensor name of the graph. Of safetensors only this rank's ranges are read; of other
files one tensor after the other is mapped, not loaded. A tensor that is missing, or has another shape, is an error.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import RunError
from weft.ir.graph import Buffer, Graph, Parameter
from weft.runtime.initialise import Whole, module_tensors, stored_parts
from weft.runtime.script import Index

Files = str | Path | Sequence[str | Path]
Weights = nn.Module | Mapping[str, Tensor] | Files

SAFETENSORS = ".safetensors"


def load_parts(weights: Weights, graph: Graph, stored: Mapping[str, Index]) -> dict[str, Tensor]:
    """This rank's parts of parameters, buffers and constants, by tensor name.

    Args:
        weights: what has the values.
        stored: what the rank stores, by tensor name of the graph.
    """
    named = held_tensors(graph)
    wanted = {name: stored[held.tensor] for held in named if held.tensor in stored for name in held.names}
    whole = _open(weights)
    for held in named:
        _check_shapes(held.names, graph.tensors[held.tensor].sizes, whole, _place(weights))
    found = stored_parts(whole, wanted)
    parts = {}
    for held in named:
        if held.tensor not in stored:
            continue
        name = next((name for name in held.names if name in found), None)
        if name is None:
            raise RunError(
                f"no values for {held.names[0]}", place=_place(weights), remedy="give weights of this very model"
            )
        parts[held.tensor] = found[name].to(graph.tensors[held.tensor].dtype)
    return {**parts, **stored_parts(graph.constants, stored)}


def held_tensors(graph: Graph) -> tuple[Parameter | Buffer, ...]:
    """Parameters and buffers of a graph."""
    return (*graph.parameters, *graph.buffers)


def _check_shapes(
    names: Sequence[str], planned: tuple[int, ...], whole: Mapping[str, Tensor | Whole], place: str
) -> None:
    for name in names:
        if name in whole and tuple(whole[name].shape) != planned:
            raise RunError(
                f"{name} has shape {list(whole[name].shape)}, planned as {list(planned)}",
                place=place,
                remedy="give weights of this very model",
            )


def _open(weights: Weights) -> Mapping[str, Tensor | Whole]:
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


def _open_saved(path: Path) -> Mapping[str, Tensor]:
    """A file of torch.save, mapped into memory: what is not used is not read."""
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
        if not index:
            scalar: Tensor = self.file.get_tensor(self.name)
            return scalar.clone()
        pieces = [
            stored_parts({"": view[start:stop]}, {"": (((0, stop - start),), *index[1:])})[""]
            for start, stop in index[0]
        ]
        if not pieces:
            return stored_parts({"": self.file.get_tensor(self.name)}, {"": index})[""]
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def _place(weights: Weights) -> str:
    if isinstance(weights, str | Path):
        return str(weights)
    return type(weights).__name__
