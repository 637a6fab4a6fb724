"""Mixture of experts: a router sends each position to a few of many small MLPs, whose answers are weighed and summed.

Positions are sorted by expert, so that an expert multiplies once for all rows, and not at all when nobody chose it.
A position's answers are summed in the order of its own ranking: its neighbours do not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.engine.models.linear import Linear, MakeLinear
from worker.engine.models.spec import Experts
from worker.engine.models.swiglu import SwiGLU, gated, swiglu_shapes


class Router:
    """Scores every expert for every position and chooses the best."""

    def __init__(self, config: Experts, weight: Tensor, bias: Tensor | None) -> None:
        self.config = config
        self.dtype = torch.float32 if config.router == "sigmoid" else weight.dtype
        self.gate = Linear(weight.to(self.dtype))  # (experts, d)
        self.bias = bias  # (experts,) float32

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (T, d) -> weights float32 and experts int64, (T, top_k) each, the best first.

        The bias and the groups take part in the choice only: what weighs an expert is its score.
        """
        c = self.config
        logits = self.gate(x.to(self.dtype)).float()
        scores = logits.sigmoid() if c.router == "sigmoid" else logits.softmax(-1)  # (T, experts)
        ranked = scores if self.bias is None else scores + self.bias
        if c.groups > 1:
            ranked = within_best_groups(ranked, c.groups, c.top_groups)
        experts = ranked.topk(c.top_k, dim=-1).indices
        weights = scores.gather(-1, experts)
        if c.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * c.scale, experts


def within_best_groups(ranked: Tensor, groups: int, best: int) -> Tensor:
    """(T, experts) -> the same, -inf outside the `best` of `groups` equal parts; a part is worth its best two experts.

    The routing of DeepSeek-V3 (arXiv 2412.19437), taken over by LLaDA2.
    """
    grouped = ranked.view(len(ranked), groups, -1)  # (T, groups, experts of a group)
    worth = grouped.topk(2, dim=-1).values.sum(-1)
    outside = torch.ones_like(worth, dtype=torch.bool).scatter_(-1, worth.topk(best, dim=-1).indices, False)
    return grouped.masked_fill(outside.unsqueeze(-1), -torch.inf).view_as(ranked)


class PerExpert:
    """A product with a matrix for each expert, over positions that are sorted by expert."""

    def __init__(self, weights: Iterable[Tensor], linear: MakeLinear) -> None:
        self.parts = [linear(weight) for weight in weights]

    def __call__(self, x: Tensor, counts: list[int]) -> Tensor:
        """x (N, in), of which the first `counts[0]` go to expert 0 and so on -> (N, out)."""
        shares = zip(self.parts, x.split(counts), strict=True)
        return torch.cat([part(share) for part, share in shares if len(share)])


class MixtureOfExperts:
    """x (T, d) -> the weighted sum of the chosen experts, plus the expert that all share where there is one (T, d)."""

    def __init__(self, config: Experts, get: Callable[[str], Tensor], linear: MakeLinear = Linear) -> None:
        numbers = range(config.number)
        self.router = Router(config, get("router"), get("router_bias") if config.bias else None)
        wide = (torch.cat([get(f"experts.{n}.gate"), get(f"experts.{n}.up")]) for n in numbers)
        self.gate_up = PerExpert(wide, linear)
        self.down = PerExpert((get(f"experts.{n}.down") for n in numbers), linear)
        shared = config.shared_intermediate_size
        self.shared = SwiGLU(*(get(f"shared_{part}") for part in ("gate", "up", "down")), linear) if shared else None

    def __call__(self, x: Tensor) -> Tensor:
        if not len(x):  # where nothing is predicted, no position goes through the last layer
            return x
        mixed = self._mixed(x).to(x.dtype)
        return mixed if self.shared is None else mixed + self.shared(x)

    def _mixed(self, x: Tensor) -> Tensor:
        """(T, d) float32."""
        weights, experts = self.router(x)
        top_k, chosen = experts.shape[-1], experts.flatten()
        order = chosen.argsort(stable=True)  # (T * top_k,): sorted by expert
        # A layer's one wait for the device: how many positions a product has must be known on the host.
        counts = chosen.new_zeros(len(self.down.parts)).scatter_add_(0, chosen, torch.ones_like(chosen)).tolist()
        out = self.down(gated(self.gate_up(x.index_select(0, order // top_k), counts)), counts)  # (T * top_k, d)
        # For each position the weighted sum of its rows of `out`, which need not be brought into order first.
        rows = order.argsort().view_as(experts)
        return F.embedding_bag(rows, out.float(), per_sample_weights=weights, mode="sum")


def expert_shapes(config: Experts, hidden_size: int) -> dict[str, tuple[int, ...]]:
    """The weights of such a layer as a checkpoint holds them."""
    table: dict[str, tuple[int, ...]] = {"router": (config.number, hidden_size)}
    if config.bias:
        table["router_bias"] = (config.number,)
    for part, shape in swiglu_shapes(hidden_size, config.intermediate_size).items():
        table |= {f"experts.{number}.{part}": shape for number in range(config.number)}
    if config.shared_intermediate_size:
        shared = swiglu_shapes(hidden_size, config.shared_intermediate_size)
        table |= {f"shared_{part}": shape for part, shape in shared.items()}
    return table
