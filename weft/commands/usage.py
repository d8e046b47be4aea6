"""The parser of the command line: what is misspelt or missing becomes an error with the nearest right word.

In: words. Out: options, or a `UsageError`: what is wrong, in which command line, what to write. Unknown options are
found before missing ones: `--plna dp=2` lacks no plan, it misspells it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from weft.errors import UsageError, did_you_mean

NEEDS_A_PLAN = (
    "--plan dp=2 (each device takes half of the batch), --plan tp=2 (half of each layer), --plan dp=2,tp=2, "
    "--plan pp=2,microbatches=4 (stages), a plan file (plan.yaml), or plans.py:function"
)
OPTION = re.compile(r"--?[a-zA-Z]")


class Parser(argparse.ArgumentParser):
    """argparse's, except that it raises."""

    words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.words = list(args or ())
        if self.commands is None and not {"-h", "--help"} & set(self.words):
            self._refuse_unknown()
            self._refuse_missing()
        return super().parse_known_args(args, namespace)

    @property
    def commands(self) -> Sequence[str] | None:
        """The names of commands, if it is their parser; those of one command have none."""
        found = (one for one in self._actions if isinstance(one, argparse._SubParsersAction))
        return next((list(one.choices) for one in found), None)

    def error(self, message: str) -> NoReturn:
        some = f"one of: {', '.join(self.commands)}; " if self.commands else ""
        self._refuse(message, f"{some}{self.prog} --help")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = [str(one) for one in action.choices]
        what = "/".join(action.option_strings) or str(action.metavar or action.dest).lower()
        self._refuse(f"{value!r} is no {what}", did_you_mean(str(value), known) + f"one of: {', '.join(known)}")

    def _refuse_unknown(self) -> None:
        for word in self._asked():
            known = list(self._option_string_actions)
            if not self._means(word, known):
                names = sorted({one for one in known if one.startswith("--")})
                near = did_you_mean(f"--{word.lstrip('-')}", names)
                self._refuse(f"{self.prog} has no option {word}", f"{near}{self.prog} --help lists all options")

    def _refuse_missing(self) -> None:
        groups = [list(group._group_actions) for group in self._mutually_exclusive_groups if group.required]
        alone = [[one] for one in self._actions if one.required and one.option_strings]
        for group in (*alone, *groups):
            names = [name for one in group for name in one.option_strings]
            if not any(self._means(word, names) for word in self._asked()):
                plan = "--plan" in names
                other = "".join(f", or {name} {one.metavar}" for one in group for name in one.option_strings[:1])
                remedy = NEEDS_A_PLAN + other.replace(", or --plan P", "") if plan else f"add {names[0]}"
                self._refuse(f"{self.prog} needs {'a plan' if plan else names[0]}", remedy)

    def _asked(self) -> list[str]:
        """The options among the words, as they were written, without values."""
        words = self.words[: list(self.words).index("--")] if "--" in self.words else self.words
        return [word.partition("=")[0] for word in words if OPTION.match(word)]

    def _means(self, word: str, names: Sequence[str]) -> bool:
        """True for what argparse takes for one of the names: `--dev` is `--devices`, `-oFILE` is `-o FILE`."""
        if word.startswith("--"):
            return any(name.startswith(word) for name in names)
        return any(word.startswith(name) for name in names if not name.startswith("--"))

    def _refuse(self, message: str, remedy: str) -> NoReturn:
        place = " ".join((self.prog, *self.words))
        raise UsageError(message, place=place, remedy=remedy)
