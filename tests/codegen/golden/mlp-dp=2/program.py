"""MLP cut by dp=2."""

import torch.nn.functional as F
from torch import Tensor

from weft.runtime.operators.losses import loss_part
from weft.runtime.program.module import ParallelModule, Part
from weft.runtime.random import dropout
from weft.runtime.weights.products import linear

GRID = {"dp": 2}
PARAMETERS: dict[str, Part] = {
    "up.weight": Part((12, 8), sync="dp"),
    "up.bias": Part((12,), sync="dp"),
    "down.weight": Part((8, 12), sync="dp"),
    "down.bias": Part((8,), sync="dp"),
}


class MLP(ParallelModule, grid=GRID, parameters=PARAMETERS):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.comm.slice(x, 0, over="dp")  # (3, 8)
        # models.py:23  return F.mse_loss(self.drop(self.down(F.gelu(self.up(x)))), y)
        up = linear(x, self.model.up.weight, self.model.up.bias)  # (3, 12)
        gelu = F.gelu(up)  # (3, 12)
        down = linear(gelu, self.model.down.weight, self.model.down.bias)  # (3, 8)
        drop = dropout(down, 0.2, True, **self.draw(0, (6, 8), {0: "dp"}))  # (3, 8)
        y = self.comm.slice(y, 0, over="dp")  # (3, 8)
        mse_loss = loss_part("aten.mse_loss.default", drop, y, reduction=2, count=48)  # ()
        mse_loss_1 = self.comm.all_reduce(mse_loss, over="dp", grad=False)  # ()
        return self.finish(mse_loss_1, mse_loss)
