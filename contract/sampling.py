"""How one prompt is denoised: validated once, frozen afterwards.

Read by the parser (which turns a violation into an error row), carried in the job, obeyed by the engine.
A field left at None means "the model's own recommendation", which the engine resolves at admission.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from contract.errors import BadPrompt, nearest

Rule = Literal[
    "fixed_steps",
    "threshold",
    "left_to_right",
    "factor",
    "entropy_bound",
    "entropy_threshold",
    "klass",
    "joint_threshold",
]
CacheKind = Literal["none", "prefix", "dual"]
Commit = Literal["separate", "fused"]
Truncate = Literal["left", "middle"]


class SamplingParams(BaseModel):
    """Sampling parameters of one prompt. Definitions of the rules stand in `worker/engine/unmasking/`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)

    max_new_tokens: Annotated[int, Field(ge=1, le=1_000_000)] = Field(256, description="longest answer, in tokens")
    rule: Rule | None = Field(None, description="how tokens are accepted")
    denoise_steps: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(
        None, description="denoise steps over the whole answer, for rule fixed_steps"
    )
    threshold: Annotated[float, Field(gt=0.0, le=1.0)] | None = Field(
        None, description="confidence at which a token is accepted"
    )
    factor: Annotated[float, Field(gt=0.0)] | None = Field(None, description="factor, for rule factor")
    entropy_bound: Annotated[float, Field(ge=0.0)] | None = Field(
        None, description="bound of the entropy, for rule entropy_bound"
    )
    entropy_threshold: Annotated[float, Field(gt=0.0)] | None = Field(
        None, description="entropy below which a token is accepted, for rule entropy_threshold"
    )
    kl_threshold: Annotated[float, Field(gt=0.0)] | None = Field(None, description="bound of the KL, for rule klass")
    edit_threshold: Annotated[float, Field(gt=0.0, le=1.0)] | None = Field(
        None, description="confidence at which tokens are edited, for rule joint_threshold"
    )
    block_length: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        None, description="positions denoised as one block"
    )
    cache: CacheKind | None = Field(
        None, description="what bidirectional models keep of earlier steps: none, prefix or dual"
    )
    cache_refresh: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(
        None, description="blocks between two computations of the whole canvas"
    )
    commit: Commit | None = Field(
        None, description="how models with a causal context write a finished block: separate or fused"
    )
    temperature: Annotated[float, Field(ge=0.0, le=10.0)] = Field(0.0, description="sampling temperature, 0 for none")
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = Field(1.0, description="nucleus sampling")
    top_k: Annotated[int, Field(ge=0)] = Field(0, description="sample among the k most likely tokens, 0 for all")
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = Field(
        None, description="seed; the same one gives the same text"
    )
    truncate: Truncate | None = Field(None, description="where too long a prompt is cut: left or middle")
    timeout_s: Annotated[float, Field(gt=0.0)] | None = Field(
        None, description="seconds in which a started prompt must be answered"
    )

    @model_validator(mode="before")
    @classmethod
    def _no_booleans(cls, values: Any) -> Any:
        """`true` is an int to Python; as a number of tokens it is a mistake."""
        if isinstance(values, dict):
            for name, value in values.items():
                if isinstance(value, bool):
                    raise ValueError(f"{name} must be a number, not {str(value).lower()}")
        return values

    @model_validator(mode="after")
    def _parameters_belong_to_the_rule(self) -> SamplingParams:
        named = [name for name in RULE_OF if getattr(self, name) is not None]
        for name in named:
            if self.rule not in (None, RULE_OF[name]):
                raise ValueError(f"{name} belongs to rule '{RULE_OF[name]}', not '{self.rule}': drop one of the two")
        if len(named) > 1:
            raise ValueError(f"{' and '.join(named)} belong to different rules: drop all but one")
        return self

    @model_validator(mode="after")
    def _refresh_needs_a_cache(self) -> SamplingParams:
        if self.cache_refresh is not None and self.cache not in ("prefix", "dual"):
            raise ValueError("cache_refresh belongs to cache 'prefix' or 'dual': name one of them too")
        return self

    def resolved_rule(self, default: Rule) -> Rule:
        """The rule that applies: the named one, else that of a parameter which only one rule has, else `default`."""
        own = (rule for name, rule in RULE_OF.items() if getattr(self, name) is not None)
        return self.rule or next(own, None) or default


# Parameters that select their rule.
RULE_OF: dict[str, Rule] = {
    "denoise_steps": "fixed_steps",
    "factor": "factor",
    "entropy_threshold": "entropy_threshold",
    "kl_threshold": "klass",
    "edit_threshold": "joint_threshold",
}
# Names under which other systems know our parameters.
ALIASES = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens", "steps": "denoise_steps"}


def parse_params(values: dict[str, Any], base: SamplingParams | None = None) -> SamplingParams:
    """`values` laid over `base` (defaults when None).

    Raises BadPrompt('bad_params') naming the parameter, what is wrong and the nearest known name.
    """
    named = {ALIASES.get(name, name): value for name, value in values.items() if value is not None}
    for name in named:
        if name not in SamplingParams.model_fields:
            raise BadPrompt("bad_params", f"unknown parameter '{name}'{nearest(name, SamplingParams.model_fields)}")
    inherited = base.model_dump(exclude_unset=True) if base else {}
    # A rule and its parameter are named together or not at all: the nearer naming drops what belongs to another rule.
    chosen = [rule for name, rule in {"rule": named.get("rule"), **RULE_OF}.items() if name in named]
    if chosen:
        others = {"rule", *(name for name, rule in RULE_OF.items() if rule not in chosen)}
        inherited = {name: value for name, value in inherited.items() if name not in others}
    merged = {**inherited, **named}
    try:
        return SamplingParams.model_validate(merged)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        what = first["msg"].removeprefix("Value error, ")
        raise BadPrompt("bad_params", f"{where}: {what}" if where else what) from None
