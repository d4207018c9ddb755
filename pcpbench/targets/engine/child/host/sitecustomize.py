"""Makes vLLM's CPU build run its V2 model runner: imported at the start of every process.

On the path of children on machines without an accelerator only. vLLM's CPU build asks triton for a
backend called `cpu`, which triton's wheels do not have; its kernels then run in triton's own
interpreter (TRITON_INTERPRET=1), which needs no backend at all. So one is registered that is there
by name and never active. Nothing of vLLM is changed.
"""

import importlib.machinery
import importlib.util
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


class _NeverActive:
    @staticmethod
    def is_active() -> bool:
        return False


class _NamedBackend:
    driver = _NeverActive
    compiler = None


def _register() -> None:
    try:
        from triton.backends import backends
    except ImportError:
        return
    backends.setdefault("cpu", _NamedBackend)


def _next_sitecustomize() -> None:
    """Run the file of the same name that this one stands in front of, if there is one."""
    path = [entry for entry in sys.path if os.path.abspath(entry or ".") != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_next_sitecustomize()
if os.environ.get("TRITON_INTERPRET") == "1":
    _register()
