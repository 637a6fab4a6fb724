"""transformers' own classes of a checkpoint: built without memory, filled by name. No code of the checkpoint runs.

The text stack is published once, under the decoder; the encoder's layers are the same weights with their own scalars.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from contract.errors import ModelLoadError
from worker.engine.canvas.context import Stretch
from worker.engine.canvas.spec import CanvasSpec

ATTENTION = "dllm_canvas"
"""The name under which transformers finds `attend`."""
DECODER, ENCODER = "model.decoder.", "model.encoder.language_model."
NOT_TEXT = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")
TIED_HEAD = "lm_head.weight"


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    stretches: Sequence[Stretch],
    **_: object,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: query (1, heads, T, head_dim) … -> (1, T, heads, head_dim).

    The T tokens are the `stretches` end to end, each of which sees its own row alone.
    """
    lengths = [stretch.length for stretch in stretches]
    split = zip(stretches, *(one[0].split(lengths, dim=1) for one in (query, key, value)), strict=True)
    seen = [stretch.attend(module.layer_idx, module.sliding_window, scaling, q, k, v) for stretch, q, k, v in split]
    return torch.cat(seen, dim=1).transpose(0, 1).unsqueeze(0), None


def text_models(spec: CanvasSpec) -> tuple[Any, Any]:
    """The decoder and the text encoder on the meta device: names and shapes, no numbers.

    Raises ModelLoadError when transformers does not know the family or refuses the configuration.
    """
    # Imported here: transformers takes seconds to import, and only this family needs it.
    try:
        from transformers import AttentionInterface
        from transformers.models.diffusion_gemma.configuration_diffusion_gemma import DiffusionGemmaConfig
        from transformers.models.diffusion_gemma.modeling_diffusion_gemma import (
            DiffusionGemmaDecoderModel,
            DiffusionGemmaEncoderTextModel,
        )
    except ImportError as error:
        raise ModelLoadError(f"family '{spec.family}' needs transformers 5.24 or newer: {error}") from None
    AttentionInterface.register(ATTENTION, attend)
    try:
        config = DiffusionGemmaConfig(
            text_config=dict(spec.text), canvas_length=spec.decoder.canvas_length, attn_implementation=ATTENTION
        )
        with torch.device("meta"):
            return DiffusionGemmaDecoderModel(config).eval(), DiffusionGemmaEncoderTextModel(config.text_config).eval()
    except Exception as error:  # of several libraries, each with a hierarchy of its own
        reason = " ".join(str(error).split())
        raise ModelLoadError(f"config.json: transformers refuses the configuration: {reason}") from error


def published_shapes(decoder: Any, encoder: Any) -> dict[str, tuple[int, ...]]:
    """Name and shape of every text tensor as published."""
    shapes = {f"{DECODER}{name}": tuple(one.shape) for name, one in decoder.state_dict().items()}
    return shapes | {f"{ENCODER}{name}": tuple(one.shape) for name, one in _scalars(encoder).items()}


def fill(decoder: Any, encoder: Any, fetch: Callable[[str], Tensor]) -> None:
    """Give both models their numbers: those of the checkpoint by `fetch`, and those that a configuration implies."""
    decoder.load_state_dict({name: fetch(f"{DECODER}{name}") for name in decoder.state_dict()}, assign=True)
    own = {name.removeprefix("layers."): fetch(f"{ENCODER}{name}") for name in _scalars(encoder)}
    encoder.layers.load_state_dict(decoder.layers.state_dict() | own, assign=True)
    device = decoder.embed_tokens.weight.device
    decoder.embed_tokens.embed_scale = torch.tensor(decoder.embed_tokens.scalar_embed_scale, device=device)
    decoder.rotary_emb = type(decoder.rotary_emb)(decoder.text_config).to(device)
    for model in (decoder, encoder):
        model.requires_grad_(False)


def _scalars(encoder: Any) -> dict[str, Tensor]:
    """What the encoder does not share with the decoder."""
    return {name: one for name, one in encoder.state_dict().items() if name.endswith(".layer_scalar")}
