"""`hf:...` in place of a model file: local folders and configurations, and nothing from elsewhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers

from weft.cli import main
from weft.compile.model_file import load_model_file
from weft.errors import ModelFileError
from weft.runtime.training.step import call

SMALL = "hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32"
LLAMA = f"hf:LlamaConfig({SMALL}, vocab_size=32)"
BERT = f"hf:BertConfig({SMALL}, vocab_size=32, max_position_embeddings=8)"
VIT = f"hf:ViTConfig({SMALL}, image_size=8, patch_size=4, num_labels=6)"


def config() -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32, vocab_size=32
    )


@pytest.mark.parametrize(
    ("text", "name", "shapes"),
    [
        (LLAMA, "LlamaForCausalLM", {"input_ids": (12, 16), "labels": (12, 16)}),
        (BERT, "BertForMaskedLM", {"input_ids": (12, 8), "labels": (12, 8)}),
        (VIT, "ViTForImageClassification", {"pixel_values": (12, 3, 8, 8), "labels": (12,)}),
    ],
)
def test_a_configuration_makes_a_model_with_a_loss(text: str, name: str, shapes: dict) -> None:
    subject, again = load_model_file(text), load_model_file(text)
    assert type(subject.model).__name__ == name and subject.model.training and subject.origin == text
    assert {key: tuple(value.shape) for key, value in subject.example.items()} == shapes
    assert call(subject.model, subject.example).loss.requires_grad
    # every process that loads the text has the same
    for one, other in zip(subject.model.state_dict().values(), again.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_a_folder_with_and_without_weights(tmp_path: Path) -> None:
    torch.manual_seed(7)
    model = transformers.LlamaForCausalLM(config())
    model.save_pretrained(tmp_path / "whole")
    config().save_pretrained(tmp_path / "bare")
    found = load_model_file(f"hf:{tmp_path / 'whole'}")
    assert found.model.training and not found.model.config.use_cache
    assert torch.equal(found.model.lm_head.weight, model.lm_head.weight)
    bare = load_model_file(f"hf:{tmp_path / 'bare'}")
    assert type(bare.model) is type(model) and not torch.equal(bare.model.lm_head.weight, model.lm_head.weight)


def test_verify_and_ops_take_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", LLAMA, "--plan", "dp=2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.strip().splitlines()[-1])["equal"] is True
    assert main(["ops", VIT, "--json"]) == 0
    kinds = json.loads(capsys.readouterr().out)["kinds"]
    assert "conv2d" in {kind["operator"] for kind in kinds}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hf:", "names no model"),
        ("hf:someone/something", "nothing is downloaded"),
        ("hf:NoSuchConfig", "no configuration class 'NoSuchConfig'"),
        ("hf:LlamaConfig(hiden_size=4)", "has no setting hiden_size"),
        ("hf:LlamaConfig(hidden_size='x')", "hidden_size"),
        ("hf:LlamaConfig(16)", "not a configuration class with settings"),
        ("hf:LlamaConfig(hidden_size=print(1))", "not a configuration class with settings"),
        ("hf:LlamaConfig(hidden_size=", "not a configuration class with settings"),
        ("hf:WhisperConfig(is_encoder_decoder=True, architectures=['WhisperModel'])", "a loss of WhisperModel"),
    ],
)
def test_what_cannot_be_loaded_is_told(text: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", text]) == 2
    err = capsys.readouterr().err
    assert says in err and "try:" in err and "Traceback" not in err


def test_bad_folders(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"has no config\.json"):
        load_model_file(f"hf:{tmp_path}")
    (tmp_path / "config.json").write_text("{ not json")
    with pytest.raises(ModelFileError, match=r"config\.json"):
        load_model_file(f"hf:{tmp_path}")
    config().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(ModelFileError, match="LlamaForCausalLM"):
        load_model_file(f"hf:{tmp_path}")


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelFileError, match="transformers is not installed"):
        load_model_file(LLAMA)
