"""Recipe strings: `dp=2,tp=2,sp,zero=3,recompute=layers.*`.

    setting := degree "=" number | "sp" | "megatron" | "zero=" (1 | 2 | 3) | "recompute" ["=" PATTERN]
             | "spread" ["=" "all" | "matrices" | PATTERN]
             | "schedule" "=" name | "stages" "=" MODULE ("+" MODULE)*
             | "zero_groups" "=" number | "zero_parameters" "=" PATTERN
    degree  := "dp" | "tp" | "megatron" | "coshard" | "pp" | "microbatches" | "virtual"
                                                             `megatron=4` is `tp=4,megatron`

In: text. Out: a Recipe, which knows its number of devices (dp * tp * pp) and writes a plan. Unknown, repeated and
impossible settings, and combinations that mean nothing, are refused with the nearest right one.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from weft.errors import PlanError, did_you_mean
from weft.plan.batch import BatchDims
from weft.plan.plan import Plan
from weft.plan.primitives import placed
from weft.plan.recipes.basic import coshard, dp, recompute, tp
from weft.plan.recipes.megatron import megatron
from weft.plan.recipes.pipelines import pp
from weft.plan.recipes.sequence import sp
from weft.plan.recipes.stores import ALL, check_groups, spread, zero

DEGREES = ("dp", "tp", "coshard", "zero_groups", "pp", "microbatches", "virtual")
FLAGS = ("megatron", "sp")
PIPELINE = ("pp", "microbatches", "schedule", "virtual", "stages")
ZERO = ("zero", "zero_groups", "zero_parameters")
KEYS = ("dp", "tp", "megatron", "sp", "coshard", *ZERO, "spread", "recompute", *PIPELINE)
LATER = ("cp", "ep", "cp_kind")
"""Settings of the full language that this version does not have."""
LATER_RECOMPUTE = ("selective",)


@dataclass(frozen=True)
class Recipe:
    """The settings of a recipe string. Degrees of 1 change nothing."""

    dp: int = 1
    tp: int = 1
    coshard: int = 1
    megatron: bool = False
    sp: bool = False
    zero: int = 0
    zero_groups: int = 1
    zero_parameters: str = "**"
    recompute: str = ""
    pp: int = 1
    microbatches: int = 0
    schedule: str = ""
    virtual: int = 1
    stages: tuple[str, ...] = ()
    spread: str = ""

    @property
    def devices(self) -> int:
        """How many devices it needs."""
        return self.dp * self.tp * self.pp

    def write(self, plan: Plan, *, batch_dims: BatchDims | None = None) -> Plan:
        """Write its lines to a plan."""
        if self.pp == 1:
            written = self._stored(self._write(plan, batch_dims))
            return written.cut_batch(self.microbatches) if self.microbatches > 1 else written
        # a stage is laid out as if its devices were all there are
        inside = self._write(Plan(plan.graph, self.dp * self.tp, plan.lines, plan.rules), batch_dims)
        whole = Plan(plan.graph, plan.devices, inside.lines, plan.rules)
        staged = pp(
            whole,
            self.pp,
            microbatches=self.microbatches or self.pp,
            schedule=self.schedule or "1f1b",
            virtual=self.virtual,
            begins=self.stages,
        )
        return self._stored(staged)

    def _write(self, plan: Plan, batch_dims: BatchDims | None) -> Plan:
        if self.dp > 1:
            plan = dp(plan, self.dp, batch_dims=batch_dims)
        if self.tp > 1:
            plan = (megatron if self.megatron else tp)(plan, self.tp)
        if self.sp and self.tp > 1:
            plan = sp(plan)
        if self.coshard > 1:
            plan = coshard(plan, self.coshard)
        if not self.recompute:
            return plan
        with _setting("recompute", self.recompute):
            return recompute(plan, self.recompute)

    def _stored(self, plan: Plan) -> Plan:
        """Where parameters lie. What is spread lies whole on one device, whatever zero says of the others."""
        if self.spread:
            with _setting("spread", self.spread):
                plan = spread(plan, self.spread)
        if self.zero and self.dp > 1:
            groups, names = self.zero_groups, self.zero_parameters
            with _setting("zero", f"{self.zero},zero_groups={groups},zero_parameters={names}"):
                plan = zero(plan, self.zero, groups=groups, parameters=names)
        return plan


def _setting(key: str, value: str) -> AbstractContextManager[None]:
    return placed(f"recipe setting {key}={value}")


def parse_recipe(text: str) -> Recipe:
    """Read a recipe string.

    >>> parse_recipe("dp=2, tp=2").devices
    4
    """
    with placed(f"recipe {text!r}"):
        values = _values(text)
        _check_together(values)
        _check_zero(values)
        return _recipe(values)


def _values(text: str) -> dict[str, str | None]:
    """Each setting and its value; None if it stands alone."""
    values: dict[str, str | None] = {}
    if ";" in text:
        raise PlanError(
            "that is more than one plan", remedy="one plan, its settings joined by commas; weft simulate ranks several"
        )
    for setting in text.split(","):
        key, equals, value = (part.strip() for part in setting.partition("="))
        _check_key(key)
        if key in values:
            raise PlanError(f"{key} is set twice", remedy="set it once")
        alone = key in (*FLAGS, "recompute", "spread")
        if not value and (equals or not alone):
            raise PlanError(f"{key} has no value", remedy=f"write {key}=...")
        values[key] = value if equals else None
    return values


def _recipe(values: dict[str, str | None]) -> Recipe:
    degrees = {key: _degree(key, value) for key, value in values.items() if key in DEGREES and value is not None}
    book = values.get("megatron")
    if book is not None:
        degrees["tp"] = _degree("megatron", book)
    pattern, spreads = values.get("recompute", ""), values.get("spread", "")
    return Recipe(
        **degrees,
        megatron="megatron" in values,
        sp="sp" in values,
        zero=_stage(values["zero"]) if "zero" in values else 0,
        zero_parameters=values.get("zero_parameters") or "**",
        recompute="full" if pattern is None else _pattern(pattern),
        spread=ALL if spreads is None else spreads,
        schedule=values.get("schedule") or "",
        stages=tuple(filter(None, (values.get("stages") or "").split("+"))),
    )


def _check_together(values: dict[str, str | None]) -> None:
    """Settings that say nothing, or two things, together."""
    if values.get("sp") is not None:
        raise PlanError(f"sp={values['sp']}: sp takes no value", remedy="write sp: it has the parts of tp or megatron")
    if "tp" in values and values.get("megatron") is not None:
        raise PlanError(
            f"tp={values['tp']} and megatron={values['megatron']} both say into how many parts to cut",
            remedy=f"write {_words(values | {'megatron': None})} or {_words(values, without='tp')}",
        )
    if "megatron" in values and values["megatron"] is None and "tp" not in values:
        remedy = f"write {_words(values | {'megatron': '2'})}, or {_words({'tp': '2'} | values)}"
        raise PlanError("megatron has no number of parts", remedy=remedy)
    if "sp" in values and not {"tp", "megatron"} & values.keys():
        raise PlanError(
            "sp cuts what lies between tensor-parallel blocks, but there is neither tp nor megatron",
            remedy=f"write {_words({'tp': '2'} | values)} or {_words({'megatron': '2'} | values)}",
        )
    alone = [key for key in ("schedule", "virtual", "stages") if key in values and "pp" not in values]
    if alone:
        raise PlanError(
            f"{alone[0]} says how a pipeline runs, but there is no pp",
            remedy=f"write {_words({'pp': '2'} | values)}",
        )


def _check_zero(values: dict[str, str | None]) -> None:
    """Parts need replicas to lie on, and groups of them several each."""
    alone = [key for key in ZERO[1:] if key in values and "zero" not in values]
    if alone:
        remedy = f"write {_words({'dp': _replicas(values), 'zero': '2'} | values)}"
        raise PlanError(f"{alone[0]} says what zero stores in parts, but there is no zero", remedy=remedy)
    if "zero" in values and "dp" not in values:
        raise PlanError(
            "zero stores parameters in parts over the replicas of dp, but there is no dp",
            remedy=f"write {_words({'dp': _replicas(values)} | values)}",
        )
    groups, replicas = values.get("zero_groups"), values.get("dp")
    if groups is not None and replicas is not None:
        check_groups(_degree("zero_groups", groups), _degree("dp", replicas))


def _words(values: Mapping[str, str | None], without: str = "") -> str:
    """Settings as a recipe: remedies keep what the user has written."""
    said = sorted((key for key in values if key != without), key=KEYS.index)
    return ",".join(key if values[key] is None else f"{key}={values[key]}" for key in said)


def _replicas(values: Mapping[str, str | None]) -> str:
    """As few replicas as do for groups of several."""
    groups = values.get("zero_groups") or "1"
    return str(2 * int(groups)) if groups.isascii() and groups.isdigit() and int(groups) else "2"


def _check_key(key: str) -> None:
    if key in KEYS:
        return
    known = f"available: {', '.join(KEYS)}"
    if key in LATER:
        raise PlanError(f"{key} is not available in this version", remedy=known)
    raise PlanError(
        f"{key!r} is no setting of a recipe" if key else "a setting is empty",
        remedy=did_you_mean(key, (*KEYS, *LATER)) + known,
    )


def _degree(key: str, value: str) -> int:
    if not (value.isascii() and value.isdigit()) or int(value) < 1:
        raise PlanError(f"{key}={value} is no degree", remedy="give a whole number of at least 1")
    return int(value)


def _stage(value: str | None) -> int:
    if value not in ("1", "2", "3"):
        raise PlanError(f"zero={value} is no stage", remedy="write zero=1, zero=2 or zero=3")
    return int(value)


def _pattern(value: str) -> str:
    if value in LATER_RECOMPUTE:
        raise PlanError(
            f"recompute={value} is not available in this version",
            remedy="write recompute for every layer, or give a pattern of module paths: recompute=layers.*",
        )
    return value


def check_devices(recipe: Recipe, devices: int | None, text: str) -> int:
    """The recipe's device count, if it is the one asked for."""
    if devices is not None and devices != recipe.devices:
        raise PlanError(
            f"{_product(recipe)} = {recipe.devices} devices, but {devices} were asked for",
            place=f"recipe {text!r}",
            remedy=f"ask for {recipe.devices} devices, or change a degree",
        )
    return recipe.devices


def _product(recipe: Recipe) -> str:
    degrees = f"dp={recipe.dp} * tp={recipe.tp}"
    return f"{degrees} * pp={recipe.pp}" if recipe.pp > 1 else degrees
