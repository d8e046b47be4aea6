"""BertForMaskedLM cut by stored-split."""

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.runtime.layout.moves import all_gather, reduce_scatter, slice_to
from weft.runtime.operators.attention import attention
from weft.runtime.operators.losses import cross_entropy
from weft.runtime.program.module import Container, ParallelModule, Part
from weft.runtime.random import dropout
from weft.runtime.weights.products import embedding, linear

GRID = {"dp": 2}
LAYERS = {"bert.encoder.layer": 2}
PARAMETERS: dict[str, Part] = {
    "bert.embeddings.word_embeddings.weight": Part(
        (32, 16), {0: "dp"}, use=[all_gather(0, "dp")], sync=None, tied=("cls.predictions.decoder.weight",)
    ),
    "bert.embeddings.token_type_embeddings.weight": Part((2, 16), {0: "dp"}, use=[all_gather(0, "dp")], sync=None),
    "bert.embeddings.position_embeddings.weight": Part((8, 16), {0: "dp"}, use=[all_gather(0, "dp")], sync=None),
    "bert.embeddings.LayerNorm.weight": Part((16,), sync="dp"),
    "bert.embeddings.LayerNorm.bias": Part((16,), sync="dp"),
    "bert.encoder.layer.*.attention.self.query.weight": Part((16, 16), {0: "dp"}, use=[all_gather(0, "dp")], sync=None),
    "bert.encoder.layer.*.attention.self.query.bias": Part((16,), sync="dp"),
    "bert.encoder.layer.*.attention.self.key.weight": Part((16, 16), {0: "dp"}, use=[all_gather(0, "dp")], sync=None),
    "bert.encoder.layer.*.attention.self.key.bias": Part((16,), sync="dp"),
    "bert.encoder.layer.*.attention.self.value.weight": Part((16, 16), {0: "dp"}, use=[all_gather(0, "dp")], sync=None),
    "bert.encoder.layer.*.attention.self.value.bias": Part((16,), sync="dp"),
    "bert.encoder.layer.*.attention.output.dense.weight": Part(
        (16, 16), {0: "dp"}, use=[all_gather(0, "dp")], sync=None
    ),
    "bert.encoder.layer.*.attention.output.dense.bias": Part((16,), sync="dp"),
    "bert.encoder.layer.*.attention.output.LayerNorm.weight": Part((16,), sync="dp"),
    "bert.encoder.layer.*.attention.output.LayerNorm.bias": Part((16,), sync="dp"),
    "bert.encoder.layer.*.intermediate.dense.weight": Part((32, 16), {0: "dp"}, use=[all_gather(0, "dp")], sync=None),
    "bert.encoder.layer.*.intermediate.dense.bias": Part((32,), sync="dp"),
    "bert.encoder.layer.*.output.dense.weight": Part((16, 32), {0: "dp"}, use=[all_gather(0, "dp")], sync=None),
    "bert.encoder.layer.*.output.dense.bias": Part((16,), sync="dp"),
    "bert.encoder.layer.*.output.LayerNorm.weight": Part((16,), sync="dp"),
    "bert.encoder.layer.*.output.LayerNorm.bias": Part((16,), sync="dp"),
    "cls.predictions.transform.dense.weight": Part((16, 16), {0: "dp"}, use=[all_gather(0, "dp")], sync=None),
    "cls.predictions.transform.dense.bias": Part((16,), sync="dp"),
    "cls.predictions.transform.LayerNorm.weight": Part((16,), sync="dp"),
    "cls.predictions.transform.LayerNorm.bias": Part((16,), sync="dp"),
    "cls.predictions.bias": Part((32,), sync="dp", tied=("cls.predictions.decoder.bias",)),
}
BUFFERS: dict[str, Part] = {
    "bert.embeddings.position_ids": Part((1, 8), dtype=torch.int64, persistent=False),
    "bert.embeddings.token_type_ids": Part((1, 8), dtype=torch.int64, persistent=False),
}


