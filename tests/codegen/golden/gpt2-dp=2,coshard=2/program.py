"""GPT2LMHeadModel cut by dp=2,coshard=2."""

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.runtime.operators.attention import attention
from weft.runtime.operators.losses import cross_entropy
from weft.runtime.program.module import Container, Given, ParallelModule, Part
from weft.runtime.random import dropout
from weft.runtime.weights.products import addmm, embedding, linear

GRID = {"dp": 2}
LAYERS = {"transformer.h": 2}
PARAMETERS: dict[str, Part] = {
    "transformer.wte.weight": Part((32, 16), reads=2, sync="dp", tied=("lm_head.weight",)),
    "transformer.wpe.weight": Part((8, 16)),
    "transformer.h.*.ln_1.weight": Part((16,), sync="dp"),
    "transformer.h.*.ln_1.bias": Part((16,), sync="dp"),
    "transformer.h.*.attn.c_attn.bias": Part((48,), sync=None),
    "transformer.h.*.attn.c_attn.weight": Part((16, 48), sync=None),
    "transformer.h.*.attn.c_proj.bias": Part((16,), sync=None),
    "transformer.h.*.attn.c_proj.weight": Part((16, 16), sync=None),
    "transformer.h.*.ln_2.weight": Part((16,), sync="dp"),
    "transformer.h.*.ln_2.bias": Part((16,), sync="dp"),
    "transformer.h.*.mlp.c_fc.bias": Part((64,), sync=None),
    "transformer.h.*.mlp.c_fc.weight": Part((16, 64), sync=None),
    "transformer.h.*.mlp.c_proj.bias": Part((16,), sync=None),
    "transformer.h.*.mlp.c_proj.weight": Part((64, 16), sync=None),
    "transformer.ln_f.weight": Part((16,), sync="dp"),
    "transformer.ln_f.bias": Part((16,), sync="dp"),
}


