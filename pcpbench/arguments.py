"""What is refused of a command line before any command reads it. Knows no option."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pcpbench.errors import UsageError


def refuse_empty(arguments: list[str]) -> None:
    """No value may be empty: as a path `""` would be the working directory."""
    for before, argument in zip(["pcpbench", *arguments], arguments, strict=False):
        flag, equals, value = argument.partition("=")
        is_option = flag.startswith("--") and equals != ""
        if not (value if is_option else argument).strip():
            after = flag if is_option else before
            raise UsageError(f"the value after {after} is empty: give one, or leave it out.")


def refuse_undecodable(arguments: Sequence[str]) -> None:
    """No argument may hold bytes that are no text: no file of a run could say what was asked."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the argument {argument!r} holds a byte that is no UTF-8: write it in UTF-8, and "
                "rename a file whose name is not."
            ) from error


def refuse_repeated(arguments: Sequence[str], command: Any) -> None:
    """No option that takes one value may be given two: the first would be dropped without a word.

    command: the root of the command line, with `commands` and `params` as Click has them. What it
    does not know is left to it.
    """
    seen: dict[str, str] = {}
    left = iter(arguments)
    for argument in left:
        if argument == "--":
            return
        if not argument.startswith("--"):
            command = getattr(command, "commands", {}).get(argument, command)
            continue
        flag, equals, value = argument.partition("=")
        options = {name: option for option in command.params for name in option.opts}
        option = options.get(flag)
        if option is None or getattr(option, "is_flag", False):
            continue
        value = value if equals else next(left, "")
        if flag in seen and not option.multiple:
            raise UsageError(
                f"{flag} is given twice, as {seen[flag]!r} and as {value!r}: give it once."
            )
        seen[flag] = value


def text_of(refusal: Any) -> str:
    """What Click's own refusal says; of an argument that is missing also what it is for."""
    message: str = refusal.format_message()
    purpose = getattr(getattr(refusal, "param", None), "help", None)
    if type(refusal).__name__ == "MissingParameter" and purpose:
        return f"{message} {purpose}"
    return message
