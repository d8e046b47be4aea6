"""Hugging Face models in place of a model file.

    hf:FOLDER                                        config.json there, and its weights if it has any
    hf:NAME                                          the same, of a model in the local cache
    hf:LlamaConfig(hidden_size=64, num_hidden_layers=2)  a configuration class, with settings or without

In: such a text. Out: a module in training mode whose forward gives a loss, and a batch that fits its configuration.
Weights that are nowhere are made under a fixed seed, so every process that loads the same text has the same module.
Promised: nothing is downloaded, no code of the folder runs, and whatever is wrong becomes a ModelFileError.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from weft.compile.hf_shards import has_all_of
from weft.compile.packages import needed
from weft.errors import ModelFileError, WeftError
from weft.runtime.start.initialise import Start, begin
from weft.runtime.start.record import Record

PREFIX = "hf:"
SEED = 0
ROWS, LENGTH = 12, 16
"""Of the batch that is made: rows that 2, 3, 4 and 6 replicas can share."""
MAX_SAID = 400
"""Letters of an error of transformers' that are passed on."""
FORMS = "hf:FOLDER with a config.json, or hf:LlamaConfig(hidden_size=64, num_hidden_layers=2)"
OWN_FILE = "write a model file: model() returns the module, example() a batch with labels"


@dataclass(frozen=True)
class Loaded:
    """What a Subject has of it: a model and its batch; `origin` loads the same anywhere on this machine; `weights`:
    where a hollow one has its values."""

    model: nn.Module
    example: dict[str, Tensor]
    origin: str
    record: Record | None = None
    weights: str | None = None


def load_hugging_face(text: str, *, hollow: bool = False) -> Loaded:
    """The model that `hf:...` names.

    Args:
        hollow: weights are neither made nor read where that can be; `record` and `weights` say where they come from.
    """
    library = needed("transformers", repr(text), error=ModelFileError, install='"weft[hf]"')
    named = text.removeprefix(PREFIX).strip()
    folder = Path(named)
    if not named:
        raise ModelFileError(f"{text!r} names no model", remedy=FORMS)
    if folder.is_dir():
        return _from_folder(library, folder, hollow)
    if folder.suffix == ".json" and folder.is_file():
        raise ModelFileError(f"{named!r} is a file", remedy=f"give its folder: {PREFIX}{folder.parent}")
    name, settings = _parse(text, named)
    if name is not None:
        with _told(text, name, "settings that the configuration class knows, with values that fit each other"):
            config = _configured(_config_class(library, name, text), settings, text)
        return _made(library, config, text, None, hollow)
    return _from_cache(library, named, text)


def _parse(text: str, named: str) -> tuple[str | None, dict[str, Any]]:
    """`LlamaConfig(hidden_size=64)` as a name and its settings; no name if it is something else."""
    if not named.partition("(")[0].strip().endswith("Config"):
        return None, {}
    wrong = ModelFileError(
        f"{text!r} is not a configuration class with settings", remedy="hf:LlamaConfig(hidden_size=64): plain values"
    )
    try:
        found = ast.parse(named, mode="eval").body
        if isinstance(found, ast.Name):
            return found.id, {}
        if not isinstance(found, ast.Call) or not isinstance(found.func, ast.Name) or found.args:
            raise wrong
        return found.func.id, {str(one.arg): ast.literal_eval(one.value) for one in found.keywords if _named(one)}
    except (SyntaxError, ValueError, TypeError):
        raise wrong from None


def _named(keyword: ast.keyword) -> bool:
    if keyword.arg is None:
        raise ValueError("** of settings")
    return True


def _config_class(library: ModuleType, name: str, text: str) -> Any:
    found = getattr(library, name, None)
    if not isinstance(found, type) or not issubclass(found, library.PreTrainedConfig):
        raise ModelFileError(
            f"transformers has no configuration class {name!r}", place=text, remedy="a class such as LlamaConfig"
        )
    return found


def _configured(cls: Any, settings: dict[str, Any], text: str) -> Any:
    """The configuration; transformers itself takes any setting, and does nothing with one that is misspelled."""
    known = cls()
    unknown = [name for name in settings if not hasattr(known, name)]
    if unknown:
        raise ModelFileError(
            f"{cls.__name__} has no setting {', '.join(unknown)}",
            place=text,
            remedy=f"{', '.join(name for name in vars(known) if not name.startswith('_'))}",
        )
    return cls(**settings)


def _from_folder(library: ModuleType, folder: Path, hollow: bool) -> Loaded:
    origin = f"{PREFIX}{folder.resolve()}"
    if not (folder / "config.json").is_file():
        raise ModelFileError(
            f"{str(folder)!r} has no config.json", remedy="give the folder of a model: save_pretrained() writes one"
        )
    with _told(origin, "config.json", "give the folder of a model that this version of transformers knows"):
        config = library.AutoConfig.from_pretrained(folder, local_files_only=True)
    weights = any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "*.safetensors.index.json", "*.bin"))
    return _made(library, config, origin, str(folder.resolve()) if weights else None, hollow)


