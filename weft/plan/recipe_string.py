"""Recipe strings: `dp=2,tp=2,coshard=2,recompute=layers.*`.

In: text. Out: a Recipe, which knows its number of devices (dp * tp) and writes a plan. Unknown, repeated and
impossible settings are refused with the nearest right one.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from weft.errors import PlanError
from weft.plan.plan import Plan
from weft.plan.recipes import BatchDims, coshard, dp, recompute, tp

KEYS = ("dp", "tp", "coshard", "recompute")
LATER = ("pp", "cp", "ep", "zero", "schedule", "microbatches", "megatron", "sp", "virtual", "cp_kind")
"""Settings of the full language that this version does not have."""
LATER_RECOMPUTE = ("full", "selective")


@dataclass(frozen=True)
class Recipe:
    """The settings of a recipe string. Degrees of 1 change nothing."""

    dp: int = 1
    tp: int = 1
    coshard: int = 1
    recompute: str = ""

    @property
    def devices(self) -> int:
        """How many devices it needs."""
        return self.dp * self.tp

    def write(self, plan: Plan, *, batch_dims: BatchDims | None = None) -> Plan:
        """Write its lines to a plan."""
        if self.dp > 1:
            plan = dp(plan, self.dp, batch_dims=batch_dims)
        if self.tp > 1:
            plan = tp(plan, self.tp)
        if self.coshard > 1:
            plan = coshard(plan, self.coshard)
        return self._recomputed(plan) if self.recompute else plan

    def _recomputed(self, plan: Plan) -> Plan:
        try:
            return recompute(plan, self.recompute)
        except PlanError as error:
            place = error.place or f"recipe setting recompute={self.recompute}"
            raise PlanError(error.message, place=place, remedy=error.remedy) from None


def parse_recipe(text: str) -> Recipe:
    """Read a recipe string.

    >>> parse_recipe("dp=2, tp=2").devices
    4
    """
    degrees: dict[str, int] = {}
    pattern = ""
    seen: set[str] = set()
    for setting in text.split(","):
        key, equals, value = (part.strip() for part in setting.partition("="))
        _check_key(key, text)
        if key in seen:
            raise PlanError(f"{key} is set twice", place=f"recipe {text!r}", remedy="set it once")
        seen.add(key)
        if not equals or not value:
            raise PlanError(f"{key} has no value", place=f"recipe {text!r}", remedy=f"write {key}=...")
        if key == "recompute":
            pattern = _pattern(value, text)
        else:
            degrees[key] = _degree(key, value, text)
    return Recipe(recompute=pattern, **degrees)


def _check_key(key: str, text: str) -> None:
    if key in KEYS:
        return
    known = f"available: {', '.join(KEYS)}"
    if key in LATER:
        raise PlanError(f"{key} is not available in this version", place=f"recipe {text!r}", remedy=known)
    near = difflib.get_close_matches(key, (*KEYS, *LATER), n=1, cutoff=0.5)
    raise PlanError(
        f"{key!r} is no setting of a recipe" if key else "a setting is empty",
        place=f"recipe {text!r}",
        remedy=f"did you mean {near[0]!r}? {known}" if near else known,
    )


def _degree(key: str, value: str, text: str) -> int:
    if not (value.isascii() and value.isdigit()) or int(value) < 1:
        raise PlanError(
            f"{key}={value} is no degree", place=f"recipe {text!r}", remedy="give a whole number of at least 1"
        )
    return int(value)


def _pattern(value: str, text: str) -> str:
    if value in LATER_RECOMPUTE:
        raise PlanError(
            f"recompute={value} is not available in this version",
            place=f"recipe {text!r}",
            remedy="give a pattern of module paths: recompute=layers.*",
        )
    return value


def check_devices(recipe: Recipe, devices: int | None, text: str) -> int:
    """The recipe's device count, if it is the one asked for."""
    if devices is not None and devices != recipe.devices:
        raise PlanError(
            f"dp={recipe.dp} * tp={recipe.tp} = {recipe.devices} devices, but {devices} were asked for",
            place=f"recipe {text!r}",
            remedy=f"ask for {recipe.devices} devices, or change a degree",
        )
    return recipe.devices