class BertForMaskedLM(ParallelModule, grid=GRID, parameters=PARAMETERS, buffers=BUFFERS, layers=LAYERS):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        # modeling_bert.py:92  buffered_token_type_ids = self.token_type_ids.expand(position_ids.shape[0], -1)
        buffered_token_type_ids = self.model.bert.embeddings.token_type_ids.expand(1, 8)  # (1, 8)
        # modeling_bert.py:93  buffered_token_type_ids = torch.gather(buffered_token_type_ids, dim=1, index=position_...
        buffered_token_type_ids = buffered_token_type_ids.gather(1, self.model.bert.embeddings.position_ids)  # (1, 8)
        # modeling_bert.py:94  token_type_ids = buffered_token_type_ids.expand(batch_size, seq_length)
        token_type_ids = buffered_token_type_ids.expand(3, 8)  # (3, 8)
        word_embeddings_weight = self.comm.use(
            self.model.bert.embeddings.word_embeddings.weight, [all_gather(0, "dp")], sync=[reduce_scatter(0, "dp")]
        )  # (32, 16)
        input_ids = self.comm.slice(input_ids, 0, over="dp")  # (3, 8)
        # modeling_bert.py:99  inputs_embeds = self.word_embeddings(input_ids)
        inputs_embeds = embedding(input_ids, word_embeddings_weight, padding_idx=0)  # (3, 8, 16)
        token_type_embeddings_weight = self.comm.use(
            self.model.bert.embeddings.token_type_embeddings.weight,
            [all_gather(0, "dp")],
            sync=[reduce_scatter(0, "dp")],
        )  # (2, 16)
        # modeling_bert.py:100  token_type_embeddings = self.token_type_embeddings(token_type_ids)
        token_type_embeddings = embedding(token_type_ids, token_type_embeddings_weight)  # (3, 8, 16)
        # modeling_bert.py:101  embeddings = inputs_embeds + token_type_embeddings
        embeddings = inputs_embeds + token_type_embeddings  # (3, 8, 16)
        position_embeddings_weight = self.comm.use(
            self.model.bert.embeddings.position_embeddings.weight, [all_gather(0, "dp")], sync=[slice_to(0, "dp")]
        )  # (8, 16)
        # modeling_bert.py:103  position_embeddings = self.position_embeddings(position_ids)
        position_embeddings = embedding(self.model.bert.embeddings.position_ids, position_embeddings_weight)
        position_embeddings = self.comm.sum_grad(position_embeddings, over="dp")  # (1, 8, 16)
        # modeling_bert.py:104  embeddings = embeddings + position_embeddings
        embeddings = embeddings + position_embeddings  # (3, 8, 16)
        # modeling_bert.py:106  embeddings = self.LayerNorm(embeddings)
        embeddings = F.layer_norm(
            embeddings,
            (16,),
            self.model.bert.embeddings.LayerNorm.weight,
            self.model.bert.embeddings.LayerNorm.bias,
            1e-12,
        )  # (3, 8, 16)
        # modeling_bert.py:107  embeddings = self.dropout(embeddings)
        embeddings = dropout(embeddings, 0.1, True, **self.draw(0, (6, 8, 16), {0: "dp"}))  # (3, 8, 16)
        for i, layer in enumerate(self.model.bert.encoder.layer):
            embeddings = self.block(layer, 1 + 3 * i, embeddings)
        dense_weight = self.comm.use(
            self.model.cls.predictions.transform.dense.weight, [all_gather(0, "dp")], sync=[reduce_scatter(0, "dp")]
        )  # (16, 16)
        # modeling_bert.py:477  hidden_states = self.dense(hidden_states)
        hidden_states = linear(embeddings, dense_weight, self.model.cls.predictions.transform.dense.bias)  # (3, 8, 16)
        # activations.py:89 ...
        transform_act_fn = F.gelu(hidden_states)  # (3, 8, 16)
        # modeling_bert.py:479  hidden_states = self.LayerNorm(hidden_states)
        hidden_states = F.layer_norm(
            transform_act_fn,
            (16,),
            self.model.cls.predictions.transform.LayerNorm.weight,
            self.model.cls.predictions.transform.LayerNorm.bias,
            1e-12,
        )  # (3, 8, 16)
        # modeling_bert.py:495  hidden_states = self.decoder(hidden_states)
        hidden_states = linear(hidden_states, word_embeddings_weight, self.model.cls.predictions.bias)  # (3, 8, 32)
        # modeling_bert.py:968  masked_lm_loss = loss_fct(prediction_scores.view(-1, self.config.vocab_size), labels....
        view = hidden_states.reshape(24, 32)  # (24, 32)
        labels = self.comm.slice(labels, 0, over="dp")  # (3, 8)
        view_1 = labels.reshape(24)  # (24,)
        masked_lm_loss = cross_entropy(
            view,
            view_1,
            None,
            reduction="mean",
            ignore_index=-100,
            ranges=((0, 32),),
            num_classes=32,
            rows=(self.comm.along("dp"),),
            reuse=True,
        )  # ()
        masked_lm_loss = self.comm.reached(masked_lm_loss)
        masked_lm_loss_1 = self.comm.all_reduce(masked_lm_loss, over="dp", grad=False)  # ()
        return self.finish(masked_lm_loss_1, masked_lm_loss)

    def block(self, layer: Container, draw: int, embeddings: Tensor) -> Tensor:
        query_weight = self.comm.use(
            layer.attention.self.query.weight, [all_gather(0, "dp")], sync=[reduce_scatter(0, "dp")]
        )  # (16, 16)
        # modeling_bert.py:175  query_layer = self.query(hidden_states).view(*hidden_shape).transpose(1, 2)
        query = linear(embeddings, query_weight, layer.attention.self.query.bias)  # (3, 8, 16)
        view = query.reshape(3, 8, 4, 4)  # (3, 8, 4, 4)
        query_layer = view.transpose(1, 2)  # (3, 4, 8, 4)
        key_weight = self.comm.use(
            layer.attention.self.key.weight, [all_gather(0, "dp")], sync=[reduce_scatter(0, "dp")]
        )  # (16, 16)
        # modeling_bert.py:176  key_layer = self.key(hidden_states).view(*hidden_shape).transpose(1, 2)
        key = linear(embeddings, key_weight, layer.attention.self.key.bias)  # (3, 8, 16)
        view = key.reshape(3, 8, 4, 4)  # (3, 8, 4, 4)
        key_layer = view.transpose(1, 2)  # (3, 4, 8, 4)
        value_weight = self.comm.use(
            layer.attention.self.value.weight, [all_gather(0, "dp")], sync=[reduce_scatter(0, "dp")]
        )  # (16, 16)
        # modeling_bert.py:177  value_layer = self.value(hidden_states).view(*hidden_shape).transpose(1, 2)
        value = linear(embeddings, value_weight, layer.attention.self.value.bias)  # (3, 8, 16)
        view = value.reshape(3, 8, 4, 4)  # (3, 8, 4, 4)
        value_layer = view.transpose(1, 2)  # (3, 4, 8, 4)
        # sdpa_attention.py:174  attn_output = torch.nn.functional.scaled_dot_product_attention(
        attn_output = attention(
            query_layer,
            key_layer,
            value_layer,
            None,
            scale=0.5,
            dropout_p=0.1,
            **self.draw(draw, (6, 4, 8, 8), {0: "dp"}),
        )  # (3, 4, 8, 4)
        # sdpa_attention.py:184  attn_output = attn_output.transpose(1, 2).contiguous()
        transpose = attn_output.transpose(1, 2)  # (3, 8, 4, 4)
        attn_output = transpose.contiguous()  # (3, 8, 4, 4)
        # modeling_bert.py:202  attn_output = attn_output.reshape(*input_shape, -1).contiguous()
        attn_output = attn_output.reshape(3, 8, 16)  # (3, 8, 16)
        dense_weight = self.comm.use(
            layer.attention.output.dense.weight, [all_gather(0, "dp")], sync=[reduce_scatter(0, "dp")]
        )  # (16, 16)
        # modeling_bert.py:290  hidden_states = self.dense(hidden_states)
        hidden_states = linear(attn_output, dense_weight, layer.attention.output.dense.bias)  # (3, 8, 16)
        # modeling_bert.py:291  hidden_states = self.dropout(hidden_states)
        hidden_states = dropout(hidden_states, 0.1, True, **self.draw(draw + 1, (6, 8, 16), {0: "dp"}))  # (3, 8, 16)
        # modeling_bert.py:292  hidden_states = self.LayerNorm(hidden_states + input_tensor)
        output = hidden_states + embeddings  # (3, 8, 16)
        hidden_states = F.layer_norm(
            output, (16,), layer.attention.output.LayerNorm.weight, layer.attention.output.LayerNorm.bias, 1e-12
        )  # (3, 8, 16)
        dense_weight = self.comm.use(
            layer.intermediate.dense.weight, [all_gather(0, "dp")], sync=[reduce_scatter(0, "dp")]
        )  # (32, 16)
        # modeling_bert.py:335  hidden_states = self.dense(hidden_states)
        hidden_states_1 = linear(hidden_states, dense_weight, layer.intermediate.dense.bias)  # (3, 8, 32)
        # activations.py:89  return self.act(input)
        intermediate_act_fn = F.gelu(hidden_states_1)  # (3, 8, 32)
        dense_weight = self.comm.use(layer.output.dense.weight, [all_gather(0, "dp")], sync=[reduce_scatter(0, "dp")])
        # modeling_bert.py:348  hidden_states = self.dense(hidden_states)
        hidden_states_1 = linear(intermediate_act_fn, dense_weight, layer.output.dense.bias)  # (3, 8, 16)
        # modeling_bert.py:349  hidden_states = self.dropout(hidden_states)
        hidden_states_1 = dropout(hidden_states_1, 0.1, True, **self.draw(draw + 2, (6, 8, 16), {0: "dp"}))
        # modeling_bert.py:350  hidden_states = self.LayerNorm(hidden_states + input_tensor)
        output = hidden_states_1 + hidden_states  # (3, 8, 16)
        return F.layer_norm(output, (16,), layer.output.LayerNorm.weight, layer.output.LayerNorm.bias, 1e-12)
