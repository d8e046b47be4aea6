"""The folder of a saved run: which files it has, and which of them are the newest.

    DIR/latest.json                        which folder is the newest
    DIR/step-N/model.safetensors           whole tensors under the original names: any program can load it
    DIR/step-N/optimizer.safetensors       PARAMETER/KEY, whole
    DIR/step-N/training.json               step, seed, kind of optimizer, what else was saved

In: a directory. Out: the newest folder in it. What is cut short, or is no such folder, is a RunError that names it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weft.errors import RunError

FORMAT = "weft training run 1"
LATEST, MODEL, OPTIMIZER, TRAINING = "latest.json", "model.safetensors", "optimizer.safetensors", "training.json"
GIVE = "give a directory that weft.save or weft train --save has written"


def newest(directory: Path) -> Path:
    """The folder that was written last."""
    name = read_json(directory / LATEST).get("folder")
    if not isinstance(name, str) or "/" in name or not (directory / name).is_dir():
        raise RunError(f"{directory / LATEST} names no folder beside it", remedy=GIVE)
    return directory / name


def saved_model(directory: Path) -> Path | None:
    """The weights of a saved run, or of one of its folders; None if it is something else."""
    if (directory / LATEST).is_file():
        directory = newest(directory)
    return directory / MODEL if (directory / TRAINING).is_file() else None


def read_json(path: Path) -> dict[str, Any]:
    """What a file of a saved run says."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise RunError(f"{path} is cut short, or no part of a saved run", place=str(path), remedy=GIVE)
    return found
