"""Data: the batches of one replica, from wherever they come.

    data() of the model file        its batches, dealt out to the replicas in turn, from the start again at its end
    --data FILE.txt                 a text, as pairs of a sequence and the tokens that follow (train/text.py)
    --data FILE.npy|npz|safetensors arrays named like the arguments of the forward: batch n has the n-th rows
    nothing                         example() again and again

In: a Subject and a Choice. Out: a Source. Promised: which batch a step gets is a pure function of the step, the replica
and their number, so that a resumed run sees what an uninterrupted one would; every batch has the example's form.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.capture.example import split_example
from weft.compile.model_file import Subject, inside
from weft.compile.packages import needed
from weft.errors import ModelFileError, RunError
from weft.train.text import Text, read_text

HELD_OUT = 10
"""One part in so many of a file is kept for evaluation, if there is one."""
MAX_EVAL = 20
"""Batches of a file that an evaluation looks at."""
ARRAYS = (".npy", ".npz", ".safetensors")


@dataclass(frozen=True)
class Choice:
    """Which data.

    Args:
        path: of a file; None for `data()` or `example()`.
        evaluate: some of it is for evaluation.
        vocabulary: how many tokens there are, for inputs that are looked up in a table.
        seed: of the places of a text.
    """

    path: str | None = None
    evaluate: bool = False
    vocabulary: Mapping[str, int] = field(default_factory=dict)
    seed: int = 0


def make_source(subject: Subject, choice: Choice) -> Source:
    """The source of a run."""
    if choice.path is None:
        if choice.evaluate and subject.eval_data is None:
            raise RunError(
                "there is nothing to evaluate on",
                place=subject.place,
                remedy="define eval_data() in the model file, or give --data FILE, whose end is kept for it",
            )
        return Own(subject)
    path = check_file(choice.path)
    inputs = named_inputs(subject)
    rows = _rows(inputs, path)
    found: Arrays | Text
    if path.suffix in ARRAYS:
        found = _check(_read_arrays(path, inputs), inputs, choice, path)
    else:
        found = read_text(path, inputs, choice.vocabulary, choice.seed)
    return Numbered(found, subject, rows, evaluate=choice.evaluate, path=path)


def check_file(path: str | Path) -> Path:
    """Refuse a file that is not there."""
    if not Path(path).is_file():
        raise RunError(f"no data file {str(path)!r}", remedy="give a text, or arrays: .npy, .npz, .safetensors")
    return Path(path)


def named_inputs(subject: Subject) -> dict[str, Tensor]:
    """The example's tensors by the names of the forward's arguments."""
    args, kwargs = split_example(subject.example)
    found = {**dict(zip(inspect.signature(subject.model.forward).parameters, args, strict=False)), **kwargs}
    odd = [name for name, value in found.items() if not isinstance(value, Tensor)]
    if odd:
        raise RunError(f"{odd[0]} of the example is no tensor: a file cannot give it", remedy="define data()")
    return found


def _rows(inputs: Mapping[str, Tensor], path: Path) -> int:
    sizes = {value.shape[0] if value.dim() else 0 for value in inputs.values()}
    if len(sizes) != 1 or 0 in sizes:
        raise RunError("the inputs have different numbers of rows", place=str(path), remedy="define data() instead")
    return sizes.pop()


@dataclass(frozen=True)
class Own:
    """`data()` and `eval_data()` of the model file, or its example.

    Args:
        alphabet: what the tokens stand for, if that depends on a file.
    """

    subject: Subject
    alphabet: str = ""

    def batches(self, replica: int, num_replicas: int, start: int = 0) -> Iterator[Any]:
        """The batches of one replica without end, from step `start` on."""
        taken = 0
        while self.subject.data is not None:
            for batch in self._dealt(self.subject.data, "data()", replica, num_replicas):
                taken += 1
                if taken > start:
                    yield batch
        while True:
            yield self.subject.example

    def eval_batches(self, replica: int, num_replicas: int) -> Iterator[Any]:
        """The batches of one evaluation; every replica gets as many."""
        assert self.subject.eval_data is not None, "there is nothing to evaluate on"
        return self._dealt(self.subject.eval_data, "eval_data()", replica, num_replicas)

    def _dealt(self, make: Callable[[], Any], what: str, replica: int, num_replicas: int) -> Iterator[Any]:
        """Whole rounds only: in an incomplete one some replicas would wait for the others."""
        number, mine = -1, None
        with inside(self.subject.path, what):
            for number, batch in enumerate(make()):
                mine = batch if number % num_replicas == replica else mine
                if number % num_replicas == num_replicas - 1:
                    yield mine
        if number + 1 < num_replicas:
            raise ModelFileError(
                f"{what} gave {number + 1} batches for {num_replicas} replicas",
                place=self.subject.place,
                remedy="give at least one for each",
            )


@dataclass(frozen=True)
class Arrays:
    """Arrays of a file: batch n has the n-th rows, from the start again when they run out."""

    arrays: Mapping[str, Tensor]
    alphabet: str = ""

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def part(self, start: int, stop: int) -> Arrays:
        return Arrays({name: array[start:stop] for name, array in self.arrays.items()})

    def batch(self, number: int, rows: int) -> dict[str, Tensor]:
        return self.in_order(number % (len(self) // rows), rows)

    def in_order(self, number: int, rows: int) -> dict[str, Tensor]:
        return {name: array[number * rows : (number + 1) * rows].clone() for name, array in self.arrays.items()}


class Numbered:
    """Batches of a file by number. Its last part is kept for evaluation, if there is one and no `eval_data()`."""

    def __init__(self, rows: Arrays | Text, subject: Subject, size: int, *, evaluate: bool, path: Path) -> None:
        self._subject, self._size, self.alphabet = subject, size, rows.alphabet
        kept = max(size, len(rows) // HELD_OUT) if evaluate and subject.eval_data is None else 0
        if len(rows) - kept < size:
            raise RunError(
                f"{path} has {len(rows)} rows, too few for a batch of {size}" + (" and an evaluation" * bool(kept)),
                place=str(path),
                remedy="give a longer file, or a smaller example()",
            )
        self._train = rows.part(0, len(rows) - kept)
        self._eval = rows.part(len(rows) - kept, len(rows)) if kept else None

    def batches(self, replica: int, num_replicas: int, start: int = 0) -> Iterator[Any]:
        step = start
        while True:
            yield self._formed(self._train.batch(step * num_replicas + replica, self._size))
            step += 1

    def eval_batches(self, replica: int, num_replicas: int) -> Iterator[Any]:
        if self._eval is None:
            yield from Own(self._subject).eval_batches(replica, num_replicas)
            return
        rounds = max(1, min(MAX_EVAL, len(self._eval) // self._size) // num_replicas)
        for number in range(rounds):
            # with fewer batches than replicas, several replicas look at the same
            at = (number * num_replicas + replica) % max(1, len(self._eval) // self._size)
            yield self._formed(self._eval.in_order(at, self._size))

    def _formed(self, found: dict[str, Tensor]) -> Any:
        example = self._subject.example
        if isinstance(example, Mapping):
            return {name: found[name] for name in example}
        return tuple(found.values()) if isinstance(example, tuple | list) else next(iter(found.values()))


Source = Own | Numbered
"""Where batches come from."""


def _read_arrays(path: Path, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    package = "safetensors.torch" if path.suffix == ".safetensors" else "numpy"
    module = needed(package, str(path), error=RunError)
    try:
        if path.suffix == ".safetensors":
            return dict(module.load_file(path))
        found = module.load(path, allow_pickle=False)
        if path.suffix == ".npz":
            return {name: torch.from_numpy(found[name]) for name in found.files}
        array = torch.from_numpy(found)
    except Exception as error:
        # whatever a reader raises over a file that is not what its name says
        said = " ".join(str(error).split())[:200]
        raise RunError(f"{path} cannot be read: {said}", place=str(path), remedy="write the file anew") from error
    if len(inputs) != 1:
        raise RunError(
            f"{path} holds one array, the forward takes {', '.join(inputs)}", remedy="an .npz file with one of each"
        )
    return {next(iter(inputs)): array}


def _check(arrays: Mapping[str, Tensor], inputs: Mapping[str, Tensor], choice: Choice, path: Path) -> Arrays:
    """The arrays that the forward takes, in its dtypes; refuses what does not fit."""
    missing = [name for name in inputs if name not in arrays]
    if missing:
        raise RunError(
            f"{path} has no array {', '.join(missing)}: it has {', '.join(arrays)}",
            place=str(path),
            remedy="name the arrays like the arguments of the forward",
        )
    wrong = [text for name, like in inputs.items() if (text := _misfit(name, arrays[name], like, choice.vocabulary))]
    lengths = {len(arrays[name]) for name in inputs if arrays[name].dim()}
    if not wrong and len(lengths) > 1:
        wrong = [f"the arrays have {' and '.join(map(str, sorted(lengths)))} rows"]
    if wrong:
        raise RunError(
            "; ".join(wrong), place=str(path), remedy="rows of the example's shape and kind, as many of each"
        )
    return Arrays({name: arrays[name].to(like.dtype) for name, like in inputs.items()})


def _misfit(name: str, array: Tensor, like: Tensor, vocabulary: Mapping[str, int]) -> str:
    if array.shape[1:] != like.shape[1:] or array.dim() != like.dim():
        return f"{name} has rows of shape {list(array.shape[1:])}, in the example {list(like.shape[1:])}"
    if array.dtype.is_floating_point != like.dtype.is_floating_point:
        return f"{name} is {array.dtype}, in the example {like.dtype}"
    size = vocabulary.get(name)
    if size is not None and array.numel() and not 0 <= int(array.min()) <= int(array.max()) < size:
        return f"{name} has values from {int(array.min())} to {int(array.max())}, the model knows 0 to {size - 1}"
    return ""
