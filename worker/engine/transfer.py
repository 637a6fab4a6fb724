"""Lists of numbers to the device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of `values`; through pinned memory to a GPU, so that the copy runs beside its work."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
