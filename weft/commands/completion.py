"""`weft completion bash|zsh|fish`: a script that completes commands, options and files in a shell.

In: the parser of the command line. Out: text for the shell, made from nothing but that parser, so that it knows every
option there is. In bash and zsh one function looks at the command and the word before; fish has a line per option.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping

BASH = """\
_weft() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" command="${{COMP_WORDS[1]}}"
    local words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    else
        case "$command:$before" in
{choices}
        *) case "$command" in
{options}
            esac ;;
        esac
        case "$word" in -*) ;; *) COMPREPLY=($(compgen -W "$words" -- "$word") $(compgen -f -- "$word")); return ;; esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o filenames -F _weft weft
"""


def run(options: argparse.Namespace) -> int:
    """The command."""
    text = script(options.shell, options.parser)
    print(json.dumps({"shell": options.shell, "script": text}) if options.json else text, end="\n" * options.json)
    return 0


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """The script."""
    commands = commands_of(parser)
    if shell == "fish":
        return _fish(commands)
    text = _bash(commands)
    return text if shell == "bash" else f"autoload -U +X bashcompinit && bashcompinit\n{text}"


def commands_of(parser: argparse.ArgumentParser) -> dict[str, tuple[str, list[argparse.Action]]]:
    """Each command with its help and its options."""
    (found,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    helps = {action.dest: action.help or "" for action in found._choices_actions}
    return {name: (helps.get(name, ""), command._actions) for name, command in found.choices.items()}


def _bash(commands: Mapping[str, tuple[str, list[argparse.Action]]]) -> str:
    options, choices = [], []
    for name, (_, found) in commands.items():
        plain = [_values(one) for one in found if not one.option_strings and one.choices]
        words = [each for one in found for each in one.option_strings if each.startswith("--")]
        options.append(f'            {name}) words="{" ".join((*words, *plain))}" ;;')
        for one in found:
            if one.option_strings and one.choices:
                keys = "|".join(f"{name}:{each}" for each in one.option_strings)
                choices.append(f'        {keys}) words="{_values(one)}" ;;')
    return BASH.format(commands=" ".join(commands), options="\n".join(options), choices="\n".join(choices))


def _fish(commands: Mapping[str, tuple[str, list[argparse.Action]]]) -> str:
    lines = []
    for name, (help_, found) in commands.items():
        lines.append(f"complete -c weft -n __fish_use_subcommand -f -a {name} -d {_quoted(help_)}")
        for one in found:
            here = f"complete -c weft -n '__fish_seen_subcommand_from {name}'"
            names = " ".join(
                f"-l {each[2:]}" if each.startswith("--") else f"-s {each[1:]}" for each in one.option_strings
            )
            values = f" -f -a {_quoted(_values(one))}" if one.choices else ""
            if names:
                lines.append(f"{here} {names}{' -r' if one.nargs != 0 else ''}{values} -d {_quoted(one.help or '')}")
            elif values:
                lines.append(f"{here}{values}")
    return "\n".join(lines) + "\n"


def _values(option: argparse.Action) -> str:
    return " ".join(map(str, option.choices or ()))


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
