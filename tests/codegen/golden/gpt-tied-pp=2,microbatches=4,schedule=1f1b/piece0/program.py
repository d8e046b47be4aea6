"""GPT, transformer.wte..h.0: piece 1 of 2, on device 0.

Gives h_0 to transformer.h.1..lm_head on device 1.
Made by weft; edit freely, then verify it again.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.runtime.operators.attention import attention
from weft.runtime.program.module import ParallelModule, Part
from weft.runtime.random import dropout
from weft.runtime.weights.products import embedding, linear

GRID: dict[str, int] = {}
LAYERS = {"transformer.h": 2}
PARAMETERS: dict[str, Part] = {
    "transformer.wte.weight": Part((32, 16), tied=("lm_head.weight",)),
    "transformer.wpe.weight": Part((8, 16)),
    "transformer.h.0.ln_1.weight": Part((16,)),
    "transformer.h.0.ln_1.bias": Part((16,)),
    "transformer.h.0.attn.c_attn.weight": Part((48, 16)),
    "transformer.h.0.attn.c_attn.bias": Part((48,)),
    "transformer.h.0.attn.c_proj.weight": Part((16, 16)),
    "transformer.h.0.attn.c_proj.bias": Part((16,)),
    "transformer.h.0.ln_2.weight": Part((16,)),
    "transformer.h.0.ln_2.bias": Part((16,)),
    "transformer.h.0.mlp.c_fc.weight": Part((64, 16)),
    "transformer.h.0.mlp.c_fc.bias": Part((64,)),
    "transformer.h.0.mlp.c_proj.weight": Part((16, 64)),
    "transformer.h.0.mlp.c_proj.bias": Part((16,)),
}
BUFFERS: dict[str, Part] = {
    "transformer.h.*.attn.mask": Part((1, 1, 8, 8)),
}


class GPT_transformer_wte__h_0(ParallelModule, grid=GRID, parameters=PARAMETERS, buffers=BUFFERS, layers=LAYERS):
    def forward(self, idx: Tensor) -> Tensor:
        # models.py:129  pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        pos = torch.arange(0, 8, dtype=torch.int64, device=self.device)  # (8,)
        # models.py:130  x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        wte = embedding(idx, self.model.transformer.wte.weight)  # (2, 8, 16)
        wpe = embedding(pos, self.model.transformer.wpe.weight)  # (8, 16)
        add = wte + wpe  # (2, 8, 16)
        x = dropout(add, 0.1, True, **self.draw(0, (2, 8, 16)))  # (2, 8, 16)
        # models.py:46  return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)
        ln_1 = F.layer_norm(x, (16,), self.model.transformer.h[0].ln_1.weight, self.model.transformer.h[0].ln_1.bias)
        # models.py:62  q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        c_attn = linear(
            ln_1, self.model.transformer.h[0].attn.c_attn.weight, self.model.transformer.h[0].attn.c_attn.bias
        )  # (2, 8, 48)
        q, k, v = c_attn.split((16, 16, 16), 2)
        # models.py:63  k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        view = k.reshape(2, 8, 4, 4)  # (2, 8, 4, 4)
        k = view.transpose(1, 2)  # (2, 4, 8, 4)
        # models.py:64  q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        view = q.reshape(2, 8, 4, 4)  # (2, 8, 4, 4)
        q = view.transpose(1, 2)  # (2, 4, 8, 4)
        # models.py:65  v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        view = v.reshape(2, 8, 4, 4)  # (2, 8, 4, 4)
        v = view.transpose(1, 2)  # (2, 4, 8, 4)
        # models.py:68  y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=dropout_p, is_causal=True)
        y = attention(q, k, v, None, is_causal=True, dropout_p=0.1, **self.draw(1, (2, 4, 8, 8)))  # (2, 4, 8, 4)
        # models.py:73  y = y.transpose(1, 2).contiguous().view(B, T, C)
        transpose = y.transpose(1, 2)  # (2, 8, 4, 4)
        contiguous = transpose.contiguous()  # (2, 8, 4, 4)
        y = contiguous.reshape(2, 8, 16)  # (2, 8, 16)
        # models.py:74  return self.resid_dropout(self.c_proj(y))
        c_proj = linear(y, self.model.transformer.h[0].attn.c_proj.weight, self.model.transformer.h[0].attn.c_proj.bias)
        resid_dropout = dropout(c_proj, 0.1, True, **self.draw(2, (2, 8, 16)))  # (2, 8, 16)
        # models.py:98  x = x + self.attn(self.ln_1(x))
        x = x + resid_dropout  # (2, 8, 16)
        # models.py:46 ...
        ln_2 = F.layer_norm(x, (16,), self.model.transformer.h[0].ln_2.weight, self.model.transformer.h[0].ln_2.bias)
        # models.py:86  return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))
        c_fc = linear(ln_2, self.model.transformer.h[0].mlp.c_fc.weight, self.model.transformer.h[0].mlp.c_fc.bias)
        gelu = F.gelu(c_fc)  # (2, 8, 64)
        c_proj = linear(
            gelu, self.model.transformer.h[0].mlp.c_proj.weight, self.model.transformer.h[0].mlp.c_proj.bias
        )  # (2, 8, 16)
        dropout_1 = dropout(c_proj, 0.1, True, **self.draw(3, (2, 8, 16)))  # (2, 8, 16)
        # models.py:99  return x + self.mlp(self.ln_2(x))
        add = x + dropout_1  # (2, 8, 16)
        return self.outputs(add)


# A step of device 0, F forward and B backward of a micro-batch:
# F0 F1 B0 F2 B1 F3 B2 B3
