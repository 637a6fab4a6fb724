"""Angles of plain and of stretched contexts are transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Ministral3Config
from transformers.models.ministral3.modeling_ministral3 import Ministral3RotaryEmbedding, get_llama_4_attn_scale

from contract.errors import ModelLoadError
from worker.engine.models.llama_names import llama_decoder
from worker.engine.models.rope import query_scale, rope_tables

CPU = torch.device("cpu")
POSITIONS = 3000
FIELDS: dict[str, Any] = {
    "vocab_size": 10,
    "hidden_size": 64,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 256}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e4},
        YARN,
        YARN | {"factor": 0.25},
        YARN | {"factor": 0.25, "original_max_position_embeddings": 16384, "mscale": 1.0, "mscale_all_dim": 1.0},
        YARN | {"original_max_position_embeddings": 16384, "mscale": 1.0, "mscale_all_dim": 1.0},
        YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
        YARN | {"attention_factor": 0.7},
        YARN | {"beta_fast": 8.0, "beta_slow": 2.0},
    ],
)
def test_angles_are_those_of_transformers(rope: dict[str, Any]) -> None:
    theirs = Ministral3RotaryEmbedding(Ministral3Config(**FIELDS, rope_parameters=dict(rope)))
    cos, sin = theirs(torch.zeros(1, dtype=torch.float32), torch.arange(POSITIONS)[None])
    decoder = llama_decoder(FIELDS | {"rope_parameters": rope})
    ours = rope_tables(32, decoder.rope_theta, decoder.yarn, POSITIONS, torch.float32, CPU)
    # They multiply in float32: angles of thousands are off by some 1e-4.
    torch.testing.assert_close(ours[0], cos[0], atol=1e-3, rtol=0)
    torch.testing.assert_close(ours[1], sin[0], atol=1e-3, rtol=0)
    torch.testing.assert_close(ours[0][:100], cos[0][:100], atol=1e-5, rtol=0)


def test_queries_grow_as_those_of_ministral() -> None:
    decoder = llama_decoder(FIELDS | {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}})
    theirs = get_llama_4_attn_scale(torch.arange(POSITIONS)[None], 0.1, 256)
    ours = query_scale(decoder.yarn, POSITIONS, torch.float32, CPU)
    assert ours is not None
    torch.testing.assert_close(ours.view(-1), theirs.view(-1))


@pytest.mark.parametrize(("beta", "positions"), [(0.1, 256), (0.0, POSITIONS)])
def test_queries_that_grow_nowhere_are_left_alone(beta: float, positions: int) -> None:
    decoder = llama_decoder(FIELDS | {"rope_parameters": YARN | {"llama_4_scaling_beta": beta}})
    assert query_scale(decoder.yarn, positions, torch.float32, CPU) is None


def test_the_old_field_is_read_and_a_missing_factor_is_that_of_the_contexts() -> None:
    scaled = {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "original_max_position_embeddings": 256}}
    decoder = llama_decoder(FIELDS | scaled)
    assert decoder.yarn is not None
    assert (decoder.rope_theta, decoder.yarn.factor) == (1e6, 16.0)


@pytest.mark.parametrize(
    ("rope", "named"),
    [({"rope_type": "longrope"}, "rope type 'longrope'"), (YARN | {"truncate": False}, "yarn's field 'truncate'")],
)
def test_what_would_change_the_angles_and_is_not_known_is_refused(rope: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelLoadError, match=named):
        llama_decoder(FIELDS | {"rope_parameters": rope})
