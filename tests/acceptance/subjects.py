"""The models that Core promises to train on many devices to the same numbers, dropout on, and plans written by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import transformers
from torch import nn

from tests.models import GPT, MLP, GPTConfig
from weft.capture import capture
from weft.compile.model_file import Subject
from weft.ir.graph import Graph, Op
from weft.plan.plan import Plan
from weft.plan.primitives import cut
from weft.plan.recipes.basic import dp
from weft.verify.compare import Sample
from weft.verify.reference import run_reference

VOCABULARY, WIDTH, HEADS, LENGTH, ROWS = 32, 16, 4, 8, 6


def mlp() -> Subject:
    return Subject(MLP(8, 12, dropout=0.2), (torch.randn(ROWS, 8), torch.randn(ROWS, 8)))


def gpt(tied: bool) -> Subject:
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
    model = GPT(GPTConfig(block_size=LENGTH, vocab_size=VOCABULARY, n_embd=WIDTH, n_head=HEADS, tied=tied))
    return Subject(model, (ids, ids.roll(-1, 1)))


def hugging_face(model: nn.Module) -> Subject:
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
    labels = ids.clone()
    # rows with different numbers of counted tokens: a mean of means would show
    labels[0, :3] = -100
    labels[1, 0] = -100
    return Subject(model, {"input_ids": ids, "labels": labels})


def gpt2() -> Subject:
    config = transformers.GPT2Config(
        n_layer=2, n_head=HEADS, n_embd=WIDTH, vocab_size=VOCABULARY, n_positions=LENGTH, bos_token_id=0, eos_token_id=1
    )
    return hugging_face(transformers.GPT2LMHeadModel(config))


def llama() -> Subject:
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        vocab_size=VOCABULARY,
        attention_dropout=0.1,
    )
    return hugging_face(transformers.LlamaForCausalLM(config))


def bert() -> Subject:
    config = transformers.BertConfig(
        num_hidden_layers=2,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_attention_heads=HEADS,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
    )
    return hugging_face(transformers.BertForMaskedLM(config))


def qwen3() -> Subject:
    config = transformers.Qwen3Config(
        num_hidden_layers=2,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        head_dim=8,
        vocab_size=VOCABULARY,
        attention_dropout=0.1,
        tie_word_embeddings=True,
    )
    return hugging_face(transformers.Qwen3ForCausalLM(config))


def vit() -> Subject:
    config = transformers.ViTConfig(
        num_hidden_layers=2,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_attention_heads=HEADS,
        image_size=8,
        patch_size=4,
        num_labels=6,
    )
    batch = {"pixel_values": torch.randn(ROWS, 3, 8, 8), "labels": torch.randint(0, 6, (ROWS,))}
    return Subject(transformers.ViTForImageClassification(config), batch)


MODELS: dict[str, Callable[[], Subject]] = {
    "mlp": mlp,
    "gpt-tied": lambda: gpt(tied=True),
    "gpt-untied": lambda: gpt(tied=False),
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
}
MORE_MODELS: dict[str, Callable[[], Subject]] = {"qwen3": qwen3, "vit": vit}
"""For the matrix of recipes only."""

RECIPES = ("dp=2", "dp=3", "tp=2", "tp=4", "dp=2,tp=2", "coshard=4", "dp=2,coshard=2")


@cache
def prepared(name: str) -> tuple[Subject, Graph, Sample]:
    """A subject, its graph, and what the eager module does in two steps."""
    torch.manual_seed(1)
    subject = (MODELS | MORE_MODELS)[name]()
    subject.model.train()
    return subject, capture(subject.model, subject.example), run_reference(subject, seed=7, wide=True)


# Plans by hand. They find the linear-like ops of any of the models: `k` is what they sum over, `n` what they make.


def linears(graph: Graph) -> list[Op]:
    """Ops that multiply by a trained matrix."""
    return [
        op
        for op in graph.ops
        if op.kind in ("linear", "addmm") and any(name in graph.parameter_tensors for name in op.inputs)
    ]


def blocks(graph: Graph) -> list[tuple[list[Op], Op]]:
    """Pairs of (ops that widen, the op that comes back) as in attention and MLP: what Megatron cuts together."""
    down = ("c_proj", "o_proj", "down_proj", "attention.output.dense", "output.dense", "down")
    up = ("c_attn", "c_fc", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "query", "key", "value", "up")
    up += ("intermediate.dense",)
    found: list[tuple[list[Op], Op]] = []
    waiting: list[Op] = []
    for op in linears(graph):
        if any(op.path.endswith(name) for name in down):
            found.append((waiting, op))
            waiting = []
        elif any(op.path.endswith(name) for name in up):
            waiting.append(op)
    return found


def megatron(graph: Graph) -> Plan:
    """Columns, then rows, over two devices; the ops between follow."""
    plan = Plan(graph, 2)
    for ups, down in blocks(graph):
        for op in ups:
            # a fused query-key-value projection is three groups of heads
            groups = 3 if op.path.endswith("c_attn") else 1
            attention = any(op.path.endswith(name) for name in ("c_attn", "q_proj", "query", "key", "value"))
            kv = op.path.endswith(("k_proj", "v_proj"))
            units = HEADS if attention else HEADS // 2 if kv else None
            plan = plan.trans(op, cut("n", 2, axis="tp", groups=groups, units=units))
        plan = plan.trans(down, cut("k", 2, axis="tp"))
    return plan


def uneven(graph: Graph) -> Plan:
    """Two ops cut unevenly over three devices."""
    first, second = linears(graph)[:2]
    plan = Plan(graph, 3).trans(first, cut("n", [3, 1, 2], axis="a")).assign(first, [0, 1, 2])
    return plan.trans(second, cut("k", [1, 0, 3], axis="b")).assign(second, [2, 1, 0])


def different_grids(graph: Graph) -> Plan:
    """Neighbours on different grids of four devices."""
    first, second, third = (linears(graph) * 2)[:3]
    plan = Plan(graph, 4).trans(first, cut("n", 4, axis="x")).assign(first, [3, 1, 0, 2])
    plan = plan.trans(second, cut("k", 2, axis="y"), cut("n", 2, axis="z")).assign(second, [[0, 1], [2, 3]])
    if third not in (first, second):
        plan = plan.trans(third, cut("n", 2, axis="y")).assign(third, [1, 3])
    return plan


def stored_split(graph: Graph) -> Plan:
    """Data parallel, every matrix stored in two parts and used whole."""
    plan = dp(Plan(graph, 2), 2)
    for parameter in graph.parameters:
        if len(graph.tensors[parameter.tensor].sizes) == 2:
            plan = plan.store(parameter.names[0], cut(0, 2, axis="dp"))
    return plan


HAND_WRITTEN: dict[str, Callable[[Graph], Plan]] = {
    "megatron": megatron,
    "uneven": uneven,
    "different-grids": different_grids,
    "stored-split": stored_split,
}