def _from_cache(library: ModuleType, name: str, text: str) -> Loaded:
    remedy = f"a folder with its files (hf download {name} --local-dir DIR, then {PREFIX}DIR), or {FORMS}"
    try:
        config = library.AutoConfig.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError):
        raise ModelFileError(
            f"no folder {name!r}, and no model of that name on this machine; nothing is downloaded", remedy=remedy
        ) from None
    return _made(library, config, text, name, hollow=False)


@dataclass(frozen=True)
class _Task:
    """A kind of model: which Auto class makes it, and what its batch looks like."""

    auto: str
    batch: Callable[[Any, str], dict[str, Tensor]]


def _tokens(config: Any, place: str) -> dict[str, Tensor]:
    text = config.get_text_config() if callable(vars(type(config)).get("get_text_config")) else config
    size = _setting(text, "vocab_size", place)
    positions = [getattr(text, name, None) for name in ("max_position_embeddings", "n_positions")]
    longest = min((one for one in positions if isinstance(one, int) and one > 0), default=LENGTH)
    # numbers from the upper half of the vocabulary: the first ones are often padding, which models leave out
    ids = torch.randint(size // 2, size, (ROWS, min(LENGTH, longest)), generator=_generator())
    return {"input_ids": ids, "labels": ids.clone()}


def _images(config: Any, place: str) -> dict[str, Tensor]:
    seen = getattr(config, "vision_config", config)
    size, channels = getattr(seen, "image_size", 32), getattr(seen, "num_channels", 3)
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    pixels = torch.randn(ROWS, channels, height, width, generator=_generator())
    return {"pixel_values": pixels, "labels": torch.arange(ROWS) % _setting(config, "num_labels", place)}


def _sentences(config: Any, place: str) -> dict[str, Tensor]:
    return {**_tokens(config, place), "labels": torch.arange(ROWS) % _setting(config, "num_labels", place)}


TASKS = (
    _Task("AutoModelForMaskedLM", _tokens),
    _Task("AutoModelForCausalLM", _tokens),
    _Task("AutoModelForSeq2SeqLM", _tokens),
    _Task("AutoModelForImageClassification", _images),
    _Task("AutoModelForSequenceClassification", _sentences),
)
"""Tried in this order where a configuration does not name its architecture."""


def _made(library: ModuleType, config: Any, origin: str, weights: str | None, hollow: bool) -> Loaded:
    """The module of a configuration, with weights or with values made under the seed."""
    if getattr(config, "use_cache", None):
        config.use_cache = False
    task, architecture = _choose(library, config, origin)
    what = f"making {architecture.__name__}"
    with torch.random.fork_rng(devices=[]), _told(origin, what, "settings that fit each other, or whole files"):
        torch.manual_seed(SEED)
        start, files = Start(nn.Module()), None
        if hollow:
            start = begin(lambda: architecture._from_config(config), SEED)
            files = weights if weights is not None and has_all_of(Path(weights), start.module) else None
        if weights is not None and files is None:
            start = Start(architecture.from_pretrained(weights, config=config, local_files_only=True))
        elif not hollow:
            start = Start(architecture._from_config(config))
    with _told(origin, "making a batch", OWN_FILE):
        example = task.batch(config, origin)
    return Loaded(start.module.train(), example, origin, start.record, files)


def _choose(library: ModuleType, config: Any, place: str) -> tuple[_Task, Any]:
    """The architecture that the configuration names; else the first task that knows it."""
    known = [(task, each) for task in TASKS for each in _architectures(library, task, config)]
    named = getattr(config, "architectures", None) or ()
    for task, each in known:
        if each.__name__ in named:
            return task, each
    if named:
        raise ModelFileError(f"nothing is known of a loss of {', '.join(named)}", place=place, remedy=OWN_FILE)
    for task, each in known:
        if task.auto != "AutoModelForMaskedLM" or not getattr(config, "is_decoder", False):
            return task, each
    raise ModelFileError(
        f"nothing is known of a loss of models of {type(config).__name__}", place=place, remedy=OWN_FILE
    )


def _architectures(library: ModuleType, task: _Task, config: Any) -> tuple[Any, ...]:
    mapping = getattr(library, task.auto)._model_mapping
    if type(config) not in mapping:
        return ()
    found = mapping[type(config)]
    return tuple(found) if isinstance(found, tuple | list) else (found,)


def _setting(config: Any, name: str, place: str) -> int:
    found = getattr(config, name, None)
    if not isinstance(found, int) or found < 1:
        raise ModelFileError(f"{type(config).__name__} has no {name}", place=place, remedy=OWN_FILE)
    return found


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(SEED + 1)


@contextmanager
def _told(place: str, what: str, remedy: str) -> Iterator[None]:
    """Turns whatever transformers raises into a ModelFileError."""
    try:
        yield
    except WeftError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:MAX_SAID]
        raise ModelFileError(f"{what}: {type(error).__name__}: {said}", place=place, remedy=remedy) from error
