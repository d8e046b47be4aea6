"""What the files of pieces say of themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pieces import compile_pieces
from weft.compile.model_file import load_model_file
from weft.compile.subject import capture_subject
from weft.plan.load import load_plan

EXAMPLES = Path(__file__).parents[2] / "examples"


def texts(model: str, plan: str) -> list[str]:
    """The program of each piece."""
    subject = load_model_file(EXAMPLES / f"{model}.py")
    whole = load_plan(plan, capture_subject(subject))
    files = compile_pieces(subject, whole, lambda graph: load_plan(plan, graph)).files()
    return [content.decode() for name, content in files.items() if name.endswith("program.py")]


def test_where_it_stands_and_when_it_runs() -> None:
    first, last = texts("gpt", "pp=2,tp=2,microbatches=4")
    assert first.startswith(
        '"""GPT, tokens..blocks.0: piece 1 of 2, on devices 0 and 1.\n\n'
        "Gives blocks_0 to blocks.1..head on devices 2 and 3.\nMade by weft"
    )
    assert "Takes blocks_0 from tokens..blocks.0 on devices 0 and 1.\n" in last
    assert "def forward(self, targets: Tensor, blocks_0: Tensor) -> Tensor:" in last
    words = "# A step of devices 2 and 3, F forward and B backward of a micro-batch:\n"
    assert last.endswith(f"\n\n\n{words}# F0 B0 F1 B1 F2 B2 F3 B3\n")


@pytest.mark.parametrize("plan", ["pp=2,microbatches=2,schedule=zb-v", "pp=2,microbatches=2,virtual=2"])
def test_pieces_of_one_device_have_letters(plan: str) -> None:
    found = texts("gpt", plan)
    ends = [text[text.rindex("# A step") :].splitlines() for text in found]
    assert all(len(line) <= 120 for text in found for line in text.splitlines())
    divided = "zb" in plan
    assert ("W weight gradients" in ends[0][0]) == divided
    for number, lines in enumerate(ends):
        assert lines[1].count("is this piece") == 1 and lines[1].count(" is ") == 2
        row = lines[2].removeprefix("# ").split()
        assert len(row) == (12 if divided else 8) and {word[1] for word in row} == {"a", "b"}
        # this piece's own letter says whether it stands first on its device
        early = f"{'a' if number < 2 else 'b'} is this piece"
        assert early in lines[1]
