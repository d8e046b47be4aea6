"""Arguments with which the rules of losses are proven: target -> forms, with every reduction."""

from __future__ import annotations

from itertools import product

import torch

from tests.ops.cases import Form, form, i, r, special

REDUCTIONS = (0, 1, 2)
"""None, mean, sum."""


def _classes(high: int, *sizes: int, ignored: int = -100) -> torch.Tensor:
    """Class indices, some of them ignored."""
    found = i(high, *sizes)
    found.view(-1)[[1, 4]] = ignored
    return found


def _weights(count: int) -> torch.Tensor:
    return torch.rand(count, dtype=torch.float64)


def classified() -> dict[str, list[Form]]:
    entropy = [
        special((r(7, 6), _classes(6, 7), weight, reduction, -100, smooth), fixed=(2,) * (weight is not None))
        for reduction, smooth, weight in product(REDUCTIONS, (0.0, 0.2), (None, _weights(6)))
    ]
    for reduction in REDUCTIONS:
        planes = r(3, 5, 4, 2), _classes(5, 3, 4, 2)
        entropy.append(special((*planes, _weights(5), reduction, -100, 0.1), fixed=(2,)))
        entropy.append(form(*planes, None, reduction))
        entropy.append(form(r(6), torch.tensor(4), None, reduction))
        entropy.append(form(r(6, 4), _classes(3, 6, ignored=3), None, reduction, 3, 0.1))
        for shape, smooth in product(((5, 6), (3, 4, 2), (6,)), (0.0, 0.3)):
            weight = _weights(shape[0 if len(shape) == 1 else 1]) if reduction else None
            entropy.append(form(r(*shape), r(*shape).softmax(0), weight, reduction, -100, smooth))
    entropy.append(form(r(4, 6) * 1e3, i(6, 4)))
    rows = [
        special((r(7, 6).log_softmax(1), _classes(6, 7, ignored=2), weight, reduction, 2), fixed=(2,) * bool(where))
        for reduction, (where, weight) in product(REDUCTIONS, enumerate((None, _weights(6))))
    ]
    planes = [form(r(3, 5, 4, 2), i(5, 3, 4, 2), None, reduction) for reduction in REDUCTIONS]
    return {
        "aten.cross_entropy_loss.default": entropy,
        "aten.nll_loss_nd.default": [*rows, *planes],
        "aten.nll_loss.default": rows,
        "aten.nll_loss2d.default": planes,
    }


def elementwise() -> dict[str, list[Form]]:
    x, y, signs = r(4, 6), r(4, 6), r(4, 6).sign()
    shares, weight, positive = torch.rand(4, 6).double(), _weights(6), torch.rand(4, 1).double() + 1
    fractions, logs = r(4, 6).softmax(1), r(4, 6).log_softmax(1)
    found: dict[str, list[Form]] = {}
    for kind in REDUCTIONS:
        forms = {
            "mse_loss": [form(x, y, kind), form(r(), r(), kind)],
            "l1_loss": [form(x, y, kind), form(x, r(6), kind)],
            "smooth_l1_loss": [form(x, y, kind, 0.5)],
            "huber_loss": [form(x, y, kind, 0.7)],
            "soft_margin_loss": [special((x, signs, kind), fixed=(1,))],
            "hinge_embedding_loss": [special((x, signs, 0.3, kind), fixed=(1,))],
            "margin_ranking_loss": [special((x, y, signs), {"reduction": kind}, fixed=(2,))],
            "poisson_nll_loss": [
                special((x, y.exp(), True, True, 1e-8, kind), fixed=(1,)),
                special((x.exp(), y.exp(), False, False, 1e-8, kind), fixed=(1,)),
            ],
            "binary_cross_entropy": [
                form(x.sigmoid(), shares, None, kind),
                special((x.sigmoid(), shares, weight, kind), fixed=(2,)),
            ],
            "binary_cross_entropy_with_logits": [
                form(x, shares, None, None, kind),
                special((x, shares, weight, positive, kind), fixed=(2, 3)),
                special((x, shares, None, weight, kind), fixed=(2,)),
            ],
            "kl_div": [form(logs, fractions, kind), form(logs, y.log_softmax(1), kind, log_target=True)],
        }
        for name, made in forms.items():
            found.setdefault(f"aten.{name}.default", []).extend(made)
    return found


def rowwise() -> dict[str, list[Form]]:
    x, y, z = r(4, 6), r(4, 6), r(4, 6)
    labels = torch.tensor([[1, 0, 2, -1, 0, 0], [3, -1, 0, 0, 0, 0], [5, 4, -1, 0, 0, 0], [0, 1, 2, 3, 4, 5]])
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
    steps, marks = r(9, 4, 5).log_softmax(2), i(4, 4, 3) + 1
    lengths = [9, 8, 7, 9], [3, 2, 1, 0]
    as_tensors = tuple(map(torch.tensor, lengths))
    found: dict[str, list[Form]] = {}
    for kind in REDUCTIONS:
        forms = {
            "cosine_embedding_loss.default": [
                special((x, y, signs, 0.1, kind), fixed=(2,)),
                special((r(5), r(5), torch.tensor(1.0), 0.0, kind), fixed=(2,)),
            ],
            "multi_margin_loss.default": [
                form(x, i(6, 4), 1, 1.0, None, kind),
                special((x, i(6, 4), 2, 0.5, _weights(6), kind), fixed=(2,)),
            ],
            "multilabel_margin_loss.default": [form(x, labels, kind), form(x[0], labels[0], kind)],
            "triplet_margin_loss.default": [
                form(x, y, z, reduction=kind),
                form(x, y, z, 0.5, 1.0, swap=True, reduction=kind),
                form(r(4, 3, 2), r(4, 3, 2), r(4, 3, 2), reduction=kind),
                form(x, y, r(1, 6), reduction=kind),
            ],
            "ctc_loss.IntList": [form(steps, marks, *lengths, 0, kind), form(steps, marks, *lengths, 0, kind, True)],
            "ctc_loss.Tensor": [form(steps, marks, *as_tensors, 0, kind)],
        }
        for name, made in forms.items():
            found.setdefault(f"aten.{name}", []).extend(made)
    return found


def loss_cases() -> dict[str, list[Form]]:
    """Every target here that is proven by name."""
    return {**classified(), **elementwise(), **rowwise()}
