"""A model file: a recommender in the manner of DLRM, in plain PyTorch: large tables, two MLPs, pairwise interactions.

Interesting to cut: nearly all memory lies in the tables, which may be cut by rows or by columns; a user's history is a
bag of items of any length, its rows weighted and summed, with 0 for "no item"; features meet in products of pairs.
"""

import torch
from torch import nn
from torch.nn import functional as F

USERS, ITEMS, TAGS, COUNTRIES = 4000, 6000, 500, 60
WIDTH, DENSE, HISTORY, ROWS = 36, 13, 10, 24


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, WIDTH)
        self.countries = nn.Embedding(COUNTRIES, WIDTH)
        self.history = nn.EmbeddingBag(ITEMS, WIDTH, mode="sum", padding_idx=0)
        self.tags = nn.EmbeddingBag(TAGS, WIDTH, mode="mean")
        self.trends = nn.EmbeddingBag(TAGS, WIDTH, mode="max")
        for table in (self.users, self.countries, self.history, self.tags, self.trends):
            nn.init.normal_(table.weight, std=0.3)
        self.bottom = nn.Sequential(nn.Linear(DENSE, 96), nn.ReLU(), nn.Linear(96, WIDTH), nn.ReLU())
        self.top = nn.Sequential(
            nn.Linear(WIDTH + 15, 192), nn.ReLU(), nn.Dropout(0.1), nn.Linear(192, 96), nn.ReLU(), nn.Linear(96, 1)
        )
        self.register_buffer("pairs", torch.tril_indices(6, 6, offset=-1))

    def forward(
        self,
        dense: torch.Tensor,
        user: torch.Tensor,
        country: torch.Tensor,
        history: torch.Tensor,
        weights: torch.Tensor,
        tags: torch.Tensor,
        clicked: torch.Tensor,
    ) -> torch.Tensor:
        x = self.bottom(dense)
        seen = self.history(history, per_sample_weights=weights)
        features = [x, self.users(user), self.countries(country), seen, self.tags(tags), self.trends(tags)]
        stacked = torch.stack(features, dim=1)
        products = stacked @ stacked.transpose(1, 2)
        met = products[:, self.pairs[0], self.pairs[1]]
        score = self.top(torch.cat([x, met], dim=1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(score, clicked)


def model() -> nn.Module:
    torch.manual_seed(0)
    return Recommender()


def example() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    history = torch.randint(1, ITEMS, (ROWS, HISTORY))
    # histories of different lengths: the rest is padding
    history[torch.arange(HISTORY) >= torch.randint(1, HISTORY + 1, (ROWS, 1))] = 0
    return {
        "dense": torch.randn(ROWS, DENSE),
        "user": torch.randint(USERS, (ROWS,)),
        "country": torch.randint(COUNTRIES, (ROWS,)),
        "history": history,
        "weights": torch.rand(ROWS, HISTORY),
        "tags": torch.randint(TAGS, (ROWS, 3)),
        "clicked": torch.randint(2, (ROWS,)).float(),
    }
