"""A request becomes a row: parameters that mean nothing to a random canvas are refused, the others resolved."""

from __future__ import annotations

from dataclasses import replace

from contract.errors import BadPrompt
from contract.sampling import Rule, SamplingParams
from worker.engine.admission import Context, fitting, notes_on
from worker.engine.canvas.row import CanvasRow
from worker.engine.canvas.spec import CanvasSpec
from worker.engine.request import Plan, Request

FOREIGN = ("threshold", "factor", "kl_threshold", "edit_threshold", "block_length", "cache", "cache_refresh", "commit")
"""Parameters of other rules, blocks and caches."""
RULE: Rule = "entropy_bound"


def admit(request: Request, spec: CanvasSpec) -> CanvasRow:
    """A row for `request`.

    Raises BadPrompt: `empty_prompt`, `prompt_too_long` (naming the limit) or `bad_params` (naming the parameter).
    """
    params = request.params
    _refuse_foreign(params, spec)
    context = Context(spec.decoder.max_positions, least=spec.decoder.canvas_length)
    prompt_ids = fitting(request, context)
    plan = Plan(
        attention="canvas",
        rule=RULE,
        number=spec.entropy_bound if params.entropy_bound is None else params.entropy_bound,
        bound=0.0,
        max_new_tokens=min(params.max_new_tokens, context.room(len(prompt_ids))),
        denoise_steps=params.denoise_steps or spec.denoise_steps,
        block_length=spec.decoder.canvas_length,
        cache="none",
        cache_refresh=1,
        commit="separate",
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=params.seed or 0,
        truncate=params.truncate,
        notes=notes_on(request, len(prompt_ids), context),
    )
    return CanvasRow(replace(request, prompt_ids=prompt_ids), plan, spec)


def _refuse_foreign(params: SamplingParams, spec: CanvasSpec) -> None:
    foreign = [name for name in FOREIGN if getattr(params, name) is not None]
    foreign += [name for name, off in (("top_p", 1.0), ("top_k", 0)) if getattr(params, name) != off]
    if params.rule not in (None, RULE):
        foreign.insert(0, f"rule '{params.rule}'")
    if foreign:
        raise BadPrompt(
            "bad_params",
            f"{', '.join(foreign)}: family '{spec.family}' denoises whole canvases by rule '{RULE}'; leave it out",
        )
