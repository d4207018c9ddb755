"""The program: `pcpbench` and `python -m pcpbench`. Owns a Ctrl-C that comes during imports."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Import the command line and run it."""
    try:
        from pcpbench.cli import main as command_line
    except KeyboardInterrupt:
        print("pcpbench: interrupted before anything was started.", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    command_line()


if __name__ == "__main__":
    main()
