"""What holds for a gate where nobody says otherwise. Imports nothing: help texts name it."""

from typing import Final

DEFAULT_MAX_TIME_S: Final = 75.0
DEFAULT_PROCESSES: Final = 5
BASELINE_PROCESSES: Final = 12
LEAST_PROCESSES: Final = 4
MOST_PROCESSES: Final = 1000
SELF_CHECK_GATES: Final = 4
"""A self-check measures for so many times what a gate may take."""
