"""One process of a gate as a line on disk, with a checksum: written by a gate, read by two readers.

Owns the format of such a line, the name and version of the files that hold them, and the checksum.
Knows no file.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

import msgspec

from pcpbench.gate_samples import ProcessFailure, ProcessSample

FORMAT: Final = "pcpbench-baseline"
SCHEMA_VERSION: Final = 1


class _Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    checksum: str
    sample: ProcessSample | None = None
    failure: ProcessFailure | None = None


def process_bytes(ended: ProcessSample | ProcessFailure) -> bytes:
    """The line of one process."""
    kind = "sample" if isinstance(ended, ProcessSample) else "failure"
    return msgspec.json.encode({"checksum": checksum_of(ended), kind: ended}) + b"\n"


def process_of(line: bytes) -> tuple[str, ProcessSample | ProcessFailure]:
    """Checksum and process of a line.

    Raises ValueError (or RecursionError) with the reason for one that is not as it was written.
    """
    found, plain = msgspec.json.decode(line, type=_Line), msgspec.json.decode(line)
    held = [(kind, each) for kind, each in (("sample", found.sample), ("failure", found.failure))
            if each is not None]  # fmt: skip
    # Over what the file says: a field that came later has no say in an older file's checksum.
    if any(found.checksum != checksum_of(plain[kind]) for kind, _ in held):
        raise ValueError("its checksum is not that of its content")
    if len(held) != 1:
        raise ValueError("it holds no process" if not held else "it holds two")
    return found.checksum, held[0][1]


def checksum_of(content: Any) -> str:
    """Of the content, however it is laid out."""
    return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()
