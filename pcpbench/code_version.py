"""Which code this is: a digest of every source file, and the libraries whose numbers count.

Owns the answer to "would a run made then be a run made now?". Imports none of those libraries.
"""

from __future__ import annotations

import hashlib
import sys
from importlib import metadata
from pathlib import Path

PACKAGE = Path(__file__).parent
LIBRARIES = ("torch", "triton", "numpy")
SUFFIXES = (".py", ".yaml")


def code_digest(package: Path = PACKAGE) -> str:
    """Hex digest over names and bytes of the package's sources and shipped scenarios."""
    digest = hashlib.sha256()
    files = [path for path in package.rglob("*") if path.suffix in SUFFIXES and path.is_file()]
    for path in sorted(files, key=lambda path: path.relative_to(package).as_posix()):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()[:16]


def versions() -> dict[str, str]:
    """`code` and the versions of Python and the libraries; absent ones are left out."""
    found = {"code": code_digest(), "python": sys.version.split()[0]}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
