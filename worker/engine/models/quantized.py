"""Products whose weights torchao holds in 8 or 4 bits; what is multiplied with them stays in the model's dtype.

The embedding, the head, norms and routers keep their dtype: they are small, or decide between near ties.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from contract.errors import ModelLoadError
from worker.engine.models.linear import Linear, MakeLinear

Quantize = Literal["none", "int8", "int4"]
GROUP = 32
"""Weights of a row that share a scale at 4 bits; at 8 bits a whole row does."""


ONLY_LEAN = "quantize is for families with Llama's kind of decoder: leave it out for this one"


class Quantized(Linear):
    """As `Linear`, for a weight (out, in) of which only the quantised form is kept."""

    def __init__(self, config: Any, weight: Tensor, bias: Tensor | None = None) -> None:
        # Imported here: only who asks for it needs torchao.
        from torchao.quantization import quantize_

        self.shape = tuple(weight.shape)
        self.bias = bias
        holder = torch.nn.Linear(*reversed(self.shape), bias=False, device="meta")
        holder.weight = torch.nn.Parameter(weight, requires_grad=False)
        quantize_(holder, config)
        self._weight = holder.weight

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self.bias)


def linear_for(quantize: Quantize, device: torch.device, dtype: torch.dtype) -> MakeLinear:
    """How the decoder's products are made. Raises ModelLoadError where that cannot be done here."""
    if quantize == "none":
        return Linear
    if quantize == "int4" and dtype != torch.bfloat16:
        raise ModelLoadError(f"quantize: int4 needs dtype bfloat16, not {str(dtype).removeprefix('torch.')}")
    try:
        return partial(Quantized, _config(quantize, device))
    except ImportError as error:
        raise ModelLoadError(
            f"quantize: {quantize} needs torchao (pip install 'dllm-batch[quantize]'): {error}"
        ) from None


def _config(quantize: Quantize, device: torch.device) -> Any:
    if quantize == "int8":
        from torchao.quantization import Int8WeightOnlyConfig

        return Int8WeightOnlyConfig()
    if device.type == "cpu":  # torchao's layout for torch's own 4-bit product on the CPU
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

        return PrototypeInt4WeightOnlyConfig(group_size=GROUP, set_inductor_config=False)
    from torchao.quantization import Int4WeightOnlyConfig

    return Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format="tile_packed_to_4d")
