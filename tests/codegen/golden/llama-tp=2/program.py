"""LlamaForCausalLM cut by tp=2."""

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.runtime.operators.attention import attention
from weft.runtime.operators.losses import cross_entropy
from weft.runtime.program.module import Container, ParallelModule, Part
from weft.runtime.weights.products import embedding, linear

GRID = {"tp": 2}
LAYERS = {"model.layers": 2}
PARAMETERS: dict[str, Part] = {
    "model.embed_tokens.weight": Part((32, 16)),
    "model.layers.*.input_layernorm.weight": Part((16,)),
    "model.layers.*.self_attn.q_proj.weight": Part((16, 16), {0: "tp"}),
    "model.layers.*.self_attn.k_proj.weight": Part((8, 16), {0: "tp"}),
    "model.layers.*.self_attn.v_proj.weight": Part((8, 16), {0: "tp"}),
    "model.layers.*.self_attn.o_proj.weight": Part((16, 16), {1: "tp"}),
    "model.layers.*.post_attention_layernorm.weight": Part((16,)),
    "model.layers.*.mlp.gate_proj.weight": Part((32, 16), {0: "tp"}),
    "model.layers.*.mlp.up_proj.weight": Part((32, 16), {0: "tp"}),
    "model.layers.*.mlp.down_proj.weight": Part((16, 32), {1: "tp"}),
    "model.norm.weight": Part((16,)),
    "lm_head.weight": Part((32, 16), {0: "tp"}),
}
BUFFERS: dict[str, Part] = {
    "model.rotary_emb.inv_freq": Part((2,), persistent=False),
    "model.rotary_emb.original_inv_freq": Part((2,), persistent=False),
}


