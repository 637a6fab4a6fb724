"""Which family a checkpoint belongs to: `architectures[0]` decides, since one `model_type` names several models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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
from worker.engine.models.spec import DecoderConfig, Experts, ModelSpec

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

MOST_LAYERS = 1_000
MOST_MATRICES = 100_000
"""Of layers times experts. Both bounds are far beyond any model: what is listed for a larger one would fill memory."""
LONGEST_CONTEXT = 1 << 22
"""Positions for which tables of angles are made when a model is loaded."""
LARGEST_SIZE = 1 << 31
LARGEST_REAL = 1e18
_LAYERS = ("num_hidden_layers", "n_layers", "n_blocks")
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim")


def architecture_of(config: dict[str, Any]) -> str:
    """The family's key. Raises ModelLoadError for an unknown one, with the nearest known name."""
    named = config.get("architectures")
    architecture = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else None
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
    with _understood(architecture):
        _check_layers(config)
        spec: ModelSpec = FAMILIES[architecture].spec(config)
        _check(spec)
    return spec


def canvas_spec(config: dict[str, Any]) -> CanvasSpec:
    """The same of a family that denoises random tokens."""
    architecture = architecture_of(config)
    with _understood(architecture):
        spec: CanvasSpec = CANVAS_FAMILIES[architecture].spec(config)
        _check_layers(dict(spec.text))
        _check_number("vocab_size", spec.decoder.vocab_size, LARGEST_SIZE)
        _check_number("max_positions", spec.decoder.max_positions, LONGEST_CONTEXT)
        _check_ids(spec.decoder.vocab_size, *(("eos_token_id", stop) for stop in spec.stop_ids))
    return spec


@contextlib.contextmanager
def _understood(architecture: str) -> Iterator[None]:
    """Families take fields as they are published; what anything else leads to is a complaint about the file."""
    try:
        yield
    except KeyError as field:
        raise ModelLoadError(f"config.json of family '{architecture}' lacks the field {field}") from None
    except (TypeError, ValueError, ArithmeticError, AttributeError, IndexError) as error:
        what = f"{type(error).__name__}: {str(error)[:200]}"
        raise ModelLoadError(f"config.json of family '{architecture}' has a value that cannot be ({what})") from None


def _check(spec: ModelSpec) -> None:
    """Refuse what would fail, or never end, only once prompts run."""
    shape = spec.decoder
    _check_shape(shape)
    stops = (("eos_token_id", stop) for stop in spec.stop_ids)
    _check_ids(shape.vocab_size, ("mask_token_id", spec.mask_id), *stops)
    if spec.mask_id in spec.stop_ids:
        raise ModelLoadError(f"config.json: token {spec.mask_id} cannot be both mask_token_id and eos_token_id")
    if shape.heads % shape.kv_heads:
        raise ModelLoadError(f"config.json: {shape.heads} heads cannot share {shape.kv_heads} key and value heads")
    if shape.experts is not None:
        _check_choice(shape.experts)


def _check_layers(config: dict[str, Any]) -> None:
    """Before a family counts through them."""
    for name in _LAYERS:
        if config.get(name) is not None:
            _check_number(name, config[name], MOST_LAYERS)


def _check_shape(shape: DecoderConfig) -> None:
    for name in _SIZES:
        _check_number(name, getattr(shape, name), LARGEST_SIZE)
    _check_number("the number of layers", shape.layers, MOST_LAYERS)
    _check_number("max_positions", shape.max_positions, LONGEST_CONTEXT)
    if shape.rotary_dim is not None:
        _check_number("rotary_dim", shape.rotary_dim, shape.head_dim)
    for name in ("norm_eps", "rope_theta"):  # 0: there is none
        if not 0 <= getattr(shape, name) < LARGEST_REAL:
            raise ModelLoadError(f"config.json: {name} cannot be {getattr(shape, name)!r}")
    if shape.experts is not None:
        _check_number("the number of experts", shape.experts.number, MOST_MATRICES // shape.layers)
        if type(shape.experts.dense_layers) is not int:
            raise ModelLoadError(
                f"config.json: {str(shape.experts.dense_layers)[:40]} layers cannot be without experts"
            )


def _check_number(name: str, value: Any, most: int) -> None:
    if type(value) is not int or not 1 <= value <= most:
        raise ModelLoadError(f"config.json: {name} cannot be {str(value)[:40]}: whole numbers from 1 to {most:,} can")


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
