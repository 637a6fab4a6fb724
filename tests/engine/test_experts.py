"""The layer of experts against two plain loops, and the decoder's options that came with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from worker.bench.peak import useful_flops
from worker.engine import EngineStats, Loaded
from worker.engine.memory import step_bytes
from worker.engine.models.decoder import Decoder, shapes
from worker.engine.models.experts import MixtureOfExperts, expert_shapes, within_best_groups
from worker.engine.models.spec import DecoderConfig, Experts

HIDDEN, POSITIONS = 20, 13
SOFTMAX = Experts(number=6, top_k=2, intermediate_size=8, router="softmax", renormalise=False)
KINDS = {
    "softmax": SOFTMAX,
    "renormalised": replace(SOFTMAX, renormalise=True),
    "sigmoid": replace(SOFTMAX, router="sigmoid", renormalise=True, scale=2.5, bias=True),
    "groups": replace(SOFTMAX, number=12, top_k=3, router="sigmoid", renormalise=True, groups=4, top_groups=2),
    "shared": replace(SOFTMAX, shared_intermediate_size=12),
    "all": replace(SOFTMAX, top_k=6),
}


def weights_of(config: Experts) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = expert_shapes(config, HIDDEN)
    return {name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for name, shape in shapes.items()}


def positions(count: int = POSITIONS) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(4))


def plainly(config: Experts, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """Every token, and for every token every expert."""

    def mlp(prefix: str, row: Tensor) -> Tensor:
        gate = weights[f"{prefix}gate"] @ row
        return weights[f"{prefix}down"] @ (gate * gate.sigmoid() * (weights[f"{prefix}up"] @ row))

    out = torch.zeros_like(x)
    for number, row in enumerate(x):
        logits = weights["router"] @ row
        score = logits.softmax(0) if config.router == "softmax" else logits.sigmoid()
        ranked = (score + weights["router_bias"] if config.bias else score).tolist()
        size = config.number // config.groups
        worth = [sum(sorted(ranked[first : first + size])[-2:]) for first in range(0, config.number, size)]
        groups = sorted(range(config.groups), key=worth.__getitem__)[-config.top_groups :]
        allowed = [expert for expert in range(config.number) if expert // size in groups]
        chosen = sorted(allowed, key=ranked.__getitem__)[-config.top_k :]
        total = sum(score[expert] for expert in chosen) if config.renormalise else 1.0
        for expert in range(config.number):
            if expert in chosen:
                out[number] += score[expert] / total * config.scale * mlp(f"experts.{expert}.", row)
        if config.shared_intermediate_size:
            out[number] += mlp("shared_", row)
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_the_layer_is_that_of_two_plain_loops(kind: str) -> None:
    weights, x = weights_of(KINDS[kind]), positions()
    out = MixtureOfExperts(KINDS[kind], weights.__getitem__)(x)
    torch.testing.assert_close(out, plainly(KINDS[kind], weights, x), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_position_does_not_depend_on_its_neighbours(kind: str) -> None:
    """Nor on their number, their order, or on experts that nobody chose: one position alone leaves most unused."""
    layer, x = MixtureOfExperts(KINDS[kind], weights_of(KINDS[kind]).__getitem__), positions()
    together = layer(x)
    order = torch.randperm(POSITIONS, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(layer(x[order]), together[order], atol=1e-6, rtol=0)
    for number in range(POSITIONS):
        torch.testing.assert_close(layer(x[number : number + 1])[0], together[number], atol=1e-6, rtol=0)


def test_no_position_is_no_work() -> None:
    layer = MixtureOfExperts(SOFTMAX, weights_of(SOFTMAX).__getitem__)
    assert layer(positions(0)).shape == (0, HIDDEN)


def test_the_layer_answers_in_the_models_dtype() -> None:
    config = KINDS["sigmoid"]
    weights = {name: w if name == "router_bias" else w.bfloat16() for name, w in weights_of(config).items()}
    layer, x = MixtureOfExperts(config, weights.__getitem__), positions().bfloat16()
    exact = plainly(config, {name: w.float() for name, w in weights.items()}, x.float())
    assert layer(x).dtype == torch.bfloat16
    torch.testing.assert_close(layer(x).float(), exact, atol=0.1, rtol=0.05)


def test_the_best_expert_alone_does_not_carry_its_group() -> None:
    """Without groups expert 0 is the best; its group is worth 0.9 + 0.0, the second one 0.5 + 0.6."""
    ranked = torch.tensor([[0.9, 0.0, -1.0, 0.5, 0.6, -1.0]])
    limited = within_best_groups(ranked, groups=2, best=1)
    assert ranked.argmax() == 0
    assert limited.argmax() == 4
    assert limited.isinf().tolist() == [[True, True, True, False, False, False]]


def test_the_limit_of_groups_changes_what_the_layer_computes() -> None:
    weights, x = weights_of(KINDS["groups"]), positions()
    limited = MixtureOfExperts(KINDS["groups"], weights.__getitem__)(x)
    free = MixtureOfExperts(replace(KINDS["groups"], groups=1, top_groups=1), weights.__getitem__)(x)
    differs = (limited - free).abs().amax(-1) > 1e-3
    assert 0 < differs.sum() < POSITIONS


DECODER = DecoderConfig(
    vocab_size=11,
    hidden_size=HIDDEN,
    intermediate_size=16,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    norm_eps=1e-5,
    rope_theta=100.0,
    max_positions=32,
)


def decoder_of(config: DecoderConfig) -> tuple[Decoder, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(6)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes(config).items()}
    return Decoder(config, weights.__getitem__), weights


def first_heads(config: DecoderConfig, at: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Token 3 at each position of `at`: the first layer's queries, keys and values, and its `qkv` product in heads."""
    decoder, weights = decoder_of(config)
    seen: list[Any] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append((q, k, v))
        return torch.zeros(len(q), config.heads * config.head_dim)

    decoder.hidden(torch.full((len(at),), 3), torch.tensor(at), attend, torch.tensor([0]))
    x = weights["embed"][3]
    x = x / (x.pow(2).mean() + config.norm_eps).sqrt() * weights["layers.0.attention_norm"]
    return *seen[0], (weights["layers.0.qkv"] @ x).view(-1, config.head_dim)


