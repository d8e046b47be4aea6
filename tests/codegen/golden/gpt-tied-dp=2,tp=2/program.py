"""GPT cut by dp=2,tp=2."""

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.runtime.layout.cuts import Cut
from weft.runtime.layout.moves import all_reduce, first
from weft.runtime.operators.attention import attention
from weft.runtime.operators.embedding import embedding_part
from weft.runtime.operators.losses import cross_entropy
from weft.runtime.program.module import Container, ParallelModule, Part
from weft.runtime.random import dropout
from weft.runtime.weights.products import embedding, linear

GRID = {"dp": 2, "tp": 2}
LAYERS = {"transformer.h": 2}
PARAMETERS: dict[str, Part] = {
    "transformer.wte.weight": Part((32, 16), {0: "tp"}, reads=2, sync="dp", tied=("lm_head.weight",)),
    "transformer.wpe.weight": Part((8, 16)),
    "transformer.h.*.ln_1.weight": Part((16,), sync="dp"),
    "transformer.h.*.ln_1.bias": Part((16,), sync="dp"),
    "transformer.h.*.attn.c_attn.weight": Part((48, 16), {0: Cut("tp", groups=3)}, sync="dp"),
    "transformer.h.*.attn.c_attn.bias": Part((48,), {0: Cut("tp", groups=3)}, sync="dp"),
    "transformer.h.*.attn.c_proj.weight": Part((16, 16), {1: "tp"}, sync="dp"),
    "transformer.h.*.attn.c_proj.bias": Part((16,), sync=None),
    "transformer.h.*.ln_2.weight": Part((16,), sync="dp"),
    "transformer.h.*.ln_2.bias": Part((16,), sync="dp"),
    "transformer.h.*.mlp.c_fc.weight": Part((64, 16), {0: "tp"}, sync="dp"),
    "transformer.h.*.mlp.c_fc.bias": Part((64,), {0: "tp"}, sync="dp"),
    "transformer.h.*.mlp.c_proj.weight": Part((16, 64), {1: "tp"}, sync="dp"),
    "transformer.h.*.mlp.c_proj.bias": Part((16,), sync=None),
    "transformer.ln_f.weight": Part((16,), sync="dp"),
    "transformer.ln_f.bias": Part((16,), sync="dp"),
}
BUFFERS: dict[str, Part] = {
    "transformer.h.*.attn.mask": Part((1, 1, 8, 8)),
}


