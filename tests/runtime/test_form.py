"""A batch is bound to the inputs of a program, whichever way it is given, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from weft.runtime.program.batch import BatchMismatch, Form, OtherForm


def form_of(args: tuple[Any, ...], kwargs: dict[str, Any], order: list[int] | None = None) -> Form:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = tuple(
        (at, f"input {at}", tuple(leaves[at].shape), str(leaves[at].dtype).removeprefix("torch."))
        for at in (places if order is None else order)
    )
    texts = tuple("" if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves)
    return Form(str(spec), tuple(kwargs), texts, tensors, num_args=len(args))


X, Y, IDS = torch.ones(4, 3), torch.zeros(4, 2), torch.arange(4)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_flat_batches_keep_the_order_of_the_programs_inputs(order: list[int]) -> None:
    form = form_of((X,), {"y": Y, "ids": IDS}, order)
    wanted = [(X, Y, IDS)[at] for at in order]
    for kwargs in ({"y": Y, "ids": IDS}, {"ids": IDS, "y": Y}):
        assert all(one is other for one, other in zip(form.bind((X,), kwargs), wanted, strict=True))


@pytest.mark.parametrize(
    ("args", "kwargs", "error"),
    [
        ((X, Y), {"ids": IDS}, OtherForm),
        ((), {"x": X, "y": Y, "ids": IDS}, OtherForm),
        ((X,), {"y": Y}, OtherForm),
        ((X,), {"y": Y, "ids": IDS, "more": X}, OtherForm),
        ((X,), {"y": Y, "ids": 3}, BatchMismatch),
        ((X,), {"y": (Y,), "ids": IDS}, OtherForm),
        ((X[:2],), {"y": Y, "ids": IDS}, BatchMismatch),
        ((X.double(),), {"y": Y, "ids": IDS}, BatchMismatch),
        ((X.to("meta"),), {"y": Y, "ids": IDS}, BatchMismatch),
    ],
)
def test_other_batches_are_refused(args: tuple[Any, ...], kwargs: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        form_of((X,), {"y": Y, "ids": IDS}).bind(args, kwargs)


def test_nested_batches_and_flags_are_looked_at_in_full() -> None:
    form = form_of(((X, Y),), {"flag": True, "ids": IDS})
    assert form.bind(((X, Y),), {"ids": IDS, "flag": True})[2] is IDS
    with pytest.raises(OtherForm):
        form.bind(((X, Y),), {"ids": IDS, "flag": False})
    with pytest.raises(OtherForm):
        form.bind((X, Y), {"ids": IDS, "flag": True})


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"y": Y, "x": X}, r"the keys of a dict are in the order \['y', 'x'\], in the example \['x', 'y'\]"),
        ({"x": X}, r"a dict in it has no 'y'; in the example its keys are \['x', 'y'\]"),
        ({"x": X, "y": Y, "mask": X}, r"a dict in it has also 'mask'"),
        ({"x": X, "z": Y}, r"a dict in it has no 'y' and has also 'z'"),
        ((X, Y), "a tuple in it, where the example has a dict"),
        ({"x": X, "y": None}, "is None, in the example it is a tensor"),
    ],
)
def test_what_differs_in_a_nested_batch_is_named(batch: Any, words: str) -> None:
    form = form_of(({"x": X, "y": Y},), {})
    with pytest.raises(BatchMismatch, match=words):
        form.bind((batch,), {})
    with pytest.raises(BatchMismatch, match="2 positional arguments; the example has 1 positional argument"):
        form.bind(({"x": X, "y": Y}, X), {})
