"""The cells of a matrix: parallel configuration x draft tokens x microbatches x model.

Owns their names, their order, and which preset stands for a kind of model. Knows no engine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from typing import Final

import msgspec

from pcpbench.errors import UsageError

PARALLELS: Final = ("pcp2", "pcp4", "pcp2-dcp2", "pcp2-tp2-dcp4", "tp4-dcp2-i4")
SPEC_TOKENS: Final = (0, 1, 3)
MICROBATCHES: Final = ("off", "on")
MODELS: Final = ("dense", "moe")

PRESETS: Final = {
    ("dense", False): "tiny",
    ("dense", True): "tiny-sparse",
    ("moe", False): "tiny-moe",
    ("moe", True): "tiny-sparse-moe",
}
"""Preset of a kind of model; True: PCP and DCP together, which only sparse attention can have."""

_SIZES: Final = ("pcp", "tp", "dcp", "i")
_NAME: Final = re.compile(r"(pcp|tp|dcp|i)([1-9][0-9]{0,3})")


class Parallel(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the parallel dimensions; interleave: consecutive KV positions of a DCP rank."""

    pcp: int = 1
    tp: int = 1
    dcp: int = 1
    interleave: int = 1

    @classmethod
    def parse(cls, text: str) -> Parallel:
        """`pcp2-tp2-dcp4`, `tp4-dcp2-i4`; raises UsageError for anything else."""
        sizes: dict[str, int] = {}
        for part in text.strip().split("-"):
            match = _NAME.fullmatch(part)
            if match is None or match[1] in sizes:
                raise UsageError(
                    f"--parallel is {text!r}: use one of {', '.join(PARALLELS)}, or sizes of your "
                    "own such as pcp2-tp2 (pcp, tp, dcp, i for the interleave, each once)."
                )
            sizes[match[1]] = int(match[2])
        return cls(
            pcp=sizes.get("pcp", 1),
            tp=sizes.get("tp", 1),
            dcp=sizes.get("dcp", 1),
            interleave=sizes.get("i", 1),
        )

    @property
    def name(self) -> str:
        """The same as text, sizes of 1 left out: `pcp2-dcp2`; `pcp1` where all are 1."""
        sizes = zip(_SIZES, (self.pcp, self.tp, self.dcp, self.interleave), strict=True)
        return "-".join(f"{name}{size}" for name, size in sizes if size > 1) or "pcp1"


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One setting to be proved. spec_tokens: draft tokens of a decode. model: `dense` or `moe`."""

    parallel: Parallel
    spec_tokens: int
    microbatch: bool
    model: str

    @property
    def preset(self) -> str:
        """The model's preset for these ranks."""
        return PRESETS[self.model, self.parallel.pcp > 1 and self.parallel.dcp > 1]

    @property
    def name(self) -> str:
        """A name that is a file's, too: `pcp2-dcp2_k3_ub_moe`."""
        parts = [self.parallel.name, f"k{self.spec_tokens}"]
        return "_".join([*parts, *(["ub"] if self.microbatch else []), self.model])

    @property
    def flags(self) -> list[str]:
        """Options of `compare` that make this cell."""
        sizes = self.parallel
        flags = ["--pcp", str(sizes.pcp), "--tp", str(sizes.tp), "--dcp", str(sizes.dcp)]
        flags += ["--interleave", str(sizes.interleave), "--spec-tokens", str(self.spec_tokens)]
        flags += ["--model", self.preset]
        return [*flags, "--microbatch"] if self.microbatch else flags


def all_cells(
    parallels: Sequence[str], spec_tokens: Sequence[int], microbatches: Sequence[str],
    models: Sequence[str],
) -> list[Cell]:  # fmt: skip
    """Every combination, each once, simple ones first: by drafts, microbatches, model, ranks."""
    combinations = product(
        dict.fromkeys(spec_tokens),
        dict.fromkeys(microbatches),
        dict.fromkeys(models),
        dict.fromkeys(Parallel.parse(name) for name in parallels),
    )
    return [
        Cell(parallel=parallel, spec_tokens=k, microbatch=micro == "on", model=model)
        for k, micro, model, parallel in combinations
    ]
