"""How many draft tokens a decode verifies and accepts, drawn from names alone (SPEC 10).

Owns the draws: equal on every machine, for every arm and world, and whatever step or preemption a
request has behind it. Knows no model: the drafts are made to fit.
"""

from __future__ import annotations

from typing import Final
from zlib import crc32

import numpy as np

HIT_RATE: Final = 0.7
"""Chance that a draft is right, given that all before it are."""
_DRAFTS: Final = 1
"""Keeps the two draws of one request and place apart."""


def num_accepted(
    scenario: str, req_id: str, num_output_tokens: int, num_draft_tokens: int, seed: int = 0
) -> int:
    """Draft tokens accepted by the step that begins behind `num_output_tokens` outputs.

    0 to num_draft_tokens; one draw a draft, the first miss ends it. With three drafts and a hit
    rate of 0.7 that is 0, 1, 2, 3 in 30, 21, 15 and 34 of 100 steps.
    """
    entropy = [seed, crc32(scenario.encode()), crc32(req_id.encode()), num_output_tokens]
    raw = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(num_draft_tokens)
    misses = np.flatnonzero(np.asarray(raw, dtype=np.uint64) >= HIT_RATE * 2.0**64)
    return int(misses[0]) if len(misses) else num_draft_tokens


def num_drafts(
    scenario: str,
    req_id: str,
    num_output_tokens: int,
    most: int,
    dynamic: str,
    step: int,
    seed: int,
) -> int:
    """Draft tokens that a decode verifies, 0 to `most`, each as likely as any other.

    dynamic: `off` always takes the most; `step` draws one number for all decodes of a step;
    `request` one for each request and place in its output, whatever step that is in.
    """
    if dynamic == "off":
        return most
    name, place = ("", step) if dynamic == "step" else (req_id, num_output_tokens)
    entropy = [seed, crc32(scenario.encode()), crc32(name.encode()), place, _DRAFTS]
    raw = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(1)
    return int(raw[0]) % (most + 1)
