"""Arguments with which the rules of linear algebra, transforms, recurrent layers and rarer moves are proven."""

from __future__ import annotations

import torch

from tests.ops.cases import Form, form, r, special


def square(*sizes: int) -> torch.Tensor:
    """Matrices that are well away from singular."""
    return r(*sizes) + 4 * torch.eye(sizes[-1], dtype=torch.float64)


def definite(*sizes: int) -> torch.Tensor:
    """Symmetric matrices with positive, distinct eigenvalues."""
    x = r(*sizes)
    return x @ x.mT + torch.diag(torch.arange(1.0, sizes[-1] + 1, dtype=torch.float64))


def linalg() -> dict[str, list[Form]]:
    plain = [form(square(2, 4, 3, 3)), form(square(3, 3))]
    names = "linalg_inv inverse linalg_det det linalg_slogdet slogdet logdet linalg_matrix_exp matrix_exp"
    values = [form(definite(4, 3, 3))]
    signs = [special((definite(4, 3, 3),), unused=(1,))]  # eigenvectors have a sign of their own
    return {
        **{f"aten.{name}.default": plain for name in names.split() if name not in ("logdet",)},
        "aten.logdet.default": values,
        "aten.linalg_inv_ex.default": plain,
        "aten.linalg_cholesky.default": [*values, special((definite(2, 4, 3, 3),), {"upper": True})],
        "aten.linalg_cholesky_ex.default": values,
        "aten.cholesky.default": values,
        "aten.cholesky_inverse.default": [form(torch.linalg.cholesky(definite(4, 3, 3)))],
        "aten.linalg_svd.default": [special((r(4, 3, 2), False), unused=(0, 2))],
        "aten.svd.default": [special((r(4, 3, 2),), unused=(0, 2))],
        "aten.linalg_svdvals.default": [form(r(4, 3, 2))],
        "aten.linalg_eigh.default": signs,
        "aten.linalg_eigvalsh.default": values,
        "aten.linalg_qr.default": [form(r(4, 3, 2)), form(r(3, 2))],
        "aten.qr.default": [form(r(4, 3, 2))],
        "aten.linalg_pinv.atol_rtol_tensor": [form(r(4, 3, 2))],
        "aten.linalg_pinv.default": [form(r(4, 3, 2), 1e-9)],
        "aten.linalg_pinv.rcond_tensor": [special((r(4, 3, 2), torch.full((4,), 1e-9).double()), fixed=(1,))],
        "aten.pinverse.default": [form(r(4, 3, 2))],
        "aten.linalg_matrix_power.default": [form(square(4, 3, 3), 3), form(square(4, 3, 3), -1)],
        "aten.matrix_power.default": [form(square(4, 3, 3), 2)],
        "aten.linalg_lu_factor.default": [form(square(4, 3, 3))],
        "aten.linalg_lu.default": [form(square(4, 3, 3))],
        "aten.linalg_cond.default": [form(square(4, 3, 3)), special((square(4, 3, 3), 1), fixed=(0,))],
        "aten.linalg_matrix_rank.default": [special((r(4, 3, 3), 1e-6), fixed=(0,))],
        "aten.linalg_solve.default": [
            form(square(2, 3, 3), r(2, 3, 4)),
            form(square(2, 3, 3), r(2, 3)),
            form(square(3, 3), r(3)),
            form(square(4, 1, 3, 3), r(2, 3, 4)),
            form(square(2, 3, 3), r(2, 4, 3), left=False),
        ],
        "aten.linalg_solve_triangular.default": [
            form(square(2, 3, 3), r(2, 3, 4), upper=False),
            form(square(2, 3, 3), r(4, 3), upper=True, left=False),
        ],
        "aten.cholesky_solve.default": [form(r(2, 3, 4), torch.linalg.cholesky(definite(2, 3, 3)))],
        "aten.linalg_multi_dot.default": [
            form([r(3, 4), r(4, 5), r(5, 2)]),
            form([r(4), r(4, 5), r(5)]),
            form([r(3, 4), r(4, 5), r(5)]),
        ],
        "aten.chain_matmul.default": [form([r(3, 4), r(4, 5), r(5, 2)])],
        "aten.kron.default": [form(r(3, 2), r(2, 4)), form(r(4), r(2, 3)), form(r(2, 1, 3), r(4, 2))],
    }


