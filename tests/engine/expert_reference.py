"""The families with experts, plainly: what the engine's forward pass is held against.

SDAR's is transformers' Qwen3-MoE. The two others are written out here from the published description: they read a
checkpoint by its published names, one head, one token's choice and one expert at a time.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests import checkpoints
from tests.engine.reference import Reference


class Qwen3Moe(Reference):
    """transformers' model with the weights of a checkpoint in its layout before version 5, one tensor per expert."""

    def __init__(self, folder: Path) -> None:
        config = Qwen3MoeConfig(**json.loads((folder / "config.json").read_text()), attn_implementation="eager")
        self._model = Qwen3MoeForCausalLM(config).eval()
        self._model.load_state_dict(stacked(load_file(folder / "model.safetensors")))
        self.shift = 0


def stacked(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each layer's experts in two tensors, as transformers holds them now."""
    out = {name: weight for name, weight in weights.items() if ".experts." not in name}
    for number in range(checkpoints.LAYERS):
        experts = f"model.layers.{number}.mlp.experts"

        def each(part: str, prefix: str = experts) -> list[Tensor]:
            return [weights[f"{prefix}.{expert}.{part}_proj.weight"] for expert in range(checkpoints.EXPERTS)]

        pairs = zip(each("gate"), each("up"), strict=True)
        out[f"{experts}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        out[f"{experts}.down_proj"] = torch.stack(each("down"))
    return out


class Plain(Reference):
    """A pre-norm transformer; where the two families differ is left to them."""

    EMBED: ClassVar[str]
    Q_NORM: ClassVar[str]
    K_NORM: ClassVar[str]
    OUT: ClassVar[str]

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.weights = load_file(folder / "model.safetensors")
        self.shift = 0

    def logits(self, tokens: list[int], positions: list[int], visible: Tensor) -> Tensor:
        x = self.weights[self.EMBED][tokens]
        for number in range(self.config["num_hidden_layers"]):
            layer = f"model.layers.{number}"
            x = x + self.attention(layer, self.norm(x, f"{layer}.input_layernorm"), positions, visible)
            x = x + self.mlp(number, self.norm(x, f"{layer}.post_attention_layernorm"))
        return self.norm(x, "model.norm") @ self.weights["lm_head.weight"].T

    def attention(self, layer: str, x: Tensor, positions: list[int], visible: Tensor) -> Tensor:
        """One head after the other; `queries` share the keys of their group."""
        queries, keys, values = self.heads(layer, x)
        group = len(queries) // len(keys)
        seen = []
        for number, query in enumerate(queries):
            q = self.rotated(self.norm(query, f"{layer}.{self.Q_NORM}"), positions)
            k = self.rotated(self.norm(keys[number // group], f"{layer}.{self.K_NORM}"), positions)
            scores = (q @ k.T / math.sqrt(q.shape[-1])).masked_fill(~visible, -torch.inf)
            seen.append(scores.softmax(-1) @ values[number // group])
        return torch.cat(seen, dim=-1) @ self.weights[f"{layer}.{self.OUT}.weight"].T

    def rotated(self, x: Tensor, positions: list[int]) -> Tensor:
        """Pairs of dimensions as complex numbers, turned by the position; what has no pair stays as it is."""
        width = int(x.shape[-1] * self.config["partial_rotary_factor"])
        half = width // 2
        turns = torch.tensor([self.config["rope_theta"] ** (-2 * j / width) for j in range(half)], dtype=torch.float64)
        angles = torch.tensor(positions, dtype=torch.float64)[:, None] * turns
        pairs = torch.complex(x[:, :half].double(), x[:, half:width].double())
        turned = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real.float(), turned.imag.float(), x[:, width:]], dim=-1)

    def experts(self, number: int, x: Tensor) -> Tensor:
        """Every token's choice for itself, then every expert for the tokens that chose it."""
        mlp = f"model.layers.{number}.mlp"
        choices = [self.choice(number, logits) for logits in (x @ self.weights[f"{mlp}.gate.weight"].T).tolist()]
        out = torch.zeros_like(x)
        for expert in range(self.config["num_experts"]):
            tokens = [token for token, choice in enumerate(choices) if expert in choice]
            weights = torch.tensor([choices[token][expert] for token in tokens]).view(-1, 1)
            out[tokens] += weights * self.swiglu(f"{mlp}.experts.{expert}", x[tokens])
        return out

    def swiglu(self, prefix: str, x: Tensor) -> Tensor:
        gate, up, down = (self.weights[f"{prefix}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        gated = x @ gate.T
        return (gated * gated.sigmoid() * (x @ up.T)) @ down.T

    def norm(self, x: Tensor, name: str) -> Tensor:
        size = (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()
        return x / size * self.weights[f"{name}.weight"]

    def parts(self, weight: Tensor, x: Tensor) -> list[Tensor]:
        """What `weight` makes of x, one head after the other."""
        return list((x @ weight.T).split(self.head_dim, dim=-1))

    @property
    def head_dim(self) -> int:
        size: int = self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"]
        return size

    def heads(self, layer: str, x: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Queries, keys and values, (T, head_dim) each."""
        raise NotImplementedError

    def mlp(self, number: int, x: Tensor) -> Tensor:
        raise NotImplementedError

    def choice(self, number: int, logits: list[float]) -> dict[int, float]:
        """One token's experts and their weights."""
        raise NotImplementedError


class LLaDAMoE(Plain):
    """The best experts by softmax, weighed by it as it is."""

    EMBED = "model.embed_tokens.weight"
    Q_NORM, K_NORM, OUT = "self_attn.q_norm", "self_attn.k_norm", "self_attn.o_proj"

    def heads(self, layer: str, x: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        q, k, v = (self.parts(self.weights[f"{layer}.self_attn.{part}_proj.weight"], x) for part in "qkv")
        return q, k, v

    def mlp(self, number: int, x: Tensor) -> Tensor:
        return self.experts(number, x)

    def choice(self, number: int, logits: list[float]) -> dict[int, float]:
        total = sum(math.exp(logit) for logit in logits)
        share = [math.exp(logit) / total for logit in logits]
        best = sorted(range(len(share)), key=share.__getitem__)[-self.config["num_experts_per_tok"] :]
        return {expert: share[expert] for expert in best}


class LLaDA2(Plain):
    """Experts from the best groups by sigmoid and bias, weighed by their share in the sigmoids alone; one for all."""

    EMBED = "model.word_embeddings.weight"
    Q_NORM, K_NORM, OUT = "attention.query_layernorm", "attention.key_layernorm", "attention.dense"

    def heads(self, layer: str, x: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        heads = self.parts(self.weights[f"{layer}.attention.query_key_value.weight"], x)
        queries, shared = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        return heads[:queries], heads[queries : queries + shared], heads[queries + shared :]

    def mlp(self, number: int, x: Tensor) -> Tensor:
        mlp = f"model.layers.{number}.mlp"
        if number < self.config["first_k_dense_replace"]:
            return self.swiglu(mlp, x)
        return self.experts(number, x) + self.swiglu(f"{mlp}.shared_experts", x)

    def choice(self, number: int, logits: list[float]) -> dict[int, float]:
        c = self.config
        bias = self.weights[f"model.layers.{number}.mlp.gate.expert_bias"].tolist()
        score = [1 / (1 + math.exp(-logit)) for logit in logits]
        ranked = [one + extra for one, extra in zip(score, bias, strict=True)]
        size = len(ranked) // c["n_group"]
        worth = [sum(sorted(ranked[first : first + size])[-2:]) for first in range(0, len(ranked), size)]
        groups = sorted(range(c["n_group"]), key=worth.__getitem__)[-c["topk_group"] :]
        allowed = [expert for expert in range(len(ranked)) if expert // size in groups]
        best = sorted(allowed, key=ranked.__getitem__)[-c["num_experts_per_tok"] :]
        total = sum(score[expert] for expert in best)
        return {expert: score[expert] / total * c["routed_scaling_factor"] for expert in best}
