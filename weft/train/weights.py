"""Weights: where a rank's parts come from.

In: a module, the record of one, a state dict, files (safetensors, or torch.save's) or a folder of safetensors with or
without an index, and a program whose parts are to be filled. Of safetensors only this rank's ranges are read; other
files are mapped, not loaded, and read tensor by tensor; a record is replayed one whole tensor at a time. Tensors that
are missing, unknown, or of another shape than planned are errors that name them.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import RunError
from weft.runtime.initialise import Whole, module_tensors, part_of
from weft.runtime.module import ParallelModule, shapes_of
from weft.runtime.recording import At, Record
from weft.runtime.replaying import replay
from weft.runtime.script import Index

Files = str | Path | Sequence[str | Path]
Weights = nn.Module | Mapping[str, Tensor] | Files

SAFETENSORS = ".safetensors"
NUM_SAMPLES = 64
NUM_NAMES = 8
"""Names that a message lists."""


@dataclass(frozen=True)
class Replayed:
    """What the function that makes the module would give it, made tensor by tensor."""

    record: Record
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Torch's generator is one for all threads."""


Values = Weights | Replayed


@dataclass(frozen=True)
class _Wanted:
    """One part that a rank holds."""

    held: Tensor
    index: Index
    shape: tuple[int, ...]


@torch.no_grad()
def fill(
    program: ParallelModule, weights: Values, otherwise: Values | None = None, known: Collection[str] = ()
) -> None:
    """Give every part that a rank holds its values.

    Args:
        otherwise: has what state dicts lack: buffers that are not saved.
        known: all names of the original model; others among the weights are refused. Not given: none are.
    """
    shapes, place = shapes_of(program), _place(weights)
    names = _names(weights)
    if known and (extra := [name for name in names if name not in known]):
        raise RunError(f"the model has no {listed(extra)}", place=place, remedy="give weights of this very model")
    first: dict[str, _Wanted] = {}
    second: dict[str, _Wanted] = {}
    missing = []
    for name, index in program.stored.items():
        held, original = program.part(name), shapes[name]
        if held is None:
            continue  # the other name of a tied one
        source = next((each for each in original.names if each in names), None)
        if source is not None:
            first[source] = _Wanted(held, index, original.shape)
        elif otherwise is not None and not original.persistent:
            second[name] = _Wanted(held, index, original.shape)
        else:
            missing.append(name)
    if missing:
        raise RunError(f"no values for {listed(missing)}", place=place, remedy="give weights of this very model")
    _copy(weights, first, place)
    if otherwise is not None:
        _copy(otherwise, second, _place(otherwise))


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    rest = len(names) - NUM_NAMES
    return ", ".join(names[:NUM_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def _names(weights: Values) -> Collection[str]:
    return weights.record.tensors if isinstance(weights, Replayed) else open_weights(weights)


def _copy(weights: Values, wanted: Mapping[str, _Wanted], place: str) -> None:
    if isinstance(weights, Replayed):
        _refuse_shapes(weights.record.tensors, wanted, place)

        def receive(name: str, tensor: Tensor) -> None:
            wanted[name].held.copy_(part_of(tensor, wanted[name].index, name))

        with weights.lock:
            replay(weights.record, wanted, receive)
        return
    whole = open_weights(weights)
    _refuse_shapes(whole, wanted, place)
    for name, one in wanted.items():
        one.held.copy_(part_of(whole[name], one.index, name))


def _refuse_shapes(whole: Mapping[str, Any], wanted: Mapping[str, _Wanted], place: str) -> None:
    found = {name: tuple(one.size if isinstance(one := whole[name], At) else one.shape) for name in wanted}
    wrong = [
        f"{name} has shape {list(found[name])}, planned as {list(one.shape)}"
        for name, one in wanted.items()
        if found[name] != one.shape
    ]
    if wrong:
        raise RunError("; ".join(wrong[:NUM_NAMES]), place=place, remedy="give weights of this very model")


def open_weights(weights: Weights) -> Mapping[str, Tensor | Whole]:
    """Whole tensors by name, nothing read yet where that can be."""
    if isinstance(weights, nn.Module):
        return module_tensors(weights)
    if isinstance(weights, Mapping):
        return weights
    paths = [Path(weights)] if isinstance(weights, str | Path) else [Path(path) for path in weights]
    found: dict[str, Tensor | Whole] = {}
    files = [file for path in paths for file in (_in_folder(path) if path.is_dir() else [path])]
    for path in files:
        if not path.is_file():
            raise RunError(f"no file {path}", remedy="give the files that hold the weights")
        found.update(_open_safetensors(path) if path.suffix == SAFETENSORS else _open_saved(path))
    return found


def _in_folder(folder: Path) -> list[Path]:
    """The safetensors files of a folder: those that its index names, or all."""
    indices = sorted(folder.glob(f"*{SAFETENSORS}.index.json"))
    if indices:
        found = json.loads(indices[0].read_text(encoding="utf-8"))["weight_map"]
        return [folder / name for name in dict.fromkeys(found.values())]
    files = sorted(folder.glob(f"*{SAFETENSORS}"))
    if not files:
        raise RunError(f"no {SAFETENSORS} files in {folder}", remedy="give the folder or files that hold the weights")
    return files


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
        """Each box of intervals is read from the file by itself."""
        view = self.file.get_slice(self.name)
        if not index:
            found: Tensor = self.file.get_tensor(self.name)
            return found
        boxes = [view[tuple(slice(start, stop) for start, stop in box)] for box in itertools.product(*index)]
        return _joined(boxes, tuple(len(intervals) for intervals in index))


def _joined(boxes: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """Boxes in row-major order of their intervals, put together."""
    if not boxes:
        raise RunError("a part without elements cannot be read", remedy="a plan in which every rank holds a part")
    found = list(boxes)
    for dim in range(len(counts) - 1, -1, -1):
        found = [torch.cat(found[i : i + counts[dim]], dim) for i in range(0, len(found), counts[dim])]
    return found[0].contiguous()


def _place(weights: Values) -> str:
    if isinstance(weights, str | Path):
        return str(weights)
    return type(weights).__name__
