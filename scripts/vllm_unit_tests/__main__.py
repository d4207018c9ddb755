"""Run vLLM's own unit tests twice: against vLLM's classes, and against pcpbench's in their place.

Owns the command line and the two pytest processes. Exit codes: 0 every test that applies passes, or
is listed as different on purpose; 1 one does not; 3 it could not be measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from pcpbench.errors import CannotMeasure
from pcpbench.targets.vllm import host
from vllm_unit_tests import aliases, sources, table

FILES = (
    "worker/test_gpu_pcp_manager.py",
    "worker/test_gpu_block_table.py",
    "worker/test_gpu_kpool_tail_slot_mapping.py",
    "worker/test_gpu_input_batch_v2.py",
    "worker/test_cp_utils.py",
    "worker/test_gpu_ubatch_slicing.py",
    "worker/test_ubatch_offsets.py",
    "cudagraph/test_cudagraph_manager.py",
    "cudagraph/test_cudagraph_dispatch.py",
    "spec_decode/test_dynamic_sd_cug.py",
)
"""In vLLM's tests/v1: those of the classes that pcpbench has counterparts of."""


def run_tests(root: Path, files: list[str], plugins: list[str], scratch: Path) -> table.Outcomes:
    """Outcomes of the files in a fresh pytest process with these plugins, by node id."""
    outcomes = scratch / "outcomes.json"
    outcomes.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "--noconftest", "-c", os.devnull, "--rootdir", "."]
    command += ["-q", "--tb=no", "-W", "ignore", "-p", "no:cacheprovider"]
    for plugin in plugins:
        command += ["-p", plugin]
    command += ["--outcomes", str(outcomes), *files]
    # Plugins that happen to be installed could reorder or spread the tests.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, env=environment)
    if done.returncode not in (0, 1) or not outcomes.exists():
        last = (done.stdout + done.stderr).strip().splitlines()[-8:]
        raise CannotMeasure("pytest did not get through vLLM's tests:\n" + "\n".join(last))
    found: table.Outcomes = json.loads(outcomes.read_text())
    return found


def measure(root: Path, files: list[str]) -> list[table.Row]:
    """Both runs, side by side."""
    plugins = ["vllm_unit_tests.stage", "vllm_unit_tests.recorder"]
    with tempfile.TemporaryDirectory() as scratch:
        print("vllm-unit-tests: against vLLM's classes ...", file=sys.stderr)
        vllm = run_tests(root, files, plugins, Path(scratch))
        print("vllm-unit-tests: against pcpbench's ...", file=sys.stderr)
        ours = run_tests(root, files, [*plugins, "vllm_unit_tests.aliases"], Path(scratch))
    return table.compare(vllm, ours)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="vllm-unit-tests",
        description="Fetches the source package of the installed vLLM and runs its unit tests of "
        "the worker's classes twice: as they are, and with pcpbench's classes in their place.",
        epilog="Example: scripts/vllm-unit-tests --cache ~/.cache/vllm-tests "
        "worker/test_gpu_pcp_manager.py",
    )
    parser.add_argument("files", nargs="*", default=list(FILES), help="test files in tests/v1")
    parser.add_argument("--cache", type=Path, help="keep vLLM's tests here (default: nowhere)")
    parser.add_argument("--version", help="of vLLM's tests (default: that of the installed vLLM)")
    parser.add_argument("--json", action="store_true", help="print every test as JSON")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit code."""
    options = parse(arguments)
    installed = host.installed_version()
    try:
        if installed is None:
            raise CannotMeasure(f"vllm is not installed here: {host.INSTALL}.")
        version = options.version or installed
        with tempfile.TemporaryDirectory() as nowhere:
            root = sources.fetch_tests(version, options.cache or Path(nowhere))
            rows = measure(root, [f"tests/v1/{name}" for name in options.files])
    except CannotMeasure as error:
        print(f"vllm-unit-tests: {error}", file=sys.stderr)
        return 3
    if options.json:
        adapters = [
            {"name": a.name, "adapts": a.adapts}
            for a in (*aliases.ALIASES, *aliases.IN_TESTS.values())
        ]
        tests = [asdict(row) for row in rows]
        print(json.dumps({"vllm": version, "aliases": adapters, "tests": tests}, indent=1))
    else:
        print(f"vLLM {version}\n\n{table.render(rows)}")
    return 0 if table.is_good(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
