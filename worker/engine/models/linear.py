"""Products with weights that stay as they are: packed once for the CPU's kernels, torch's own elsewhere.

oneDNN multiplies fastest in a layout of its own. `F.linear` would convert the weight at each call, which at a hundred
positions costs as much as the product; so it is converted once, and the plain weight is let go.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

LIKELY_POSITIONS = 128
"""oneDNN chooses the layout by the number of positions to come; any number can be computed with it."""


class Linear:
    """x (…, in) -> x @ weightᵀ + bias (…, out) for a weight (out, in)."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.shape = tuple(weight.shape)
        self.bias = bias
        self._packed = _pack(weight)
        self._plain = weight if self._packed is None else None

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is None:
            return F.linear(x, self._plain, self.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out


MakeLinear = Callable[..., Linear]
"""(weight, bias or None) -> the product: in which form weights are held is chosen once, at loading."""


class Head:
    """The projection to the vocabulary, in slices: (first token, part) pairs. bias: (V,)."""

    def __init__(self, weight: Tensor, slice_length: int = 8192, bias: Tensor | None = None) -> None:
        self.shape = tuple(weight.shape)
        slices = [slice(start, start + slice_length) for start in range(0, self.shape[0], slice_length)]
        self.parts = [(one.start, Linear(weight[one], None if bias is None else bias[one])) for one in slices]

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden (N, d) -> logits (N, V); for the few positions that need all of them at once."""
        return torch.cat([part(hidden) for _, part in self.parts], dim=-1)


def _pack(weight: Tensor) -> Tensor | None:
    """The weight in oneDNN's layout, or None where that does not apply. torch names these operations privately."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), LIKELY_POSITIONS)
    return packed
