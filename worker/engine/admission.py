"""A request becomes a row: its parameters resolved against the model's recommendations, its limits checked."""

from __future__ import annotations

from dataclasses import dataclass, replace

from contract.errors import BadPrompt
from contract.sampling import Rule, SamplingParams
from worker.engine.bidirectional import BidirectionalRow
from worker.engine.block_causal import BlockCausalRow
from worker.engine.causal import CausalRow
from worker.engine.causal_context import CausalContextRow
from worker.engine.models.spec import ModelSpec
from worker.engine.request import Plan, Request
from worker.engine.sequence import Row
from worker.engine.unmasking import DEFAULT_BOUNDS, DEFAULT_NUMBERS, RULES

ROWS: dict[str, type[Row]] = {row.KIND: row for row in (CausalContextRow, BlockCausalRow, BidirectionalRow, CausalRow)}


def admit(key: int, request: Request, spec: ModelSpec) -> Row:
    """A row for `request`, its parameters resolved against the model's recommendations.

    Raises BadPrompt: `empty_prompt`, `prompt_too_long` (naming the limit) or `bad_params`.
    """
    context = Context.of(spec, request.params.block_length or spec.block_length)
    prompt_ids = fitting(request, context)
    plan = _plan(request.params, spec, context.room(len(prompt_ids)), notes_on(request, len(prompt_ids), context))
    return ROWS[spec.attention](key, replace(request, prompt_ids=prompt_ids), plan, spec)


@dataclass(frozen=True)
class Context:
    """How many positions there are for prompt and answer.

    A causal context needs room for a last whole block after the prompt, and so does a grid that begins there; with
    block-causal attention the context else holds whole blocks, the prompt's included, unless the last one is cut.
    """

    usable: int
    least: int  # what an answer takes at least; answers are multiples of it

    @classmethod
    def of(cls, spec: ModelSpec, block_length: int) -> Context:
        context = spec.decoder.max_positions
        whole_blocks = spec.attention == "block_causal" and spec.last_block == "whole"
        from_answer = spec.attention == "causal_context" or (whole_blocks and spec.grid == "answer")
        least = block_length if from_answer else 1
        usable = context // block_length * block_length if whole_blocks and not from_answer else context
        if least >= usable:
            raise BadPrompt("bad_params", f"block_length: {block_length} does not fit into a context of {context}")
        return cls(usable, least)

    def room(self, prompt_length: int) -> int:
        """Answer tokens that the context leaves."""
        return (self.usable - prompt_length) // self.least * self.least

    def longest_prompt(self, max_new_tokens: int) -> int:
        """What `truncate` leaves of a prompt: room for the answer asked for, but at least half of the context."""
        answer = -(-max_new_tokens // self.least) * self.least
        return min(max(self.usable - answer, self.usable // 2), self.usable - self.least)


def fitting(request: Request, context: Context) -> tuple[int, ...]:
    """The prompt's tokens, cut where it asks for that: at its beginning, or in its middle."""
    ids, truncate = request.prompt_ids, request.params.truncate
    if not ids:
        raise BadPrompt("empty_prompt", "the prompt has no tokens")
    longest = context.longest_prompt(request.params.max_new_tokens)
    if truncate is not None and len(ids) > longest:
        first = longest // 2 if truncate == "middle" else 0
        return ids[:first] + ids[len(ids) - (longest - first) :]
    if context.room(len(ids)) < 1:
        raise BadPrompt(
            "prompt_too_long",
            f"the prompt has {len(ids)} tokens; the model's context of {context.usable} leaves no room for an answer "
            f"(longest prompt: {context.usable - context.least} tokens, or set truncate)",
        )
    return ids


def notes_on(request: Request, kept: int, context: Context) -> tuple[str, ...]:
    notes: list[str] = []
    if kept < len(request.prompt_ids):
        notes.append(
            f"prompt cut from {len(request.prompt_ids)} to {kept} tokens (truncate: {request.params.truncate})"
        )
    asked, room = request.params.max_new_tokens, context.room(kept)
    if asked > room:
        notes.append(f"max_new_tokens cut from {asked} to {room}: the context has {context.usable} positions")
    return tuple(notes)


def _plan(params: SamplingParams, spec: ModelSpec, room: int, notes: tuple[str, ...]) -> Plan:
    rule = params.resolved_rule(spec.rule)
    if params.cache is not None and spec.attention != "bidirectional":
        raise BadPrompt("bad_params", f"cache: family '{spec.family}' always uses its exact cache; leave it out")
    if params.commit is not None and spec.attention in ("bidirectional", "causal"):
        raise BadPrompt("bad_params", f"commit: family '{spec.family}' commits no blocks; leave it out")
    if RULES[rule].edits and spec.attention == "causal":
        raise BadPrompt("bad_params", f"rule: '{rule}' edits blocks, of which family '{spec.family}' has none")
    number, bound = _numbers(params, rule, spec)
    max_new_tokens = min(params.max_new_tokens, room)
    return Plan(
        attention=spec.attention,
        rule=rule,
        number=number,
        bound=bound,
        max_new_tokens=max_new_tokens,
        denoise_steps=params.denoise_steps or max_new_tokens,
        block_length=params.block_length or spec.block_length,
        cache=params.cache or "none",
        cache_refresh=params.cache_refresh or 1,
        commit=params.commit or spec.commit,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=params.seed or 0,
        truncate=params.truncate,
        notes=notes,
    )


def _numbers(params: SamplingParams, rule: Rule, spec: ModelSpec) -> tuple[float, float]:
    """The rule's number and its bound: the prompt's, else the rule's own default, else the model's threshold."""
    own = {
        "entropy_bound": params.entropy_bound,
        "entropy_threshold": params.entropy_threshold,
        "factor": params.factor,
    }
    number = own.get(rule, params.threshold)
    bound = {"klass": params.kl_threshold, "joint_threshold": params.edit_threshold}.get(rule)
    return (
        DEFAULT_NUMBERS.get(rule, spec.threshold) if number is None else number,
        DEFAULT_BOUNDS.get(rule, 0.0) if bound is None else bound,
    )
