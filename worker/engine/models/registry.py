"""Which family a checkpoint belongs to: `architectures[0]` decides, since one `model_type` names several models."""

from __future__ import annotations

from typing import Any

from contract.errors import ModelLoadError, nearest
from worker.engine.canvas.spec import CanvasSpec
from worker.engine.models import (
    a2d_qwen3,
    bert,
    diffusion_gemma,
    dream,
    dream_reasoner,
    fast_dllm_v2,
    illada,
    llada,
    llada2,
    llada_moe,
    llama_block,
    mdlm,
    modernbert,
    nemotron_labs_diffusion,
    sdar,
    sdar_moe,
    stable_diffcoder,
    wedlm,
)
from worker.engine.models.spec import Experts, ModelSpec

DENSE = (
    llama_block,
    llada,
    illada,
    dream,
    a2d_qwen3,
    sdar,
    dream_reasoner,
    stable_diffcoder,
    fast_dllm_v2,
    nemotron_labs_diffusion,
    wedlm,
)
WITH_EXPERTS = (llada_moe, llada2, sdar_moe)
OTHERWISE_BUILT = (modernbert, bert, mdlm)

FAMILIES = {
    architecture: family
    for family in (*DENSE, *WITH_EXPERTS, *OTHERWISE_BUILT)
    for architecture in family.ARCHITECTURES
}
CANVAS_FAMILIES = dict.fromkeys(diffusion_gemma.ARCHITECTURES, diffusion_gemma)
"""Families that denoise random tokens: they have no mask and an engine of their own (`worker/engine/canvas/`)."""


def architecture_of(config: dict[str, Any]) -> str:
    """The family's key. Raises ModelLoadError for an unknown one, with the nearest known name."""
    architecture = next(iter(config.get("architectures") or []), None)
    known = FAMILIES | CANVAS_FAMILIES
    if architecture not in known:
        raise ModelLoadError(
            f"unknown model family '{architecture}'{nearest(str(architecture), known)}; "
            f"known are: {', '.join(sorted(known))}"
        )
    return str(architecture)


def model_spec(config: dict[str, Any]) -> ModelSpec:
    """The spec of a checkpoint from its `config.json`.

    Raises ModelLoadError for an unknown family, or a field that is missing or impossible.
    """
    architecture = architecture_of(config)
    spec: ModelSpec = _spec(FAMILIES[architecture], architecture, config)
    _check(spec)
    return spec


def canvas_spec(config: dict[str, Any]) -> CanvasSpec:
    """The same of a family that denoises random tokens."""
    architecture = architecture_of(config)
    spec: CanvasSpec = _spec(CANVAS_FAMILIES[architecture], architecture, config)
    _check_ids(spec.decoder.vocab_size, *(("eos_token_id", stop) for stop in spec.stop_ids))
    return spec


def _spec(family: Any, architecture: str, config: dict[str, Any]) -> Any:
    try:
        return family.spec(config)
    except KeyError as field:
        raise ModelLoadError(f"config.json of family '{architecture}' lacks the field {field}") from None


def _check(spec: ModelSpec) -> None:
    """Refuse what would fail, or never end, only once prompts run."""
    shape = spec.decoder
    stops = (("eos_token_id", stop) for stop in spec.stop_ids)
    _check_ids(shape.vocab_size, ("mask_token_id", spec.mask_id), *stops)
    if spec.mask_id in spec.stop_ids:
        raise ModelLoadError(f"config.json: token {spec.mask_id} cannot be both mask_token_id and eos_token_id")
    if shape.heads % shape.kv_heads:
        raise ModelLoadError(f"config.json: {shape.heads} heads cannot share {shape.kv_heads} key and value heads")
    if shape.experts is not None:
        _check_choice(shape.experts)


def _check_choice(experts: Experts) -> None:
    """There must be as many experts to choose from as are chosen."""
    size, rest = divmod(experts.number, experts.groups)
    if rest or (experts.groups > 1 and size < 2) or experts.top_k > experts.top_groups * size:
        raise ModelLoadError(
            f"config.json: {experts.top_k} of {experts.number} experts cannot be chosen from "
            f"{experts.top_groups} of {experts.groups} groups"
        )


def _check_ids(vocab_size: int, *ids: tuple[str, Any]) -> None:
    for name, token in ids:
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            raise ModelLoadError(f"config.json: {name} {token} is not in the vocabulary of {vocab_size}")