class GPT(ParallelModule, grid=GRID, parameters=PARAMETERS, buffers=BUFFERS, layers=LAYERS):
    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        # models.py:129  pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        pos = torch.arange(0, 8, dtype=torch.int64, device=self.device)  # (8,)
        idx = self.comm.slice(idx, 0, over="dp")  # (3, 8)
        # models.py:130  x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        wte = embedding_part(self.model.transformer.wte.weight, idx, ranges=self.here.ranges_tp, num_rows=32)
        wpe = embedding(pos, self.model.transformer.wpe.weight)  # (8, 16)
        wte = self.comm.all_reduce(wte, over="tp")  # (3, 8, 16)
        wpe = self.comm.sum_grad(wpe, over="dp")  # (8, 16)
        add = wte + wpe  # (3, 8, 16)
        x = dropout(add, 0.1, True, **self.draw(0, (6, 8, 16), {0: "dp"}))  # (3, 8, 16)
        for i, layer in enumerate(self.model.transformer.h):
            x = self.block(layer, 1 + 3 * i, x)
        # models.py:46 ...
        ln_f = F.layer_norm(x, (16,), self.model.transformer.ln_f.weight, self.model.transformer.ln_f.bias)
        ln_f = self.comm.sum_grad(ln_f, over="tp")  # (3, 8, 16)
        # models.py:133  logits = self.lm_head(self.transformer.ln_f(x))
        logits = linear(ln_f, self.model.transformer.wte.weight)  # (3, 8, 16)
        # models.py:134  return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        view = logits.reshape(24, 16)  # (24, 16)
        targets = self.comm.slice(targets, 0, over="dp")  # (3, 8)
        view_1 = targets.reshape(24)  # (24,)
        loss = cross_entropy(
            view,
            view_1,
            None,
            reduction="mean",
            ignore_index=-1,
            ranges=self.here.ranges_tp,
            num_classes=32,
            rows=(self.comm.along("dp"),),
            classes=(self.comm.along("tp"),),
        )  # ()
        loss = self.comm.reached(loss)
        loss_1 = self.comm.all_reduce(loss, over="dp", grad=False)  # ()
        return self.finish(loss_1, loss)

    def block(self, layer: Container, draw: int, x: Tensor) -> Tensor:
        # models.py:46  return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)
        ln_1 = F.layer_norm(x, (16,), layer.ln_1.weight, layer.ln_1.bias)  # (3, 8, 16)
        ln_1 = self.comm.sum_grad(ln_1, over="tp")  # (3, 8, 16)
        # models.py:62  q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        c_attn = linear(ln_1, layer.attn.c_attn.weight, layer.attn.c_attn.bias)  # (3, 8, 24)
        q, k, v = c_attn.split((8, 8, 8), 2)
        # models.py:63  k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        view = k.reshape(3, 8, 2, 4)  # (3, 8, 2, 4)
        k = view.transpose(1, 2)  # (3, 2, 8, 4)
        # models.py:64  q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        view = q.reshape(3, 8, 2, 4)  # (3, 8, 2, 4)
        q = view.transpose(1, 2)  # (3, 2, 8, 4)
        # models.py:65  v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        view = v.reshape(3, 8, 2, 4)  # (3, 8, 2, 4)
        v = view.transpose(1, 2)  # (3, 2, 8, 4)
        # models.py:68  y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=dropout_p, is_causal=True)
        y = attention(q, k, v, None, is_causal=True, dropout_p=0.1, **self.draw(draw, (6, 4, 8, 8), {0: "dp", 1: "tp"}))
        # models.py:73  y = y.transpose(1, 2).contiguous().view(B, T, C)
        transpose = y.transpose(1, 2)  # (3, 8, 2, 4)
        contiguous = transpose.contiguous()  # (3, 8, 2, 4)
        y = contiguous.reshape(3, 8, 8)  # (3, 8, 8)
        c_proj_bias = self.comm.use(layer.attn.c_proj.bias, [first("tp")], sync=[all_reduce("dp")])  # (16,)
        # models.py:74  return self.resid_dropout(self.c_proj(y))
        c_proj = linear(y, layer.attn.c_proj.weight, c_proj_bias)  # (3, 8, 16)
        resid_dropout = dropout(c_proj, 0.1, True, **self.draw(draw + 1, (6, 8, 16), {0: "dp"}))  # (3, 8, 16)
        resid_dropout = self.comm.all_reduce(resid_dropout, over="tp")  # (3, 8, 16)
        # models.py:98  x = x + self.attn(self.ln_1(x))
        x = x + resid_dropout  # (3, 8, 16)
        # models.py:46 ...
        ln_2 = F.layer_norm(x, (16,), layer.ln_2.weight, layer.ln_2.bias)  # (3, 8, 16)
        ln_2 = self.comm.sum_grad(ln_2, over="tp")  # (3, 8, 16)
        # models.py:86  return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))
        c_fc = linear(ln_2, layer.mlp.c_fc.weight, layer.mlp.c_fc.bias)  # (3, 8, 32)
        gelu = F.gelu(c_fc)  # (3, 8, 32)
        c_proj_bias = self.comm.use(layer.mlp.c_proj.bias, [first("tp")], sync=[all_reduce("dp")])  # (16,)
        c_proj = linear(gelu, layer.mlp.c_proj.weight, c_proj_bias)  # (3, 8, 16)
        dropout_1 = dropout(c_proj, 0.1, True, **self.draw(draw + 2, (6, 8, 16), {0: "dp"}))  # (3, 8, 16)
        dropout_1 = self.comm.all_reduce(dropout_1, over="tp")  # (3, 8, 16)
        # models.py:99  return x + self.mlp(self.ln_2(x))
        return x + dropout_1  # (3, 8, 16)
