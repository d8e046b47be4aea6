"""The counter hash: sound numbers, the same for every partition; and the mode that makes eager models draw them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from weft.runtime import random
from weft.runtime.random import Draw, Stream, gaussian, uniform, whole_draw
from weft.verify.draw_mode import DrawMode

STREAM = Stream(7, 2, 1)


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


def test_moments() -> None:
    found = uniform(STREAM, whole_draw(0, (1000, 200)))
    assert found.dtype == torch.float64 and found.min() >= 0 and found.max() < 1
    n = found.numel()
    assert abs(found.mean() - 0.5) < 4 * (1 / 12 / n) ** 0.5
    assert abs(found.var() - 1 / 12) < 4 * (1 / 180 / n) ** 0.5
    counts = torch.histc(found, 256, 0, 1)
    assert 150 < ((counts - n / 256) ** 2 / (n / 256)).sum() < 370  # chi-square of 255 degrees


def test_every_bit_is_fair() -> None:
    found = (uniform(STREAM, whole_draw(3, (100_000,))) * 2**53).long()
    for bit in range(53):
        assert abs(((found >> bit) & 1).double().mean() - 0.5) < 0.008


def test_neighbours_are_independent() -> None:
    n = 100_000
    base = uniform(STREAM, whole_draw(5, (n,)))
    bound = 4.5 / n**0.5
    for lag in (1, 2, 3, 16, 768, 1024):
        assert abs(correlation(base[:-lag], base[lag:])) < bound
    others = [
        uniform(STREAM, whole_draw(6, (n,))),
        uniform(STREAM, whole_draw(5, (n,)), lane=1),
        uniform(Stream(8, 2, 1), whole_draw(5, (n,))),
        uniform(Stream(7, 3, 1), whole_draw(5, (n,))),
        uniform(Stream(7, 2, 2), whole_draw(5, (n,))),
        uniform(Stream(2, 7, 1), whole_draw(5, (n,))),
    ]
    for other in others:
        for lag in (1, 2):
            assert abs(correlation(base, other)) < bound
            assert abs(correlation(base[:-lag], other[lag:])) < bound
            assert abs(correlation(base[lag:], other[:-lag])) < bound


def test_gaussian() -> None:
    found = gaussian(STREAM, whole_draw(0, (200_000,)))
    n = found.numel()
    assert abs(found.mean()) < 4 / n**0.5
    assert abs(found.var() - 1) < 4 * (2 / n) ** 0.5
    assert abs((found**4).mean() - 3) < 0.12
    assert found.isfinite().all()


def test_known_values() -> None:
    """Checkpoints and other machines rely on them: these numbers never change."""
    found = (
        uniform(Stream(0, 0, 0), whole_draw(0, (3,))).tolist() + uniform(Stream(1, 2, 3), whole_draw(4, (2,))).tolist()
    )
    assert [round(x, 12) for x in found] == [
        0.814007255813,
        0.796195675295,
        0.1624208608,
        0.414312157284,
        0.719851489512,
    ]


@given(st.data())
def test_any_partition_draws_the_same(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
    at = []
    for size in shape:
        points = sorted(data.draw(st.lists(st.integers(0, size), min_size=2, max_size=4)))
        pairs = [(a, b) for a, b in zip(points[::2], points[1::2], strict=False)]
        at.append(tuple(data.draw(st.permutations(pairs))))
    index = [torch.tensor([i for a, b in pairs for i in range(a, b)], dtype=torch.long) for pairs in at]
    whole = uniform(STREAM, whole_draw(4, shape))
    for dim, rows in enumerate(index):
        whole = whole.index_select(dim, rows)
    assert torch.equal(uniform(STREAM, Draw(4, shape, tuple(at))), whole)


def test_rand_is_the_same_in_float32() -> None:
    options = {"draw": whole_draw(0, (1000,)), "stream": STREAM}
    single, double = (random.rand(**options, dtype=dtype) for dtype in (torch.float32, torch.float64))
    assert torch.equal(single.double(), double) and single.max() < 1


def test_functions_have_their_distribution() -> None:
    options = {"draw": whole_draw(2, (50_000,)), "stream": STREAM, "dtype": torch.float64}
    assert abs(random.exponential(2.0, **options).mean() - 0.5) < 0.02
    assert abs(random.bernoulli(0.3, **options).mean() - 0.3) < 0.02
    numbers = random.randint(-2, 3, **options)
    assert sorted(set(numbers.tolist())) == [-2, -1, 0, 1, 2]
    assert random.randperm(**options).sort().values.equal(torch.arange(50_000).double())
    wide = random.rand(-1.0, 3.0, **options)
    assert wide.min() >= -1 and wide.max() < 3 and abs(wide.mean() - 1) < 0.03


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(4, 4, 2, dropout=0.5)
        self.block = torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.randn_like(x) * 0.1
        y, _ = self.lstm(x)
        return F.gumbel_softmax(self.block(y), dim=-1)


def test_eager_models_repeat_themselves_and_leave_the_generator_alone() -> None:
    net, x = Net().double(), torch.randn(3, 2, 4).double()
    state = torch.get_rng_state()
    found = []
    for stream in (STREAM, STREAM, Stream(7, 3, 1)):
        with DrawMode(stream) as mode:
            found.append(net(x))
        assert mode.num_draws == 7
    assert torch.equal(found[0], found[1]) and not torch.allclose(found[0], found[2])
    assert torch.equal(state, torch.get_rng_state())


def test_eager_dropout_is_the_pure_one() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        y = x.detach().to(dtype).t().requires_grad_()  # the element, not its place in memory, decides
        with DrawMode(STREAM):
            F.dropout(y, 0.9)
            eager = F.dropout(y, 0.1)
        pure = random.dropout(y, 0.1, True, draw=whole_draw(1, (6, 4)), stream=STREAM)
        assert torch.equal(eager, pure)
        grads = [torch.autograd.grad(out.sum(), y)[0] for out in (eager, pure)]
        assert torch.equal(*grads)


def test_no_draw_is_counted_where_none_is_made() -> None:
    x = torch.randn(4, 6)
    with DrawMode(STREAM) as mode:
        F.dropout(x, 0.0), F.dropout(x, 1.0), F.dropout(x, 0.5, training=False), F.dropout(x[:0], 0.5)
        F.scaled_dot_product_attention(x[None], x[None], x[None])
        F.rrelu(x, training=False)
    assert mode.num_draws == 0


def test_unknown_random_operators_raise() -> None:
    with DrawMode(STREAM):
        with pytest.raises(RuntimeError, match="binomial"):
            torch.binomial(torch.ones(3), torch.ones(3))
        with pytest.raises(RuntimeError, match="generator"):
            torch.randn(3, generator=torch.Generator())


def test_in_place_draws() -> None:
    options = {"stream": STREAM, "dtype": torch.float64}
    with DrawMode(STREAM):
        found = [
            torch.empty(5).double().uniform_(1, 3),
            torch.empty(5).double().normal_(1, 3),
            torch.empty(5).double().normal_(std=2.0),
            torch.empty(5).double().exponential_(2.0),
            torch.empty(5).double().bernoulli_(0.4),
            torch.empty(5).double().bernoulli_(),
            torch.empty(5).long().random_(3, 8),
            torch.empty(5).long().random_(4),
        ]
    draws = [{"draw": whole_draw(i, (5,)), **options} for i in range(8)]
    expected = [
        random.rand(1, 3, **draws[0]),
        random.randn(1, 3, **draws[1]),
        random.randn(0, 2, **draws[2]),
        random.exponential(2.0, **draws[3]),
        random.bernoulli(0.4, **draws[4]),
        random.bernoulli(0.5, **draws[5]),
        random.randint(3, 8, **draws[6]).long(),
        random.randint(0, 4, **draws[7]).long(),
    ]
    assert all(map(torch.equal, found, expected))
