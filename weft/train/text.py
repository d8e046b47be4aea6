"""Text as data: pairs of a sequence and the tokens that follow it.

The convention, for inputs of (rows, length):

    tokens   the bytes of the file if the model knows 256 tokens or more; else its distinct characters, sorted and
             numbered from 0, which must be as many as the model knows, or fewer
    inputs   the first integer input gets a piece of the text; one named `labels` gets the same piece (models that take
             labels shift them themselves); another integer input of that shape gets the piece one token further on

In: a path and the example's inputs by name. Out: a Text. A training batch takes pieces from places that are a pure
function of the seed and the batch's number; an evaluation goes through its part in order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from weft.errors import RunError
from weft.ir.graph import Graph
from weft.ops.work import is_alias

BYTES = 256
LABELS = "labels"
LOOKUP = "embedding"


@dataclass(frozen=True)
class Text:
    """Tokens, and which inputs get them.

    Args:
        shifts: for each input, how many tokens further on its piece begins.
    """

    tokens: Tensor
    length: int
    shifts: Mapping[str, int]
    seed: int
    alphabet: str = ""

    def __len__(self) -> int:
        """Pieces that do not overlap."""
        return max(0, (len(self.tokens) - 1) // self.length)

    def part(self, start: int, stop: int) -> Text:
        """Those pieces, and the token after them."""
        return replace(self, tokens=self.tokens[start * self.length : stop * self.length + 1])

    def batch(self, number: int, rows: int) -> dict[str, Tensor]:
        # hashed: torch's generator looks at 32 bits of a seed only
        digest = hashlib.sha256(f"{self.seed} {number}".encode()).digest()
        places = torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
        return self._pieces(torch.randint(len(self.tokens) - self.length, (rows,), generator=places))

    def in_order(self, number: int, rows: int) -> dict[str, Tensor]:
        return self._pieces(torch.arange(number * rows, (number + 1) * rows) * self.length)

    def _pieces(self, starts: Tensor) -> dict[str, Tensor]:
        at = starts[:, None] + torch.arange(self.length)
        return {name: self.tokens[at + shift].long() for name, shift in self.shifts.items()}


def read_text(path: Path, inputs: Mapping[str, Tensor], vocabulary: Mapping[str, int], seed: int) -> Text:
    """The text of a file, as the model's tokens."""
    first, shifts = _shifts(inputs, path)
    content = path.read_bytes()
    known = vocabulary.get(first, int(inputs[first].max()) + 1 if inputs[first].numel() else 0)
    if known >= BYTES:
        tokens, alphabet = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8), ""
    else:
        tokens, alphabet = _characters(content, known, path)
    dtypes = {inputs[name].dtype for name in shifts}
    if dtypes != {torch.int64}:
        raise RunError("tokens are int64, the example's are not", place=str(path), remedy="an example() of int64")
    return Text(tokens[: len(content)], inputs[first].shape[1], shifts, seed, alphabet)


def _shifts(inputs: Mapping[str, Tensor], path: Path) -> tuple[str, dict[str, int]]:
    first = next((name for name, one in inputs.items() if one.dim() == 2 and not one.dtype.is_floating_point), None)
    odd = [
        name
        for name, one in inputs.items()
        if first is None or one.shape != inputs[first].shape or one.dtype.is_floating_point or one.dtype == torch.bool
    ]
    if first is None or odd:
        raise RunError(
            f"a text cannot give {', '.join(odd or inputs)}: it gives integers of (rows, length)",
            place=str(path),
            remedy="arrays (.npz, .safetensors) named like the forward's arguments, or data() in the model file",
        )
    return first, {name: int(name not in (first, LABELS)) for name in inputs}


def _characters(content: bytes, known: int, path: Path) -> tuple[Tensor, str]:
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise RunError(
            f"{path} is no text: {error.reason} at byte {error.start}", place=str(path), remedy="a file in UTF-8"
        ) from None
    alphabet = "".join(sorted(set(text)))
    if len(alphabet) > known:
        raise RunError(
            f"{path} has {len(alphabet)} different characters, the model knows {known} tokens",
            place=str(path),
            remedy=f"a vocabulary of {len(alphabet)} or more ({BYTES} take any file), or data() in the model file",
        )
    numbers = {character: number for number, character in enumerate(alphabet)}
    return torch.tensor([numbers[character] for character in text], dtype=torch.int64), alphabet


def vocabularies(graph: Graph) -> dict[str, int]:
    """For each input that is looked up in a table, directly or after a change of shape, how many rows that has."""
    found: dict[str, int] = {}
    for one in graph.inputs:
        seen, ahead = {one.tensor}, [one.tensor]
        while ahead:
            name = ahead.pop()
            for op in graph.consumers[name]:
                if op.kind == LOOKUP and op.inputs[1:2] == (name,):
                    rows = graph.tensors[op.inputs[0]].sizes[0]
                    found[one.where] = min(rows, found.get(one.where, rows))
                elif is_alias(op, graph):
                    ahead += [each for each in op.outputs if each not in seen]
                    seen.update(op.outputs)
    return found
