"""Putting whole tensors together from what ranks store."""

from __future__ import annotations

import torch

from weft.ir.layout import COPY, PARTIAL, Axis, Grid, even, split
from weft.ir.schedule import Segment
from weft.verify.locate import gather
from weft.verify.ranks import join, same_bits


def test_parts_of_several_ranges() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    columns = [((0, 1), (2, 3)), ((1, 2), (3, 4))]
    pieces = [(rank, (((0, 3),), take), whole[:, [a for a, _ in take]]) for rank, take in enumerate(columns)]
    found, faults = join((3, 4), pieces)
    assert torch.equal(found, whole) and not faults


def test_scalars_and_empty_parts() -> None:
    assert join((), [(0, (), torch.tensor(3.0)), (1, (), torch.tensor(3.0))]) == (torch.tensor(3.0), [])
    found, faults = join((2,), [(0, (((0, 2),),), torch.ones(2)), (1, ((),), torch.ones(0))])
    assert found.tolist() == [1, 1] and not faults


def test_disagreements_and_holes() -> None:
    one, other = torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    other[1] += 2e-16 * 2
    index = (((0, 2),),)
    assert join((2,), [(0, index, one), (1, index, other)])[1] == ["rank 1 differs from the ranks before it"]
    assert join((3,), [(0, index, one)])[1] == ["1 elements are stored on no rank"]
    nan = torch.tensor([float("nan")])
    assert same_bits(nan, nan) and not same_bits(nan, torch.ones(1))


def test_gather_adds_addends_and_yields_every_copy() -> None:
    grid = Grid((Axis("copy", 2), Axis("sum", 2), Axis("cut", 2)), tuple(range(8)))
    layout = even((4,), grid, (COPY, PARTIAL, split(0)))
    records = [{("piece", 1, "op", 0, 0): torch.full((2,), float(device))} for device in range(8)]
    first, second = gather(layout, Segment("piece", tuple(range(8))), records, (1, "op", 0))
    assert first.tolist() == [2, 2, 4, 4] and second.tolist() == [10, 10, 12, 12]