class LlamaForCausalLM(ParallelModule, grid=GRID, parameters=PARAMETERS, buffers=BUFFERS, layers=LAYERS):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        # modeling_llama.py:370  inputs_embeds: torch.Tensor = self.embed_tokens(input_ids)
        inputs_embeds = embedding(input_ids, self.model.model.embed_tokens.weight)  # (6, 8, 16)
        # modeling_llama.py:377  position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + p...
        position_ids = torch.arange(8, device=self.device)  # (8,)
        # modeling_llama.py:378  position_ids = position_ids.unsqueeze(0)
        position_ids = position_ids.reshape(1, 8)  # (1, 8)
        # modeling_llama.py:111  freqs = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=to...
        unsqueeze = position_ids.reshape(1, 8, 1)  # (1, 8, 1)
        to = unsqueeze.to(torch.float32)  # (1, 8, 1)
        freqs = to * self.model.model.rotary_emb.inv_freq  # (1, 8, 2)
        # modeling_llama.py:112  emb = torch.cat((freqs, freqs), dim=-1)
        emb = torch.cat((freqs, freqs), -1)  # (1, 8, 4)
        # modeling_llama.py:113  cos = emb.cos() * self.attention_scaling
        cos = torch.cos(emb)  # (1, 8, 4)
        # modeling_llama.py:114  sin = emb.sin() * self.attention_scaling
        sin = torch.sin(emb)  # (1, 8, 4)
        for i, layer in enumerate(self.model.model.layers):
            inputs_embeds = self.block(layer, i, inputs_embeds, cos, sin)
        # modeling_llama.py:63 ...
        hidden_states = inputs_embeds.to(torch.float32)  # (6, 8, 16)
        # modeling_llama.py:64 ...
        pow_1 = hidden_states**2  # (6, 8, 16)
        variance_1 = pow_1.mean((-1,), keepdim=True)  # (6, 8, 1)
        # modeling_llama.py:65 ...
        add = variance_1 + 1e-06  # (6, 8, 1)
        rsqrt = torch.rsqrt(add)  # (6, 8, 1)
        hidden_states = hidden_states * rsqrt  # (6, 8, 16)
        # modeling_llama.py:66 ...
        to = hidden_states.to(torch.float32)  # (6, 8, 16)
        mul = self.model.model.norm.weight * to  # (6, 8, 16)
        alias = self.comm.sum_grad(mul, over="tp")  # (6, 8, 16)
        # modeling_llama.py:468  logits = self.lm_head(hidden_states)
        logits = linear(alias, self.model.lm_head.weight)  # (6, 8, 16)
        # loss_utils.py:61  logits = logits.float()
        logits = logits.to(torch.float32)  # (6, 8, 16)
        # loss_utils.py:65  labels = nn.functional.pad(labels, (0, 1), value=ignore_index)
        labels = F.pad(labels, (0, 1), value=-100.0)  # (6, 9)
        # loss_utils.py:66  shift_labels = labels[..., 1:].contiguous()
        slice_1 = labels[:, 1:9]  # (6, 8)
        shift_labels = slice_1.contiguous()  # (6, 8)
        # loss_utils.py:69  logits = logits.view(-1, vocab_size)
        logits = logits.reshape(48, 16)  # (48, 16)
        # loss_utils.py:70  shift_labels = shift_labels.view(-1)
        shift_labels = shift_labels.reshape(48)  # (48,)
        # loss_utils.py:71  shift_labels = shift_labels.to(logits.device)
        shift_labels = shift_labels.to(device=self.device, dtype=torch.int64)  # (48,)
        # loss_utils.py:42  loss = nn.functional.cross_entropy(source, target, ignore_index=ignore_index, reduction=r...
        loss = cross_entropy(
            logits,
            shift_labels,
            None,
            reduction="mean",
            ignore_index=-100,
            ranges=self.here.ranges_tp,
            num_classes=32,
            classes=(self.comm.along("tp"),),
        )  # ()
        loss = self.comm.reached(loss)
        return self.finish(loss, loss)

    def block(self, layer: Container, draw: int, inputs_embeds: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # modeling_llama.py:63  hidden_states = hidden_states.to(torch.float32)
        hidden_states = inputs_embeds.to(torch.float32)  # (6, 8, 16)
        # modeling_llama.py:64  variance = hidden_states.pow(2).mean(-1, keepdim=True)
        pow_1 = hidden_states**2  # (6, 8, 16)
        variance_1 = pow_1.mean((-1,), keepdim=True)  # (6, 8, 1)
        # modeling_llama.py:65  hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        add = variance_1 + 1e-06  # (6, 8, 1)
        rsqrt = torch.rsqrt(add)  # (6, 8, 1)
        hidden_states_1 = hidden_states * rsqrt  # (6, 8, 16)
        # modeling_llama.py:66  return self.weight * hidden_states.to(input_dtype)
        to = hidden_states_1.to(torch.float32)  # (6, 8, 16)
        mul = layer.input_layernorm.weight * to  # (6, 8, 16)
        mul = self.comm.sum_grad(mul, over="tp")  # (6, 8, 16)
        # modeling_llama.py:243  query_states = self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        q_proj = linear(mul, layer.self_attn.q_proj.weight)  # (6, 8, 8)
        view = q_proj.reshape(6, 8, 2, 4)  # (6, 8, 2, 4)
        query_states = view.transpose(1, 2)  # (6, 2, 8, 4)
        # modeling_llama.py:244  key_states = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        k_proj = linear(mul, layer.self_attn.k_proj.weight)  # (6, 8, 4)
        view = k_proj.reshape(6, 8, 1, 4)  # (6, 8, 1, 4)
        key_states = view.transpose(1, 2)  # (6, 1, 8, 4)
        # modeling_llama.py:245  value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        v_proj = linear(mul, layer.self_attn.v_proj.weight)  # (6, 8, 4)
        view = v_proj.reshape(6, 8, 1, 4)  # (6, 8, 1, 4)
        value_states = view.transpose(1, 2)  # (6, 1, 8, 4)
        # modeling_llama.py:145  cos = cos.unsqueeze(unsqueeze_dim)
        cos = cos.reshape(1, 1, 8, 4)  # (1, 1, 8, 4)
        # modeling_llama.py:146  sin = sin.unsqueeze(unsqueeze_dim)
        sin = sin.reshape(1, 1, 8, 4)  # (1, 1, 8, 4)
        # modeling_llama.py:147 ...
        q_embed = query_states * cos  # (6, 2, 8, 4)
        # modeling_llama.py:121  x1 = x[..., : x.shape[-1] // 2]
        x1 = query_states[:, :, :, :2]  # (6, 2, 8, 2)
        # modeling_llama.py:122  x2 = x[..., x.shape[-1] // 2 :]
        x2 = query_states[:, :, :, 2:4]  # (6, 2, 8, 2)
        # modeling_llama.py:123  return torch.cat((-x2, x1), dim=-1)
        neg = -x2  # (6, 2, 8, 2)
        cat = torch.cat((neg, x1), -1)  # (6, 2, 8, 4)
        # modeling_llama.py:147  q_embed = (q * cos) + (rotate_half(q) * sin)
        mul = cat * sin  # (6, 2, 8, 4)
        q_embed = q_embed + mul  # (6, 2, 8, 4)
        # modeling_llama.py:148 ...
        k_embed = key_states * cos  # (6, 1, 8, 4)
        # modeling_llama.py:121 ...
        x1 = key_states[:, :, :, :2]  # (6, 1, 8, 2)
        # modeling_llama.py:122 ...
        x2 = key_states[:, :, :, 2:4]  # (6, 1, 8, 2)
        # modeling_llama.py:123 ...
        neg = -x2  # (6, 1, 8, 2)
        cat = torch.cat((neg, x1), -1)  # (6, 1, 8, 4)
        # modeling_llama.py:148  k_embed = (k * cos) + (rotate_half(k) * sin)
        mul = cat * sin  # (6, 1, 8, 4)
        k_embed = k_embed + mul  # (6, 1, 8, 4)
        # sdpa_attention.py:174  attn_output = torch.nn.functional.scaled_dot_product_attention(
        attn_output = attention(
            q_embed,
            k_embed,
            value_states,
            None,
            is_causal=True,
            scale=0.5,
            enable_gqa=True,
            dropout_p=0.1,
            **self.draw(draw, (6, 4, 8, 8), {1: "tp"}),
        )  # (6, 2, 8, 4)
        # sdpa_attention.py:184  attn_output = attn_output.transpose(1, 2).contiguous()
        transpose = attn_output.transpose(1, 2)  # (6, 8, 2, 4)
        attn_output = transpose.contiguous()  # (6, 8, 2, 4)
        # modeling_llama.py:268  attn_output = attn_output.reshape(*input_shape, -1).contiguous()
        attn_output = attn_output.reshape(6, 8, 8)  # (6, 8, 8)
        # modeling_llama.py:269  attn_output = self.o_proj(attn_output)
        attn_output = linear(attn_output, layer.self_attn.o_proj.weight)  # (6, 8, 16)
        attn_output = self.comm.all_reduce(attn_output, over="tp")  # (6, 8, 16)
        # modeling_llama.py:306  hidden_states = residual + hidden_states
        hidden_states = hidden_states + attn_output  # (6, 8, 16)
        # modeling_llama.py:63 ...
        hidden_states = hidden_states.to(torch.float32)  # (6, 8, 16)
        # modeling_llama.py:64 ...
        pow_1 = hidden_states**2  # (6, 8, 16)
        variance_1 = pow_1.mean((-1,), keepdim=True)  # (6, 8, 1)
        # modeling_llama.py:65 ...
        add = variance_1 + 1e-06  # (6, 8, 1)
        rsqrt = torch.rsqrt(add)  # (6, 8, 1)
        hidden_states_1 = hidden_states * rsqrt  # (6, 8, 16)
        # modeling_llama.py:66 ...
        to = hidden_states_1.to(torch.float32)  # (6, 8, 16)
        mul = layer.post_attention_layernorm.weight * to  # (6, 8, 16)
        mul = self.comm.sum_grad(mul, over="tp")  # (6, 8, 16)
        # modeling_llama.py:164 ...
        down_proj = linear(mul, layer.mlp.gate_proj.weight)  # (6, 8, 16)
        # activations.py:103  return nn.functional.silu(input)
        act_fn = F.silu(down_proj)  # (6, 8, 16)
        # modeling_llama.py:164  down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        up_proj = linear(mul, layer.mlp.up_proj.weight)  # (6, 8, 16)
        mlp = act_fn * up_proj  # (6, 8, 16)
        down_proj = linear(mlp, layer.mlp.down_proj.weight)  # (6, 8, 16)
        down_proj = self.comm.all_reduce(down_proj, over="tp")  # (6, 8, 16)
        # modeling_llama.py:312  hidden_states = residual + hidden_states
        return hidden_states + down_proj  # (6, 8, 16)
