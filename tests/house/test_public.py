"""The public names: all there, resolved late, rooms callable."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import weft

ROOT = Path(__file__).parents[2]


@pytest.mark.smoke
def test_every_public_name_resolves() -> None:
    assert all(getattr(weft, name) is not None for name in weft.__all__)
    assert set(dir(weft)) == set(weft.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = weft.nonsense


@pytest.mark.smoke
@pytest.mark.parametrize("first", ["import weft", "import weft.verify", "from weft.verify.compare import Result"])
def test_rooms_are_functions_too_however_they_were_imported(first: str) -> None:
    code = f"{first}; import weft; print(callable(weft.verify), callable(weft.capture), weft.verify.verify.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout.split() == ["True", "True", "verify"], done.stderr


def test_importing_weft_loads_nothing_heavy() -> None:
    code = "import sys, weft; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout.strip() == "False", done.stderr
