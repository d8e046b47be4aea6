"""An Evoformer with recycling, the trunk of AlphaFold 2 (Jumper et al., 2021, supplement 1.6 and 1.10), in small.

Two tracks talk to each other: an alignment `msa` (batch, sequences, residues, channels) and a `pair` representation
(batch, residues, residues, channels). The trunk runs three times on the same batch; only the last pass is
differentiated, the ones before give it their first row of the alignment and their pairs, through layer norms.

What is interesting to cut: the batch is small and everything else is square, so the heads of five kinds of attention
and the hidden channels of transitions, outer products and triangle updates are what tensor parallelism has. The bias of
row attention is made from the pairs by heads; dropout masks are shared along rows or columns.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

BATCH, SEQUENCES, RESIDUES = 2, 6, 8
TOKENS, BINS = 23, 12
MSA, PAIR, HEADS, HEAD, OUTER, TRIANGLE = 48, 36, 6, 8, 12, 24
BLOCKS, PASSES = 2, 3


class SharedDropout(nn.Module):
    """Dropout whose mask is the same along one dim: whole rows or columns are dropped together."""

    def __init__(self, p: float, dim: int) -> None:
        super().__init__()
        self.dim, self.dropout = dim, nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        shape = list(x.shape)
        shape[self.dim] = 1
        return x * self.dropout(x.new_ones(shape))


class GatedAttention(nn.Module):
    """Attention along the last but one dim, with a gate, and a bias for each head if there is one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = HEADS * HEAD
        self.query = nn.Linear(width, inner, bias=False)
        self.key = nn.Linear(width, inner, bias=False)
        self.value = nn.Linear(width, inner, bias=False)
        self.gate = nn.Linear(width, inner)
        self.out = nn.Linear(inner, width)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        query, key, value = (part(x).unflatten(-1, (HEADS, HEAD)) for part in (self.query, self.key, self.value))
        scores = torch.einsum("brqhc,brkhc->brhqk", query * HEAD**-0.5, key)
        if bias is not None:
            scores = scores + bias.unsqueeze(1)
        mixed = torch.einsum("brhqk,brkhc->brqhc", scores.softmax(-1), value)
        return self.out(torch.sigmoid(self.gate(x)) * mixed.flatten(-2))


