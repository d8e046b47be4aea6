"""Weight files: whole tensors by name, of which parts are read when they are wanted.

In: paths of safetensors files, of an index of them (`*.index.json`), of a folder of either, of a saved run
(`saved_folder.py`), or of files of torch.save.
Out: for each tensor its name, shape, dtype and a way to read a part; nothing is read yet but headers. Of safetensors
only the wanted ranges are read, other files are mapped. Promised: a file that is missing, cut short, not what its name
says, or that disagrees with its index or with another file is a RunError that names it.
"""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.compile.packages import needed
from weft.compile.saved_folder import saved_model
from weft.errors import RunError
from weft.runtime.layout.transfer import Index
from weft.runtime.start.initialise import Whole

Files = str | Path | Sequence[str | Path]

SAFETENSORS, INDEX = ".safetensors", ".index.json"
WHOLE_FILES = "give the files as they were written, all of them"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
"""Dtypes by the names that safetensors gives them."""


def open_files(files: Files) -> Mapping[str, Tensor | Whole]:
    """Whole tensors by name."""
    paths = [Path(files)] if isinstance(files, str | Path) else [Path(path) for path in files]
    found: dict[str, Tensor | Whole] = {}
    where: dict[str, Path] = {}
    for path in paths:
        for file, listed in _files_of(path).items():
            there = _open(file)
            names = list(there) if listed is None else listed
            for name in names:
                if name not in there:
                    raise RunError(
                        f"{file.name} has no {name}, which its index says it has", place=str(file), remedy=WHOLE_FILES
                    )
                if name in where and where[name] != file:
                    raise RunError(
                        f"{name} is in {where[name].name} and in {file.name}",
                        place=str(file),
                        remedy="give the files of one model only",
                    )
                found[name], where[name] = there[name], file
    return found


def _files_of(path: Path) -> dict[Path, list[str] | None]:
    """The files that a path stands for, each with the names that are to be read from it; None: all."""
    if path.is_dir():
        if (model := saved_model(path)) is not None:
            return {model: None}
        indices = sorted(path.glob(f"*{SAFETENSORS}{INDEX}"))
        files = sorted(path.glob(f"*{SAFETENSORS}"))
        if not indices and not files:
            raise RunError(f"no {SAFETENSORS} files in {path}", remedy="give the folder or files that hold the weights")
        return _indexed(indices[0]) if indices else dict.fromkeys(files)
    if not path.is_file():
        raise RunError(f"no file {path}", remedy="give the files that hold the weights")
    return _indexed(path) if path.suffix == ".json" else {path: None}


def _indexed(index: Path) -> dict[Path, list[str] | None]:
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        named = [(str(name), index.parent / str(file)) for name, file in content["weight_map"].items()]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise RunError(
            f"{index.name} is no index of weights: it has no `weight_map` of names to files",
            place=str(index),
            remedy=WHOLE_FILES,
        ) from None
    found: dict[Path, list[str]] = {}
    for name, file in named:
        found.setdefault(file, []).append(name)
    missing = [file.name for file in found if not file.is_file()]
    if missing:
        raise RunError(
            f"{index.name} names {missing[0]}, which is not there"
            + (f", nor are {len(missing) - 1} more" if len(missing) > 1 else ""),
            place=str(index),
            remedy=WHOLE_FILES,
        )
    return dict(found)


def _open(path: Path) -> Mapping[str, Tensor | Whole]:
    return _open_safetensors(path) if path.suffix == SAFETENSORS else _open_saved(path)


def _open_saved(path: Path) -> Mapping[str, Tensor]:
    try:
        found: Any = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        said = (str(error) or type(error).__name__).splitlines()[0]
        raise RunError(
            f"{path} cannot be read as a state dict: {said}",
            place=str(path),
            remedy="torch.save(module.state_dict(), FILE), or safetensors",
        ) from None
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise RunError(f"{path} holds no state dict", place=str(path), remedy="save module.state_dict()")
    return found


def _open_safetensors(path: Path) -> Mapping[str, Whole]:
    package = needed("safetensors", str(path), error=RunError)
    try:
        file = package.safe_open(path, framework="pt", device="cpu")
    except package.SafetensorError as error:
        raise RunError(
            f"{path} is cut short, or no safetensors file: {error}", place=str(path), remedy=WHOLE_FILES
        ) from None
    return {name: Entry(file, name) for name in file.keys()}  # noqa: SIM118 - a safetensors file is no dict


@dataclass(frozen=True)
class Entry:
    """A tensor of a safetensors file."""

    file: Any
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.file.get_slice(self.name).get_shape())

    @property
    def dtype(self) -> torch.dtype | None:
        """None for one that torch does not have."""
        return DTYPES.get(self.file.get_slice(self.name).get_dtype())

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
