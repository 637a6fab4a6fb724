"""Which family a checkpoint belongs to: `architectures[0]` decides, since one `model_type` names several models."""

from __future__ import annotations

from typing import Any

from contract.errors import ModelLoadError, nearest
from worker.engine.models import (
    a2d_qwen3,
    bert,
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


def model_spec(config: dict[str, Any]) -> ModelSpec:
    """The spec of a checkpoint from its `config.json`.

    Raises ModelLoadError for an unknown family (with the nearest known name), or a field that is missing or impossible.
    """
    architecture = next(iter(config.get("architectures") or []), None)
    if architecture not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ModelLoadError(
            f"unknown model family '{architecture}'{nearest(str(architecture), FAMILIES)}; known are: {known}"
        )
    try:
        spec = FAMILIES[architecture].spec(config)
    except KeyError as field:
        raise ModelLoadError(f"config.json of family '{architecture}' lacks the field {field}") from None
    _check(spec)
    return spec


def _check(spec: ModelSpec) -> None:
    """Refuse what would fail, or never end, only once prompts run."""
    shape = spec.decoder
    for name, token in (("mask_token_id", spec.mask_id), *(("eos_token_id", stop) for stop in spec.stop_ids)):
        if not isinstance(token, int) or not 0 <= token < shape.vocab_size:
            raise ModelLoadError(f"config.json: {name} {token} is not in the vocabulary of {shape.vocab_size}")
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