def test_a_fused_weight_holds_queries_then_keys_then_values() -> None:
    config = replace(DECODER, fused_qkv=True)
    q, k, v, product = first_heads(config, [0])
    torch.testing.assert_close(torch.cat([q[0], k[0], v[0]]), product, atol=1e-5, rtol=0)  # position 0 does not rotate


def test_only_the_first_dimensions_of_a_head_are_rotated() -> None:
    config = replace(DECODER, fused_qkv=True, rotary_dim=4)
    q, k, _, product = first_heads(config, [0, 5])
    turned = torch.cat([q[1], k[1]])  # heads and key heads
    plain = product[: config.heads + config.kv_heads]
    torch.testing.assert_close(turned[:, 4:], plain[:, 4:], atol=1e-5, rtol=0)
    for pair, angle in ((0, 5.0), (1, 5.0 * 100.0**-0.5)):
        c, s = torch.tensor(angle).cos(), torch.tensor(angle).sin()
        a, b = plain[:, pair], plain[:, pair + 2]
        torch.testing.assert_close(turned[:, pair], a * c - b * s, atol=1e-4, rtol=0)
        torch.testing.assert_close(turned[:, pair + 2], b * c + a * s, atol=1e-4, rtol=0)


def test_dense_layers_come_first() -> None:
    config = replace(DECODER, experts=replace(SOFTMAX, dense_layers=1))
    names = shapes(config)
    assert "layers.0.gate" in names
    assert "layers.0.router" not in names
    assert "layers.1.experts.5.down" in names
    assert "layers.1.gate" not in names


def test_a_steps_memory_counts_every_expert_that_a_position_goes_to() -> None:
    plain, _ = decoder_of(DECODER)
    experts, _ = decoder_of(replace(DECODER, experts=replace(SOFTMAX, top_k=4)))
    more = step_bytes(experts, 1000) - step_bytes(plain, 1000)
    assert more == 1000 * 4 * (4 * (3 * HIDDEN + 4 * 8) - 3 * 16)


def test_useful_flops_count_the_experts_that_a_position_goes_to(block_causal: Loaded) -> None:
    experts = replace(SOFTMAX, dense_layers=1, shared_intermediate_size=12)
    loaded = replace(block_causal, spec=replace(block_causal.spec, decoder=replace(DECODER, experts=experts)))
    attention = HIDDEN * (4 + 2 * 2) * 8 + 4 * 8 * HIDDEN
    dense, mixture = 3 * HIDDEN * 16, HIDDEN * 6 + 3 * HIDDEN * (2 * 8 + 12)
    assert useful_flops(loaded, EngineStats(denoise_positions=1)) == 2 * (2 * attention + dense + mixture)
