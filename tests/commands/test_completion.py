"""`weft completion`, `weft --help`: what a shell and a newcomer are told."""

from __future__ import annotations

import subprocess

import pytest

from weft.cli import main, make_parser
from weft.commands.completion import commands_of, script


def complete(*words: str) -> set[str]:
    """What bash offers for the last of the words."""
    text = script("bash", make_parser())
    line = f'COMP_WORDS=({" ".join(words)}); COMP_CWORD={len(words) - 1}; _weft; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", f"{text}\n{line}"], capture_output=True, text=True, check=True, cwd="/")
    return set(done.stdout.split())


def test_bash_knows_commands_options_and_values() -> None:
    assert complete("weft", "v") == {"verify"} and complete("weft", "") >= {"ops", "train", "show", "completion"}
    assert complete("weft", "train", "--res") == {"--resume"}
    assert complete("weft", "train", "file.py", "--schedule", "c") >= {"constant", "cosine"}
    assert complete("weft", "completion", "fi") == {"fish"}
    assert "--processes" not in complete("weft", "ops", "--")


def test_every_option_is_in_every_script() -> None:
    names = {
        name
        for _, options in commands_of(make_parser()).values()
        for option in options
        for name in option.option_strings
    }
    for shell in ("bash", "zsh"):
        assert not [name for name in names if name.startswith("--") and name not in script(shell, make_parser())]
    fish = script("fish", make_parser())
    assert not [name for name in names if name.startswith("--") and f"-l {name[2:]}" not in fish]
    assert all(
        line.startswith("complete -c weft ") and line.count("'") % 2 == line.count("\\'") % 2
        for line in fish.splitlines()
    )


def test_the_script_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    assert "bashcompinit" in capsys.readouterr().out
    assert main(["completion", "tcsh"]) == 2


def test_help_shows_a_tour(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    out = capsys.readouterr().out
    assert caught.value.code == 0
    assert all(f"weft {command}" in out for command in ("ops ", "verify", "train "))
    for command in commands_of(make_parser()):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert "example" in capsys.readouterr().out