class RowAttention(nn.Module):
    """Each sequence attends along its residues; pairs of residues say how much (algorithm 7)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.pair_norm = nn.LayerNorm(MSA), nn.LayerNorm(PAIR)
        self.bias = nn.Linear(PAIR, HEADS, bias=False)
        self.attention = GatedAttention(MSA)

    def forward(self, msa: Tensor, pair: Tensor) -> Tensor:
        bias = self.bias(self.pair_norm(pair)).permute(0, 3, 1, 2)
        return self.attention(self.norm(msa), bias)


class ColumnAttention(nn.Module):
    """Each residue attends along the sequences (algorithm 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(MSA), GatedAttention(MSA)

    def forward(self, msa: Tensor) -> Tensor:
        return self.attention(self.norm(msa).transpose(1, 2)).transpose(1, 2)


class Transition(nn.Module):
    """Two layers, four times as wide in between (algorithms 9 and 15)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.relu(self.up(self.norm(x))))


class OuterProductMean(nn.Module):
    """From the alignment to the pairs: what two residues have in common, over all sequences (algorithm 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(MSA)
        self.left, self.right = nn.Linear(MSA, OUTER), nn.Linear(MSA, OUTER)
        self.out = nn.Linear(OUTER * OUTER, PAIR)

    def forward(self, msa: Tensor) -> Tensor:
        msa = self.norm(msa)
        outer = torch.einsum("bsic,bsjd->bijcd", self.left(msa), self.right(msa)) / msa.shape[1]
        return self.out(outer.flatten(-2))


class TriangleMultiplication(nn.Module):
    """An edge of a triangle from the two others, summed over the third node (algorithms 11 and 12)."""

    def __init__(self, equation: str) -> None:
        super().__init__()
        self.equation = equation
        self.norm, self.out_norm = nn.LayerNorm(PAIR), nn.LayerNorm(TRIANGLE)
        self.left, self.left_gate = nn.Linear(PAIR, TRIANGLE), nn.Linear(PAIR, TRIANGLE)
        self.right, self.right_gate = nn.Linear(PAIR, TRIANGLE), nn.Linear(PAIR, TRIANGLE)
        self.gate, self.out = nn.Linear(PAIR, PAIR), nn.Linear(TRIANGLE, PAIR)

    def forward(self, pair: Tensor) -> Tensor:
        pair = self.norm(pair)
        left = torch.sigmoid(self.left_gate(pair)) * self.left(pair)
        right = torch.sigmoid(self.right_gate(pair)) * self.right(pair)
        update = self.out(self.out_norm(torch.einsum(self.equation, left, right)))
        return torch.sigmoid(self.gate(pair)) * update


class TriangleAttention(nn.Module):
    """Each edge attends to those that start, or end, at the same node (algorithms 13 and 14)."""

    def __init__(self, ending: bool) -> None:
        super().__init__()
        self.ending = ending
        self.norm, self.attention = nn.LayerNorm(PAIR), GatedAttention(PAIR)
        self.bias = nn.Linear(PAIR, HEADS, bias=False)

    def forward(self, pair: Tensor) -> Tensor:
        pair = self.norm(pair)
        if self.ending:
            pair = pair.transpose(1, 2)
        update = self.attention(pair, self.bias(pair).permute(0, 3, 1, 2))
        return update.transpose(1, 2) if self.ending else update


class Block(nn.Module):
    """One Evoformer block (algorithm 6)."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns, self.msa_transition = RowAttention(), ColumnAttention(), Transition(MSA)
        self.outer = OuterProductMean()
        self.outgoing = TriangleMultiplication("bikc,bjkc->bijc")
        self.incoming = TriangleMultiplication("bkic,bkjc->bijc")
        self.starting, self.ending = TriangleAttention(ending=False), TriangleAttention(ending=True)
        self.pair_transition = Transition(PAIR)
        self.msa_dropout = SharedDropout(0.15, dim=1)
        self.row_dropout, self.column_dropout = SharedDropout(0.25, dim=1), SharedDropout(0.25, dim=2)

    def forward(self, msa: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
        msa = msa + self.msa_dropout(self.rows(msa, pair))
        msa = msa + self.columns(msa)
        msa = msa + self.msa_transition(msa)
        pair = pair + self.outer(msa)
        pair = pair + self.row_dropout(self.outgoing(pair))
        pair = pair + self.row_dropout(self.incoming(pair))
        pair = pair + self.row_dropout(self.starting(pair))
        pair = pair + self.column_dropout(self.ending(pair))
        return msa, pair + self.pair_transition(pair)


class Evoformer(nn.Module):
    """The trunk with its inputs and two of its losses: masked residues of the alignment, and binned distances."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.target = nn.Embedding(TOKENS, MSA), nn.Embedding(TOKENS, MSA)
        self.left, self.right = nn.Embedding(TOKENS, PAIR), nn.Embedding(TOKENS, PAIR)
        self.offset = nn.Embedding(2 * RESIDUES - 1, PAIR)
        self.recycled_row, self.recycled_pair = nn.LayerNorm(MSA), nn.LayerNorm(PAIR)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.masked, self.distances = nn.Linear(MSA, TOKENS), nn.Linear(PAIR, BINS)

    def embed(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The alignment and the pairs before the first block (algorithm 3)."""
        target = tokens[:, 0]
        msa = self.token(tokens) + self.target(target).unsqueeze(1)
        position = torch.arange(tokens.shape[-1], device=tokens.device)
        offset = self.offset(position[:, None] - position[None, :] + tokens.shape[-1] - 1)
        return msa, self.left(target).unsqueeze(2) + self.right(target).unsqueeze(1) + offset

    def trunk(self, tokens: Tensor, row: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
        """One pass, on what the pass before made."""
        msa, fresh = self.embed(tokens)
        first = msa[:, :1] + self.recycled_row(row).unsqueeze(1)
        msa, pair = torch.cat((first, msa[:, 1:]), dim=1), fresh + self.recycled_pair(pair)
        for block in self.blocks:
            msa, pair = block(msa, pair)
        return msa, pair

    def forward(self, tokens: Tensor, labels: Tensor, bins: Tensor) -> Tensor:
        row = torch.zeros(*tokens[:, 0].shape, MSA, device=tokens.device)
        pair = torch.zeros(*bins.shape, PAIR, device=tokens.device)
        with torch.no_grad():
            for _ in range(PASSES - 1):
                msa, pair = self.trunk(tokens, row, pair)
                row = msa[:, 0]
        msa, pair = self.trunk(tokens, row, pair)
        symmetric = self.distances(pair) + self.distances(pair).transpose(1, 2)
        masked = functional.cross_entropy(self.masked(msa).flatten(0, 2), labels.flatten(), ignore_index=-100)
        return 2.0 * masked + 0.3 * functional.cross_entropy(symmetric.flatten(0, 2), bins.flatten())


def model() -> nn.Module:
    torch.manual_seed(0)
    return Evoformer()


def example() -> tuple[Tensor, Tensor, Tensor]:
    """Alignments with 15% of the residues masked (the last token), and the distances of their residues in bins."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(TOKENS - 1, (BATCH, SEQUENCES, RESIDUES), generator=generator)
    hidden = torch.rand(tokens.shape, generator=generator) < 0.15
    bins = torch.randint(BINS, (BATCH, RESIDUES, RESIDUES), generator=generator)
    return tokens.masked_fill(hidden, TOKENS - 1), tokens.masked_fill(~hidden, -100), bins.minimum(bins.transpose(1, 2))