def spectral() -> dict[str, list[Form]]:
    x, pairs = r(4, 6, 3), torch.complex(r(4, 6, 3), r(4, 6, 3))
    one = [form(x), form(x, 5, 1, "ortho"), form(x, None, -2)]
    back = [form(pairs, None, 1), form(pairs, 8, 1, "forward")]
    two = [form(x), form(x, [4, 4], [0, 1])]
    many = [form(x), form(x, None, [1]), form(x, [5], None), form(x, [4, 4], [0, -1], "ortho")]
    return {
        **{f"aten.fft_{name}.default": one for name in ("fft", "rfft", "ihfft")},
        "aten.fft_ifft.default": [*one, *back],
        **{f"aten.fft_{name}.default": back for name in ("irfft", "hfft")},
        **{f"aten.fft_{name}.default": two for name in ("fft2", "ifft2", "rfft2", "ihfft2")},
        **{f"aten.fft_{name}.default": [form(pairs, None, [0, 1])] for name in ("irfft2", "hfft2")},
        **{f"aten.fft_{name}.default": many for name in ("fftn", "ifftn", "rfftn", "ihfftn")},
        **{f"aten.fft_{name}.default": [form(pairs, None, [0, 1])] for name in ("irfftn", "hfftn")},
        "aten.fft_fftshift.default": [form(x), form(x, [1]), form(x, -1)],
        "aten.fft_ifftshift.default": [form(x, [0, 2])],
        "aten.stft.default": [
            special((r(4, 16), 4, 2, None, torch.hann_window(4).double()), {"return_complex": True}, fixed=(1,)),
            form(r(16), 4, 2, return_complex=True),
            form(r(4, 16), 4, 2, return_complex=False),
        ],
        "aten.stft.center": [form(r(4, 16), 4, 2, center=True, return_complex=True)],
        "aten.istft.default": [
            special((torch.complex(r(4, 3, 8), r(4, 3, 8)), 4, 2, None, torch.hann_window(4).double()), fixed=(1,))
        ],
    }


def recurrent() -> dict[str, list[Form]]:
    def weights(
        gates: int, *, layers: int = 1, bias: bool = True, both: bool = False, proj: int = 0
    ) -> list[torch.Tensor]:
        made: list[torch.Tensor] = []
        ways = 2 if both else 1
        out = (proj or 2) * ways
        for layer in range(layers):
            for _ in range(ways):
                made += [r(gates * 2, 3 if layer == 0 else out), r(gates * 2, proj or 2)]
                made += [r(gates * 2), r(gates * 2)] if bias else []
                made += [r(proj, 2)] if proj else []
        return made

    def flags(bias: bool = True, layers: int = 1, both: bool = False, first: bool = False) -> tuple[object, ...]:
        return (bias, layers, 0.0, True, both, first)

    simple = [
        form(r(5, 4, 3), r(1, 4, 2), weights(1), *flags()),
        form(r(4, 5, 3), r(4, 4, 2), weights(1, layers=2, both=True), *flags(True, 2, True, True)),
    ]
    return {
        "aten.lstm.input": [
            form(r(5, 4, 3), [r(1, 4, 2), r(1, 4, 2)], weights(4), *flags()),
            form(
                r(4, 5, 3),
                [r(4, 4, 2), r(4, 4, 2)],
                weights(4, layers=2, both=True, bias=False),
                *flags(False, 2, True, True),
            ),
            form(r(5, 4, 3), [r(1, 4, 1), r(1, 4, 2)], weights(4, proj=1), *flags()),
        ],
        "aten.gru.input": [
            form(r(5, 4, 3), r(1, 4, 2), weights(3), *flags()),
            form(r(4, 5, 3), r(2, 4, 2), weights(3, layers=2), *flags(True, 2, False, True)),
        ],
        "aten.rnn_tanh.input": simple,
        "aten.rnn_relu.input": simple,
        "aten.lstm_cell.default": [
            form(r(4, 3), [r(4, 2), r(4, 2)], r(8, 3), r(8, 2), r(8), r(8)),
            form(r(4, 3), [r(4, 2), r(4, 2)], r(8, 3), r(8, 2)),
        ],
        "aten.gru_cell.default": [form(r(4, 3), r(4, 2), r(6, 3), r(6, 2), r(6), r(6))],
        "aten.rnn_tanh_cell.default": [form(r(4, 3), r(4, 2), r(2, 3), r(2, 2), r(2), r(2))],
        "aten.rnn_relu_cell.default": [form(r(4, 3), r(4, 2), r(2, 3), r(2, 2), r(2), r(2))],
    }