class GPT2LMHeadModel(ParallelModule, grid=GRID, parameters=PARAMETERS, layers=LAYERS):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        input_ids = self.comm.slice(input_ids, 0, over="dp")  # (3, 8)
        # modeling_gpt2.py:549  input_ids = input_ids.view(-1, input_shape[-1])
        input_ids = input_ids.reshape(3, 8)  # (3, 8)
        # modeling_gpt2.py:569  inputs_embeds = self.wte(input_ids)
        inputs_embeds = embedding(input_ids, self.model.transformer.wte.weight)  # (3, 8, 16)
        # modeling_gpt2.py:573  position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + pa...
        position_ids = torch.arange(8, device=self.device)  # (8,)
        # modeling_gpt2.py:574  position_ids = position_ids.unsqueeze(0)
        position_ids = position_ids.reshape(1, 8)  # (1, 8)
        # modeling_gpt2.py:576  position_embeds = self.wpe(position_ids)
        position_embeds = embedding(position_ids, self.model.transformer.wpe.weight)  # (1, 8, 16)
        # modeling_gpt2.py:577  hidden_states = inputs_embeds + position_embeds.to(inputs_embeds.device)
        to = position_embeds.to(device=self.device, dtype=torch.float32)  # (1, 8, 16)
        to = self.comm.sum_grad(to, over="dp")  # (1, 8, 16)
        hidden_states = inputs_embeds + to  # (3, 8, 16)
        # modeling_gpt2.py:603  hidden_states = self.drop(hidden_states)
        hidden_states = dropout(hidden_states, 0.1, True, **self.draw(0, (6, 8, 16), {0: "dp"}))  # (3, 8, 16)
        labels = self.comm.slice(labels, 0, over="dp")  # (3, 8)
        # loss_utils.py:65  labels = nn.functional.pad(labels, (0, 1), value=ignore_index)
        labels = F.pad(labels, (0, 1), value=-100.0)  # (3, 9)
        # loss_utils.py:66  shift_labels = labels[..., 1:].contiguous()
        slice_1 = labels[:, 1:9]  # (3, 8)
        shift_labels = slice_1.contiguous()  # (3, 8)
        # loss_utils.py:70  shift_labels = shift_labels.view(-1)
        shift_labels = shift_labels.reshape(24)  # (24,)
        # loss_utils.py:71  shift_labels = shift_labels.to(logits.device)
        shift_labels = shift_labels.to(device=self.device, dtype=torch.int64)  # (24,)
        for i, layer in enumerate(self.model.transformer.h):
            hidden_states = self.block(layer, 1 + 3 * i, hidden_states)
        # modeling_gpt2.py:619  hidden_states = self.ln_f(hidden_states)
        hidden_states = F.layer_norm(
            hidden_states, (16,), self.model.transformer.ln_f.weight, self.model.transformer.ln_f.bias
        )  # (3, 8, 16)
        # modeling_gpt2.py:621  hidden_states = hidden_states.view(output_shape)
        hidden_states = hidden_states.reshape(3, 8, 16)  # (3, 8, 16)
        # modeling_gpt2.py:697  logits = self.lm_head(hidden_states)
        logits = linear(hidden_states, self.model.transformer.wte.weight)  # (3, 8, 32)
        # loss_utils.py:61  logits = logits.float()
        logits = logits.to(torch.float32)  # (3, 8, 32)
        # loss_utils.py:69  logits = logits.view(-1, vocab_size)
        logits = logits.reshape(24, 32)  # (24, 32)
        # loss_utils.py:42  loss = nn.functional.cross_entropy(source, target, ignore_index=ignore_index, reduction=r...
        loss = cross_entropy(
            logits,
            shift_labels,
            None,
            reduction="mean",
            ignore_index=-100,
            ranges=((0, 32),),
            num_classes=32,
            rows=(self.comm.along("dp"),),
            reuse=True,
        )  # ()
        loss = self.comm.reached(loss)
        loss_1 = self.comm.all_reduce(loss, over="dp", grad=False)  # ()
        return self.finish(loss_1, loss)

    def block(self, layer: Container, draw: int, hidden_states: Tensor) -> Tensor:
        # modeling_gpt2.py:273  hidden_states = self.ln_1(hidden_states)
        hidden_states_1 = F.layer_norm(hidden_states, (16,), layer.ln_1.weight, layer.ln_1.bias)  # (3, 8, 16)
        # pytorch_utils.py:119 ...
        view = hidden_states_1.reshape(24, 16)  # (24, 16)
        c_attn_bias_parts = self.comm.use_parts(layer.attn.c_attn.bias, "c_attn_bias")  # (24,)
        c_attn_weight_parts = self.comm.use_parts(layer.attn.c_attn.weight, "c_attn_weight")  # (16, 24)
        c_proj_bias_parts = self.comm.use_parts(layer.attn.c_proj.bias, "c_proj_bias")  # (16,)
        c_proj_weight_parts = self.comm.use_parts(layer.attn.c_proj.weight, "c_proj_weight")  # (8, 16)
        x = self.chunks(
            2,
            self.attn_chunk,
            draw,
            view,
            c_attn_bias_parts,
            c_attn_weight_parts,
            c_proj_bias_parts,
            c_proj_weight_parts,
            gives=[Given()],
            recompute=True,
        )  # (24, 16)
        # pytorch_utils.py:120  x = x.view(size_out)
        x = x.reshape(3, 8, 16)  # (3, 8, 16)
        # modeling_gpt2.py:224  attn_output = self.resid_dropout(attn_output)
        attn_output = dropout(x, 0.1, True, **self.draw(draw + 1, (6, 8, 16), {0: "dp"}))  # (3, 8, 16)
        # modeling_gpt2.py:282  hidden_states = attn_output + residual
        hidden_states = attn_output + hidden_states  # (3, 8, 16)
        # modeling_gpt2.py:304  hidden_states = self.ln_2(hidden_states)
        hidden_states_1 = F.layer_norm(hidden_states, (16,), layer.ln_2.weight, layer.ln_2.bias)  # (3, 8, 16)
        # pytorch_utils.py:119 ...
        view = hidden_states_1.reshape(24, 16)  # (24, 16)
        c_fc_bias_parts = self.comm.use_parts(layer.mlp.c_fc.bias, "c_fc_bias")  # (32,)
        c_fc_weight_parts = self.comm.use_parts(layer.mlp.c_fc.weight, "c_fc_weight")  # (16, 32)
        c_proj_bias_parts = self.comm.use_parts(layer.mlp.c_proj.bias, "c_proj_bias")  # (16,)
        c_proj_weight_parts = self.comm.use_parts(layer.mlp.c_proj.weight, "c_proj_weight_1")  # (32, 16)
        x = self.chunks(
            2,
            self.mlp_chunk,
            view,
            c_fc_bias_parts,
            c_fc_weight_parts,
            c_proj_bias_parts,
            c_proj_weight_parts,
            gives=[Given()],
            recompute=True,
        )  # (24, 16)
        # pytorch_utils.py:120 ...
        x = x.reshape(3, 8, 16)  # (3, 8, 16)
        # modeling_gpt2.py:242  hidden_states = self.dropout(hidden_states)
        hidden_states_1 = dropout(x, 0.1, True, **self.draw(draw + 2, (6, 8, 16), {0: "dp"}))  # (3, 8, 16)
        # modeling_gpt2.py:307  hidden_states = residual + feed_forward_hidden_states
        return hidden_states + hidden_states_1  # (3, 8, 16)

    def attn_chunk(
        self,
        chunk: int,
        draw: int,
        view: Tensor,
        c_attn_bias: tuple[Tensor, ...],
        c_attn_weight: tuple[Tensor, ...],
        c_proj_bias: tuple[Tensor, ...],
        c_proj_weight: tuple[Tensor, ...],
    ) -> Tensor:
        # pytorch_utils.py:119 ...
        x = addmm(c_attn_bias[chunk], view, c_attn_weight[chunk])  # (24, 24)
        # pytorch_utils.py:120 ...
        x = x.reshape(3, 8, 24)  # (3, 8, 24)
        # modeling_gpt2.py:185  query_states, key_states, value_states = self.c_attn(hidden_states).split(self.split_...
        query_states, key_states, value_states = x.split((8, 8, 8), 2)
        # modeling_gpt2.py:187  key_states = key_states.view(shape_kv).transpose(1, 2)
        view = key_states.reshape(3, 8, 2, 4)  # (3, 8, 2, 4)
        key_states = view.transpose(1, 2)  # (3, 2, 8, 4)
        # modeling_gpt2.py:188  value_states = value_states.view(shape_kv).transpose(1, 2)
        view = value_states.reshape(3, 8, 2, 4)  # (3, 8, 2, 4)
        value_states = view.transpose(1, 2)  # (3, 2, 8, 4)
        # modeling_gpt2.py:191  query_states = query_states.view(shape_q).transpose(1, 2)
        view = query_states.reshape(3, 8, 2, 4)  # (3, 8, 2, 4)
        query_states = view.transpose(1, 2)  # (3, 2, 8, 4)
        # sdpa_attention.py:174  attn_output = torch.nn.functional.scaled_dot_product_attention(
        attn_output = attention(
            query_states,
            key_states,
            value_states,
            None,
            is_causal=True,
            scale=0.5,
            dropout_p=0.1,
            **self.draw(draw, (6, 4, 8, 8), self.here.at_dp[chunk]),
        )  # (3, 2, 8, 4)
        # sdpa_attention.py:184  attn_output = attn_output.transpose(1, 2).contiguous()
        transpose = attn_output.transpose(1, 2)  # (3, 8, 2, 4)
        attn_output = transpose.contiguous()  # (3, 8, 2, 4)
        # modeling_gpt2.py:222  attn_output = attn_output.reshape(*attn_output.shape[:-2], -1).contiguous()
        attn_output = attn_output.reshape(3, 8, 8)  # (3, 8, 8)
        # pytorch_utils.py:119  x = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        view = attn_output.reshape(24, 8)  # (24, 8)
        return addmm(c_proj_bias[chunk], view, c_proj_weight[chunk])  # (24, 16)

    def mlp_chunk(
        self,
        chunk: int,
        view: Tensor,
        c_fc_bias: tuple[Tensor, ...],
        c_fc_weight: tuple[Tensor, ...],
        c_proj_bias: tuple[Tensor, ...],
        c_proj_weight: tuple[Tensor, ...],
    ) -> Tensor:
        # pytorch_utils.py:119 ...
        x = addmm(c_fc_bias[chunk], view, c_fc_weight[chunk])  # (24, 32)
        # pytorch_utils.py:120 ...
        x = x.reshape(3, 8, 32)  # (3, 8, 32)
        # activations.py:66  return 0.5 * input * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (input + 0.044715 * to...
        mul = x * 0.5  # (3, 8, 32)
        pow_1 = x**3.0  # (3, 8, 32)
        mul_1 = pow_1 * 0.044715  # (3, 8, 32)
        add = x + mul_1  # (3, 8, 32)
        mul_1 = add * 0.7978845608028654  # (3, 8, 32)
        tanh = torch.tanh(mul_1)  # (3, 8, 32)
        add = tanh + 1.0  # (3, 8, 32)
        mul = mul * add  # (3, 8, 32)
        # pytorch_utils.py:119 ...
        view = mul.reshape(24, 32)  # (24, 32)
        return addmm(c_proj_bias[chunk], view, c_proj_weight[chunk])  # (24, 16)
