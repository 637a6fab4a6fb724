"""Which family a checkpoint belongs to: `architectures[0]` decides, since one `model_type` names several models."""

from __future__ import annotations

from typing import Any

from contract.errors import ModelLoadError, nearest
from worker.engine.models import llada, llama_block
from worker.engine.models.spec import ModelSpec

FAMILIES = {architecture: family for family in (llama_block, llada) for architecture in family.ARCHITECTURES}


def model_spec(config: dict[str, Any]) -> ModelSpec:
    """The spec of a checkpoint from its `config.json`.

    Raises ModelLoadError for an unknown family (with the nearest known name) or a missing field.
    """
    architecture = next(iter(config.get("architectures") or []), None)
    if architecture not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ModelLoadError(
            f"unknown model family '{architecture}'{nearest(str(architecture), FAMILIES)}; known are: {known}"
        )
    try:
        return FAMILIES[architecture].spec(config)
    except KeyError as field:
        raise ModelLoadError(f"config.json of family '{architecture}' lacks the field {field}") from None
