"""The program: `pcpbench` and `python -m pcpbench`. Owns what goes wrong while it is imported."""

from __future__ import annotations

import signal
import sys
from typing import NoReturn


def main() -> None:
    """Import the command line and run it."""
    try:
        from pcpbench.cli import main as command_line
    except KeyboardInterrupt:
        _end("interrupted before anything was started.", 128 + signal.SIGINT)
    except Exception as error:  # 1, which Python would end with, means a regression
        said = " ".join(f"{type(error).__name__}: {error}".split())
        _end(
            f"it cannot be loaded ({said}): install what its pyproject.toml asks for, "
            "as scripts/setup does.",
            3,
        )
    command_line()


def _end(message: str, exit_code: int) -> NoReturn:
    if sys.stderr is not None:  # print would take stdout instead
        print(f"pcpbench: {message}", file=sys.stderr)
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
