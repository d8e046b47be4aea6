"""Six generated programs and a pipeline, word for word: a refactoring may not change them. `make golden` rewrites them.

They are also what a person sees: formatted as ruff leaves them, with types that hold.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance.subjects import HAND_WRITTEN, prepared
from tests.pieces import compile_pieces
from weft.codegen import generate
from weft.codegen.emit import emit_piece
from weft.lower import lower
from weft.plan.load import load_plan

GOLDEN = Path(__file__).parent / "golden"
PAIRS = (
    ("mlp", "dp=2"),
    ("gpt-tied", "dp=2,tp=2"),
    ("gpt-untied", "megatron"),
    ("gpt2", "dp=2,coshard=2"),
    ("llama", "tp=2"),
    ("bert", "stored-split"),
)
RETURNS = ("gpt-tied", "dp=2,coshard=2,recompute=transformer.h.*")
"""Methods that return what is recomputed, and what chunks give."""
PIPELINES = (("gpt-tied", "pp=2,microbatches=4,schedule=1f1b"),)


@pytest.mark.parametrize(("model", "plan"), PAIRS)
def test_golden(model: str, plan: str, request: pytest.FixtureRequest) -> None:
    _, graph, _ = prepared(model)
    made = HAND_WRITTEN[plan](graph) if plan in HAND_WRITTEN else load_plan(plan, graph)
    files, _ = emit_piece(lower(made), title=f"{graph.name} cut by {plan}.")
    folder = GOLDEN / f"{model}-{plan}"
    for name in ("program.py", "parts.json"):
        path = folder / name
        if request.config.getoption("--golden"):
            folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(files[name])
        assert path.exists(), f"no expected text {path}: run `make golden` and read the difference"
        assert files[name] == path.read_bytes(), f"{path} changed: run `make golden` and read the difference"


@pytest.mark.parametrize(("model", "plan"), PIPELINES)
def test_golden_pipeline(model: str, plan: str, request: pytest.FixtureRequest) -> None:
    subject, graph, _ = prepared(model)
    made = compile_pieces(subject, load_plan(plan, graph), lambda graph: load_plan(plan, graph))
    files = made.files()
    for name in ("piece0/program.py", "piece1/program.py"):
        path = GOLDEN / f"{model}-{plan}" / name
        if request.config.getoption("--golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(files[name])
        assert path.exists(), f"no expected text {path}: run `make golden` and read the difference"
        assert files[name] == path.read_bytes(), f"{path} changed: run `make golden` and read the difference"


def test_formatted() -> None:
    command = [sys.executable, "-m", "ruff", "format", "--diff", "--quiet", "--isolated", "--line-length=120"]
    found = subprocess.run([*command, str(GOLDEN)], check=False, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_linted() -> None:
    """Nothing imported in vain, nothing undefined, imports in order."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--line-length=130", "--select=E,F,W,I"]
    command += ["--config", 'lint.isort.known-first-party=["weft"]']
    found = subprocess.run([*command, str(GOLDEN)], check=False, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_a_source_line_is_told_once() -> None:
    for path in GOLDEN.rglob("program.py"):
        told = re.findall(r"^ *# (\S+\.py:\d+)  .", path.read_text(), re.MULTILINE)
        assert len(told) == len(set(told)), path


def test_types_hold(tmp_path: Path) -> None:
    for path in GOLDEN.rglob("program.py"):
        name = re.sub(r"\W", "_", str(path.parent.relative_to(GOLDEN)))
        (tmp_path / f"{name}.py").write_bytes(path.read_bytes())
    assert len(list(tmp_path.iterdir())) == len(PAIRS) + 2 * len(PIPELINES)
    model, plan = RETURNS
    text = generate(lower(load_plan(plan, prepared(model)[1])))["program.py"].decode()
    assert "return self.recompute(" in text and "return self.chunks(" in text
    (tmp_path / "returns.py").write_text(text)
    # with the options of `make check`, whose cache is used
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(tmp_path)]
    found = subprocess.run(command, check=False, capture_output=True, text=True, cwd=GOLDEN.parents[2])
    wrong = [line for line in found.stdout.splitlines() if line.startswith(str(tmp_path))]
    assert not wrong, "\n".join(wrong)
    assert found.returncode in (0, 1), found.stderr
