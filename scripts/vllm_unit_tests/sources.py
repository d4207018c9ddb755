"""vLLM's source package from the package index: found, checked against its digest, unpacked.

Owns the download. Only the package's tests are unpacked; nothing of it is built or installed.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import urllib.request
from pathlib import Path

from pcpbench.errors import CannotMeasure

INDEX = "https://pypi.org/simple"
JSON_API = "application/vnd.pypi.simple.v1+json"
TIMEOUT_S = 120


def fetch_tests(version: str, cache: Path) -> Path:
    """The directory that holds vLLM's `tests`, downloaded unless the cache has it.

    The index is PIP_INDEX_URL's, as pip's would be. Raises CannotMeasure when the index cannot be
    reached, has no such source package, or serves other bytes than it announces.
    """
    root = cache / f"vllm-{version}"
    if (root / "tests" / "__init__.py").exists():
        return root
    index = os.environ.get("PIP_INDEX_URL", INDEX).rstrip("/")
    try:
        page = json.loads(_get(f"{index}/vllm/", JSON_API))
        url, digest = find_sdist(page, version)
        archive = _get(url)
    except (OSError, ValueError) as error:
        raise CannotMeasure(
            f"vLLM's source package cannot be fetched from {index} ({error}): try again with a "
            "network, or give --cache a directory that an earlier run filled."
        ) from error
    unpack_tests(archive, digest, cache)
    return root


def find_sdist(page: dict[str, object], version: str) -> tuple[str, str]:
    """Address and SHA-256 of one version's source package on the index's page (PEP 691)."""
    name = f"vllm-{version}.tar.gz"
    files = page.get("files")
    for file in files if isinstance(files, list) else []:
        if file["filename"] == name:
            return file["url"], file["hashes"]["sha256"]
    raise CannotMeasure(f"the package index has no {name}: choose another --version.")


def unpack_tests(archive: bytes, digest: str, target: Path) -> None:
    """Unpack the `tests` of a source package whose bytes have this SHA-256 into `target`."""
    found = hashlib.sha256(archive).hexdigest()
    if found != digest:
        raise CannotMeasure(
            f"vLLM's source package has the SHA-256 {found}, and the index announces {digest}: the "
            "download is not what was published; fetch it again."
        )
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        members = [m for m in packed.getmembers() if m.name.split("/")[1:2] == ["tests"]]
        packed.extractall(target, members, filter="data")


def _get(url: str, accept: str = "*/*") -> bytes:
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        body: bytes = answer.read()
    return body
