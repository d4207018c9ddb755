"""What is refused of a command line before any command reads it. Knows no option."""

from __future__ import annotations

from pcpbench.errors import UsageError


def refuse_empty(arguments: list[str]) -> None:
    """No value may be empty: as a path `""` would be the working directory."""
    for before, argument in zip(["pcpbench", *arguments], arguments, strict=False):
        flag, equals, value = argument.partition("=")
        is_option = flag.startswith("--") and equals != ""
        if not (value if is_option else argument).strip():
            after = flag if is_option else before
            raise UsageError(f"the value after {after} is empty: give one, or leave it out.")
