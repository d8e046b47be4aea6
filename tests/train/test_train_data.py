"""Data of a run: texts, arrays, what is kept for evaluation; schedules; and the command that puts it together."""

from __future__ import annotations

import itertools
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from weft.capture import capture
from weft.cli import main
from weft.compile.model_file import Subject, load_model_file
from weft.errors import RunError
from weft.runtime.jobs.launch import Pool
from weft.train.command import train_file
from weft.train.data import Choice, Own, Source, make_source
from weft.train.schedule import Rates, Schedule
from weft.train.settings import Settings
from weft.train.text import vocabularies

FILE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.kinds, self.head = nn.Embedding(VOCABULARY, 8), nn.Embedding(2, 8), nn.Linear(8, VOCABULARY)
        self.drop = nn.Dropout(0.5)

    def forward(self, idx, targets):
        flat = idx.view(-1)
        x = self.drop(self.table(flat) + self.kinds(torch.zeros_like(flat)))
        return nn.functional.cross_entropy(self.head(x), targets.flatten())

def model():
    torch.manual_seed(0)
    return Net().double()

def example():
    tokens = torch.zeros(4, 6, dtype=torch.int64)
    return tokens, tokens.clone()
"""
WORDS = "the warp holds, the weft goes over and under; " * 12


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "net.py"
    path.write_text(FILE.replace("VOCABULARY", "24"))
    path.with_name("words.txt").write_text(WORDS)
    return path


@pytest.fixture(scope="module")
def subject(path: Path) -> Subject:
    return load_model_file(path)


def source(subject: Subject, path: Path, name: str, **choice: object) -> Source:
    found = {"vocabulary": {"idx": 24}, **choice}
    return make_source(subject, Choice(str(path.with_name(name)), **found))  # type: ignore[arg-type]


def first(found: Source, count: int = 1, *where: int) -> list:
    return list(itertools.islice(found.batches(*(where or (0, 1, 0))), count))


def test_the_vocabulary_is_the_table_that_an_input_is_looked_up_in(subject: Subject) -> None:
    assert vocabularies(capture(subject.model, subject.example)) == {"idx": 24}


def test_a_text_is_characters_and_the_next_ones(subject: Subject, path: Path) -> None:
    found = source(subject, path, "words.txt")
    alphabet = "".join(sorted(set(WORDS)))
    assert found.alphabet == alphabet
    inputs, targets = first(found)[0]
    assert inputs.shape == targets.shape == (4, 6) and inputs.dtype == torch.int64
    for row, following in zip(inputs.tolist(), targets.tolist(), strict=True):
        piece = "".join(alphabet[token] for token in [*row, following[-1]])
        assert piece in WORDS and row[1:] == following[:-1]


def test_batches_are_a_function_of_step_and_replica(subject: Subject, path: Path) -> None:
    found = source(subject, path, "words.txt")
    ones = [batch[0] for batch in first(found, 6)]
    assert torch.equal(first(found, 1, 0, 1, 4)[0][0], ones[4])
    assert torch.equal(first(found, 1, 1, 2, 2)[0][0], ones[5])
    assert not torch.equal(ones[0], ones[1])
    assert not torch.equal(first(source(subject, path, "words.txt", seed=1))[0][0], ones[0])


def test_bytes_and_labels(path: Path, subject: Subject) -> None:
    tokens = torch.zeros(4, 6, dtype=torch.int64)
    wide = Subject(subject.model, {"input_ids": tokens, "labels": tokens})
    found = source(wide, path, "words.txt", vocabulary={"input_ids": 300})
    batch = first(found)[0]
    assert bytes(batch["input_ids"][0].tolist()).decode() in WORDS and found.alphabet == ""
    assert torch.equal(batch["input_ids"], batch["labels"])


def test_the_end_is_kept_for_evaluation(subject: Subject, path: Path) -> None:
    found, alphabet = source(subject, path, "words.txt", evaluate=True), "".join(sorted(set(WORDS)))
    held = [batch for replica in (0, 1) for batch in found.eval_batches(replica, 2)]
    text = "".join(alphabet[token] for token in held[0][0].flatten().tolist())
    assert len(held) == 2 and text in WORDS[-len(WORDS) // 9 :]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("äöü".encode("latin-1") + WORDS.encode(), "is no text"),
        (bytes(range(32, 120)), "88 different characters, the model knows 24 tokens"),
        (b"short", "too few for a batch of 4"),
        (b"", "too few for a batch of 4"),
    ],
)
def test_texts_that_do_not_fit_are_told(subject: Subject, path: Path, content: bytes, says: str) -> None:
    path.with_name("odd.txt").write_bytes(content)
    with pytest.raises(RunError, match=says):
        source(subject, path, "odd.txt")


def test_a_text_for_numbers_is_refused(path: Path, subject: Subject) -> None:
    with pytest.raises(RunError, match="a text cannot give x"):
        source(Subject(subject.model, {"x": torch.zeros(4, 6)}), path, "words.txt")
    with pytest.raises(RunError, match="no data file"):
        source(subject, path, "nowhere.txt")


def test_arrays_are_rows_in_order(subject: Subject, path: Path) -> None:
    rows = np.arange(10 * 6).reshape(10, 6) % 24
    np.savez(path.with_name("rows.npz"), idx=rows, targets=rows + 0)
    save_file(
        {"idx": torch.from_numpy(rows), "targets": torch.from_numpy(rows + 0)}, path.with_name("rows.safetensors")
    )
    for name in ("rows.npz", "rows.safetensors"):
        ones = [batch[0] for batch in first(source(subject, path, name), 3)]
        assert torch.equal(ones[1], torch.from_numpy(rows[4:8])) and torch.equal(ones[2], ones[0])
    np.save(path.with_name("one.npy"), rows.astype(np.float32))
    alone = Subject(torch.nn.Linear(6, 1), torch.zeros(4, 6))
    assert torch.equal(first(source(alone, path, "one.npy"))[0], torch.from_numpy(rows[:4]).float())


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"idx": np.zeros((8, 6), int)}, "has no array targets: it has idx"),
        ({"idx": np.zeros((8, 5), int), "targets": np.zeros((8, 6), int)}, r"idx has rows of shape \[5\]"),
        ({"idx": np.zeros((8, 6)), "targets": np.zeros((8, 6), int)}, "idx is torch.float64"),
        ({"idx": np.full((8, 6), 24), "targets": np.zeros((8, 6), int)}, "the model knows 0 to 23"),
        ({"idx": np.zeros((8, 6), int), "targets": np.zeros((9, 6), int)}, "8 and 9 rows"),
        ({"idx": np.zeros((3, 6), int), "targets": np.zeros((3, 6), int)}, "too few for a batch of 4"),
    ],
)
def test_arrays_that_do_not_fit_are_told(subject: Subject, path: Path, arrays: dict, says: str) -> None:
    np.savez(path.with_name("odd.npz"), **arrays)
    with pytest.raises(RunError, match=says):
        source(subject, path, "odd.npz")


def test_files_that_are_something_else_are_told(subject: Subject, path: Path) -> None:
    for name in ("odd.npz", "odd.npy", "odd.safetensors"):
        path.with_name(name).write_bytes(b"something else")
        with pytest.raises(RunError, match="cannot be read"):
            source(subject, path, name)


def test_eval_data_of_the_file_is_dealt_in_whole_rounds() -> None:
    subject = Subject(torch.nn.Linear(1, 1), (torch.zeros(1),), eval_data=lambda: iter(range(5)))
    assert [list(Own(subject).eval_batches(replica, 2)) for replica in (0, 1)] == [[0, 2], [1, 3]]


def test_evaluation_needs_something_and_takes_eval_data_first(path: Path, subject: Subject) -> None:
    with pytest.raises(RunError, match="nothing to evaluate on"):
        make_source(subject, Choice(evaluate=True))
    own = replace(subject, eval_data=lambda: iter([7]))
    assert list(source(own, path, "words.txt", evaluate=True).eval_batches(0, 1)) == [7]


def test_an_operator_without_a_rule_is_told_once(tmp_path: Path, pool: Pool) -> None:
    file, said = tmp_path / "odd.py", list[str]()
    file.write_text(FILE.replace("VOCABULARY", "24").replace("self.head(x)", "torch.linalg.matrix_exp(self.head(x))"))
    train_file(file, "dp=2", Settings(steps=1), tell=said.append, pool=pool)
    (warning,) = [line for line in said if line.startswith("warning")]
    assert warning.startswith("warning: linalg_matrix_exp has nothing to cut: it runs copied on every device: ")


def test_schedules() -> None:
    cosine = [Schedule("cosine", 2, 6).factor(step) for step in range(6)]
    assert cosine == pytest.approx([0.5, 1, 1, (1 + math.cos(math.pi / 4)) / 2, 0.5, (1 - math.cos(math.pi / 4)) / 2])
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": 0.4}, {"params": [torch.ones(1)]}], lr=0.2)
    rates = Rates(optimizer, Schedule("linear", 0, 4))
    assert rates.begin(1) == pytest.approx(0.3) and optimizer.param_groups[1]["lr"] == pytest.approx(0.15)
    for wrong in (("sudden", 0, 4), ("cosine", 5, 4)):
        with pytest.raises(RunError):
            Schedule(*wrong)


def test_train_evaluates_without_dropout_on_what_was_kept(path: Path, pool: Pool, subject: Subject) -> None:
    how = Settings(steps=3, lr=0.0, data=str(path.with_name("words.txt")), eval_every=2, schedule="cosine")
    trained = train_file(path, "dp=2", how, pool=pool)
    kept = make_source(subject, Choice(how.data, True, {"idx": 24})).eval_batches(0, 1)
    with torch.no_grad():
        wanted = torch.stack([subject.model.eval()(*batch) for batch in kept]).mean().item()
    subject.model.train()
    # nothing was learned at a rate of 0
    assert [step for step, _ in trained.evaluations] == [2, 3]
    assert [loss for _, loss in trained.evaluations] == pytest.approx([wanted, wanted], rel=1e-11)
    assert trained.unit == "tokens" and trained.per_step == 24 and len(trained.memory) == 2 and min(trained.memory) > 0


def test_the_command_trains_a_hugging_face_model_on_a_text(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = (
        "hf:GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=256, n_positions=8, bos_token_id=0, eos_token_id=0)"
    )
    more = ["--data", str(path.with_name("words.txt")), "--lr", "1e-2", "--clip", "1", "--warmup", "1", "--json"]
    assert main(["train", model, "--plan", "dp=2", "--devices", "2", "--steps", "8", *more]) == 0
    said = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert said["loss_to"] < said["loss_from"] and said["tokens_per_second"] > 0 and len(said["peak_memory"]) == 2


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"clip": 0.0}, "leaves nothing"),
        ({"lr": float("nan")}, "no learning rate"),
        ({"save_every": 2}, "add --save DIR"),
        ({"warmup": 11}, "11 steps of warm-up in 10 steps"),
    ],
)
def test_settings_that_make_no_sense_are_told(settings: dict, says: str) -> None:
    with pytest.raises(RunError, match=says):
        Settings(**settings)


def test_without_tensorboard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(RunError, match="tensorboard, which is not installed"):
        Settings(tensorboard=str(tmp_path))


def test_events_for_tensorboard(path: Path, pool: Pool, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    train_file(path, "dp=2", Settings(steps=2, tensorboard=str(tmp_path / "events")), pool=pool)
    assert any((tmp_path / "events").glob("events.out.*"))
