"""`make demo`: what it says is true."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_demo(tmp_path: Path) -> None:
    weft = tmp_path / "weft"
    weft.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m weft.cli "$@"\n')
    weft.chmod(0o755)
    found = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "COLUMNS": "140"}
    environment = {**os.environ, **found}
    demo = subprocess.run(
        [ROOT / "examples" / "demo.sh"], env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert demo.returncode == 0, demo.stdout + demo.stderr
    parts = re.split(r"^\S*(\d)\. ", demo.stdout, flags=re.MULTILINE)
    said = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert set(said) == set("12345678")
    assert "linear" in said["1"] and "scaled_dot_product_attention" in said["1"]
    assert re.search(r"blocks\.\*\.attention\.qkv +x2 .*tp: n 2", said["2"]) and "0-3" in said["2"]
    assert re.search(r"[1-9]\d* collectives matched", said["2"]) and re.search(r"[1-9]\d* sums complete", said["2"])
    differences = re.findall(r"^(loss|gradients|weights) +(\S+)", said["3"], flags=re.MULTILINE)
    assert [name for name, _ in differences] == ["loss", "gradients", "weights"]
    assert all(float(size) < 1e-9 for _, size in differences)
    assert "gloo processes" in said["3"] and "equal to one device" in said["3"]
    assert "equal to one device (" not in said["4"] and "detected" in said["4"] and "program.py" in said["4"]
    losses = [tuple(map(float, found)) for found in re.findall(r"loss (\S+) -> (\d+\.\d+)", said["5"])]
    assert len(losses) == 2 and all(last < first for first, last in losses)
    assert abs(losses[0][1] - losses[1][1]) < 1e-3, "four processes and one learn the same"
    assert "F0 F1" in said["6"] and "idle" in said["6"] and "equal to one device" in said["6"]
    lines = int(re.search(r"is (\d+) lines", demo.stdout).group(1))  # type: ignore[union-attr]
    code = subprocess.run(
        [weft, "show", "examples/gpt.py", "--plan", "dp=2,tp=2", "--code"],
        env=environment,
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    ).stdout
    assert lines == len(code.splitlines())
