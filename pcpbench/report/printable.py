"""Text from files, on its way to a terminal: nothing in it may be taken for a command.

Owns which characters never reach a console: bundles, scenarios, entry points and the messages of
foreign code may hold escape sequences that recolour, clear or rename a terminal. Each such
character is shown as its escape, so that nothing vanishes. Newlines and tabs stay.
"""

from __future__ import annotations

import json
import re
from typing import Final

# C0 without tab and newline, DEL and C1; what turns the direction of text; line separators.
_CONTROL: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)


def printable(text: str) -> str:
    """The text with every control character as its escape: ESC [ 3 1 m becomes `\\x1b[31m`."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def ascii_json(text: str) -> str:
    """JSON text whose every other character is JSON's escape: a reader gets the same strings."""
    return re.sub("[^\x00-\x7f]", lambda found: json.dumps(found[0])[1:-1], text)


def printable_json(text: str) -> str:
    """The same for JSON text, as JSON's own escapes: a reader gets the string that it was."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