def joins() -> dict[str, list[Form]]:
    return {
        "aten.hstack.default": [form([r(4, 6), r(4, 3)]), form([r(4), r(2)]), form([r(), r(2)])],
        "aten.vstack.default": [form([r(4, 6), r(2, 6)]), form([r(4), r(4)]), form([r(4), r(3, 4)])],
        "aten.row_stack.default": [form([r(4, 6), r(2, 6)])],
        "aten.dstack.default": [form([r(4, 3, 2), r(4, 3, 4)]), form([r(4, 3), r(4, 3)]), form([r(4), r(4)])],
        "aten.column_stack.default": [form([r(4, 6), r(4, 3)]), form([r(4), r(4, 3)])],
        "aten.diag.default": [form(r(4)), form(r(4, 3), 1)],
        "aten.diagflat.default": [form(r(2, 3))],
        "aten.trace.default": [form(r(4, 4))],
        "aten.diag_embed.default": [form(r(4, 3)), form(r(4, 2, 3), 1, 0, 2)],
        "aten.diagonal_scatter.default": [form(r(4, 3, 3), r(4, 3), 0, 1, 2), form(r(3, 4, 3), r(4, 2), 1, 0, -1)],
        "aten.rot90.default": [form(r(4, 3, 2), 1, [1, 2]), form(r(4, 3, 2), 2, [0, -1])],
        "aten.channel_shuffle.default": [form(r(4, 6, 3), 2), form(r(2, 8, 2, 2), 4)],
        "aten.native_channel_shuffle.default": [special((r(4, 6, 3, 2), 3), fixed=(0,))],
        "aten.block_diag.default": [form([r(4, 2), r(3, 3)])],
        "aten.cartesian_prod.default": [form([r(4), r(3)])],
    }


def along() -> dict[str, list[Form]]:
    x = r(4, 3, 2)
    shares = torch.tensor([0.2, 0.7], dtype=torch.float64)
    return {
        "aten.quantile.scalar": [form(x, 0.3, 1), form(x, 0.3, -1, True), form(x, 0.5)],
        "aten.quantile.default": [special((x, shares, 1), fixed=(1,)), special((x, shares, 0, True), fixed=(1,))],
        "aten.nanquantile.scalar": [form(x, 0.3, 1)],
        "aten.nanquantile.default": [special((x, shares, 1), fixed=(1,))],
        "aten.trapezoid.dx": [form(x, dim=1), form(x, dx=0.5)],
        "aten.trapezoid.x": [form(x, r(4, 3, 2).sort(1)[0], dim=1), form(x, r(2))],
        "aten.trapz.dx": [form(x, dim=1)],
        "aten.cumulative_trapezoid.dx": [form(x, dim=1)],
        "aten.gradient.scalarint": [form(x, dim=1), form(r(4, 2), spacing=0.5)],
        "aten.gradient.array": [form(x, dim=[0, 1])],
        "aten.renorm.default": [form(x, 2, 1, 0.5), form(x, 1, -1, 0.5)],
        "aten.affine_grid_generator.default": [form(r(4, 2, 3), [4, 3, 2, 2], False)],
        "aten.max_unpool2d.default": [form(r(2, 4, 2, 2), _pooled(2, 4), [4, 4])],
        "aten.max_unpool3d.default": [form(r(2, 2, 2, 2, 2), _cubes(), [4, 4, 4], [2, 2, 2], [0, 0, 0])],
        "aten.fractional_max_pool2d.default": [
            special((r(2, 4, 6, 6), [2, 2], [3, 3], torch.rand(2, 4, 2).double()), fixed=(1,))
        ],
        "aten.fractional_max_pool3d.default": [
            special((r(2, 2, 4, 4, 4), [2, 2, 2], [2, 2, 2], torch.rand(2, 2, 3).double()), fixed=(1,))
        ],
        "aten.conv_tbc.default": [form(r(7, 4, 3), r(2, 3, 6), r(6)), form(r(7, 4, 3), r(3, 3, 6), r(6), 1)],
    }


def _pooled(*lead: int) -> torch.Tensor:
    """Positions of four pooled elements in a plane of 4 by 4."""
    return torch.tensor([[0, 3], [9, 14]]).expand(*lead, 2, 2).contiguous()


def _cubes() -> torch.Tensor:
    places = torch.tensor([0, 3, 9, 14, 33, 38, 45, 63])
    return places.view(2, 2, 2).expand(2, 2, 2, 2, 2).contiguous()


def algebra_cases() -> dict[str, list[Form]]:
    """Every target here that is proven by name."""
    groups = (linalg, spectral, recurrent, joins, along)
    return {target: forms for group in groups for target, forms in group().items()}
