"""Tensors as arrays of the host that nothing writes to afterwards; what records are made of."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


def host_copy(tensor: Tensor) -> NDArray[Any]:
    """A host copy that shares no memory with its source. Not for bfloat16, which numpy lacks."""
    return np.array(tensor.cpu().numpy(), copy=True)


def wide_copy(tensor: Tensor) -> NDArray[np.float32]:
    """The same, widened to float32; any floating dtype."""
    return np.array(tensor.float().cpu().numpy(), copy=True)
