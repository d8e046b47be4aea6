"""What runs on fake CUDA tensors: every recipe, every schedule, every file under examples/, and what users do in steps.

`SAMPLE` runs always, the rest where `full` tests do. `NOT_RUN` says of files under examples/ why they do not.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.devices.fake_cuda import ROOT, Case
from weft.order.names import NAMES, named

RECIPES = (
    *("dp=2", "dp=3", "dp=2,coshard=2", "coshard=2", "dp=2,recompute", "dp=2,microbatches=2", "microbatches=2"),
    *("tp=2", "tp=3", "tp=2,sp", "tp=2,recompute=**.mlp", "tp=2,megatron", "megatron=2,sp", "megatron=2,sp,recompute"),
    *("dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp=3,zero=3", "dp=2,zero=3,recompute"),
    *("dp=2,zero=3,zero_parameters=blocks.*", "dp=4,zero=2,zero_groups=2", "dp=4,zero=3,zero_groups=2"),
    *("dp=2,zero=2,microbatches=2", "dp=2,zero=3,microbatches=2", "dp=2,spread", "dp=2,zero=3,spread=matrices"),
    *("dp=2,tp=2", "dp=2,tp=2,sp", "dp=2,megatron=2,sp,zero=3,recompute", "dp=2,tp=2,zero=2", "dp=2,tp=2,zero=3"),
    *("pp=2", "pp=2,microbatches=4", "pp=2,recompute", "pp=2,tp=2,microbatches=4", "dp=2,pp=2,microbatches=4"),
    *("dp=2,pp=2,zero=1,microbatches=4", "dp=2,pp=2,zero=2,microbatches=4", "dp=2,pp=2,zero=3,microbatches=4"),
    *("pp=2,virtual=2,microbatches=4,schedule=interleaved", "pp=2,stages=blocks.1"),
)
"""On gpt.py."""
TRAINED = [name for name in NAMES if named(name).trains and name != "nf1b"]
"""Schedules; `nf1b` is for models that run again."""
SETTINGS = (
    ("clip", "evaluate"),
    ("accumulate", "clip"),
    ("bf16", "clip", "evaluate"),
    ("bf16", "accumulate"),
    ("fp16", "scale", "clip"),
    ("fp16", "scale", "evaluate"),
)
SET = ("dp=2,tp=2", "dp=2,zero=3", "dp=2,pp=2,zero=2,microbatches=4", "pp=2,microbatches=4,schedule=zb-h1")
MODELS = ("dp=2", "tp=2", "dp=2,zero=3", "pp=2,microbatches=2")
"""Under which every model file trains, is clipped and evaluated."""
BY_HAND = {
    **dict.fromkeys(("coshard", "recomputed", "pipeline", "looped_pipeline", "zero_bubble", "own_order"), 2),
    **dict.fromkeys(("related_order", "interlaced", "placed"), 2),
    **dict.fromkeys(("uneven", "growing_stages"), 3),
}
"""Devices of plans under examples/plans, on gpt.py; the others are for 4."""
OTHER_MODELS = {"recycling": ("models/evoformer.py", 2), "experts": ("moe.py", 4)}
WAITS = {"models/mixtral.py": "experts.py", "models/deepseek_v3.py": "experts.py"}
"""Where the host waits for a number all the same: for the sizes of groups of rows that torch's kernel does not take."""
PLANS = (("megatron", "gpt.py", 2), ("uneven", "mlp.py", 3), ("stored_in_parts", "mlp.py", 2))
"""Functions of plans.py, a model for each, and devices."""
NOT_RUN = {"gan.py": "two parallel modules in a loop of its own; it is no model file"}


def set_to(file: str, plan: str, words: tuple[str, ...], **where: int) -> Case:
    precision = next((word for word in words if word in ("bf16", "fp16")), None)
    return Case(file, plan, precision=precision, does=tuple(one for one in words if one != precision), **where)


def model_files() -> list[str]:
    """Files under examples/ that are there to be run, by their path below it."""
    found = [*ROOT.glob("examples/*.py"), *ROOT.glob("examples/models/*.py")]
    return sorted(str(one.relative_to(ROOT / "examples")) for one in found)


def plan_files() -> Iterator[Case]:
    yield from (Case(file, f"examples/plans.py:{name}", devices, does=("clip",)) for name, file, devices in PLANS)
    for path in sorted(ROOT.glob("examples/plans/*.py")):
        file, devices = OTHER_MODELS.get(path.stem, ("gpt.py", BY_HAND.get(path.stem, 4)))
        yield Case(file, f"examples/plans/{path.name}:plan", devices, rank=devices - 1, does=("clip",))


def everything() -> Iterator[Case]:
    """All cases."""
    yield from (Case("gpt.py", plan) for plan in RECIPES)
    for name in TRAINED:
        yield from (Case("gpt.py", f"pp=2,microbatches=4,schedule={name}", rank=rank) for rank in (0, 1))
        yield Case("gpt.py", f"dp=2,tp=2,pp=2,zero=2,microbatches=4,schedule={name}", rank=5)
    for plan in SET:
        yield from (set_to("gpt.py", plan, words, rank=1) for words in SETTINGS)
    for plan in ("dp=2", "pp=2,microbatches=4", "dp=2,zero=3"):
        yield Case("gpt.py", plan, replicas=2, does=("clip", "evaluate"))
    for file in sorted(set(model_files()) - {*NOT_RUN, "plans.py"}):
        yield from (Case(file, plan, does=("clip", "evaluate")) for plan in MODELS)
    yield from plan_files()


SAMPLE = (
    Case("gpt.py", "dp=2,tp=2"),
    Case("gpt.py", "dp=2,pp=2,zero=2,microbatches=4"),
    *(set_to("gpt.py", plan, words, rank=1) for plan, words in (("dp=2,zero=3", SETTINGS[0]), (SET[0], SETTINGS[4]))),
    set_to("gpt.py", SET[3], SETTINGS[3], rank=1),
    Case("models/resnet.py", "dp=2", does=("clip", "evaluate")),
)
