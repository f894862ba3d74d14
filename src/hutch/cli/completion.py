"""`hutch completion SHELL`: made from the parsers themselves, so it cannot fall behind them."""

from __future__ import annotations

from ..process import quote
from ..spec import PRESETS
from . import VERBS, build_parser

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

_VALUES = {"-e": " ".join(PRESETS), "--environment": " ".join(PRESETS), "--network": "off full host"}
_FILES = ("-f", "--file", "--config", "--project", "--workspace", "--mount")


def add_arguments(parser: argparse.ArgumentParser, _verb: str) -> None:
    """Declare the options."""
    parser.description = "Print the completion script for a shell."
    parser.epilog = (
        "examples:\n"
        "  mkdir -p ~/.local/share/bash-completion/completions\n"
        "  hutch completion bash > ~/.local/share/bash-completion/completions/hutch\n"
        "  hutch completion zsh > ~/.zfunc/_hutch\n"
        "  hutch completion fish > ~/.config/fish/completions/hutch.fish\n"
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def main(options: argparse.Namespace) -> int:
    """Carry out the verb."""
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[options.shell](), end="")
    return 0


def _options(verb: str) -> list[tuple[str, str]]:
    """(option, help) of a verb; hidden ones are left out."""
    found = []
    for action in build_parser(verb)._actions:
        if action.help != "==SUPPRESS==":
            found += [(option, action.help or "") for option in action.option_strings]
    return found


def _words(verb: str) -> str:
    """What may follow a verb: its options, and the words it chooses from."""
    choices = [choice for action in build_parser(verb)._actions for choice in action.choices or ()]
    return " ".join([*choices, *(option for option, _ in _options(verb))])


def _bash() -> str:
    cases = "\n".join(f"    {verb}) words='{_words(verb)}' ;;" for verb in VERBS)
    values = "\n".join(f"    {option}) words='{words}' ;;" for option, words in _VALUES.items())
    values += f"\n    {'|'.join(_FILES)}) words='' ;;"
    return f"""\
_hutch() {{
  local words='' current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
  if [ "$COMP_CWORD" -eq 1 ]; then
    words='{" ".join(VERBS)}'
  else
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
  fi
  case "$previous" in
{values}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
  if [ "${{#COMPREPLY[@]}}" -eq 0 ]; then COMPREPLY=($(compgen -f -- "$current")); fi
}}
complete -o filenames -F _hutch hutch
"""


def _zsh() -> str:
    verbs = "\n".join(f"    {quote(f'{verb}:{line}')}" for verb, (_, line) in VERBS.items())
    cases = "\n".join(f"    {verb}) compadd -- {_words(verb)} ;;" for verb in VERBS)
    values = "\n".join(f"    {option}) compadd -- {words}; return ;;" for option, words in _VALUES.items())
    return f"""\
#compdef hutch
_hutch() {{
  local -a verbs
  verbs=(
{verbs}
  )
  if (( CURRENT == 2 )); then
    _describe verb verbs
    return
  fi
  case "$words[CURRENT-1]" in
{values}
  esac
  case "$words[2]" in
{cases}
  esac
  _files
}}
if [ "$funcstack[1]" = "_hutch" ]; then _hutch "$@"; else compdef _hutch hutch; fi
"""


def _fish() -> str:
    lines = ["complete -c hutch -f -n __fish_use_subcommand"]
    for verb, (_, line) in VERBS.items():
        lines.append(f"complete -c hutch -n __fish_use_subcommand -a {verb} -d {quote(line)}")
        for option, text in _options(verb):
            flag = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            values = f" -x -a {quote(_VALUES[option])}" if option in _VALUES else ""
            lines.append(f"complete -c hutch -n '__fish_seen_subcommand_from {verb}' {flag}{values} -d {quote(text)}")
    return "\n".join(lines) + "\n"
