"""A request's body as prompts and parameters, judged by the same rules as a row of a batch file.

What a body asks for beside its own fields is judged by `contract.rows` and `contract.sampling`: fields of OpenAI's that
ask nothing of us are passed over there, all others are sampling parameters or refused by name.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, model_validator

from contract import rows
from contract.columns import PROMPTS
from contract.errors import BadPrompt
from contract.interactive import new_request
from contract.jobs import Message, Prompt, PromptJob
from contract.sampling import ALIASES, SamplingParams, parse_params
from producer.gateway.errors import bad_request, of_bad_prompt

MOST_CHOICES = 128
SEEDS = 2**63


def _with_parameters(schema: dict[str, Any]) -> None:
    """The OpenAPI page lists sampling parameters and what is passed over; anything else is refused."""
    known = SamplingParams.model_json_schema()["properties"]
    for alias, name in ALIASES.items():
        known[alias] = known[name]
    for name in sorted(rows.IGNORED - schema["properties"].keys()):
        known[name] = {"title": name, "description": "taken, and passed over"}
    schema["properties"] |= {name: one for name, one in known.items() if name not in schema["properties"]}
    schema["additionalProperties"] = False


class Body(BaseModel):
    """What all requests for text have in common."""

    model_config = ConfigDict(extra="allow", json_schema_extra=_with_parameters)

    model: str | None = Field(None, description="one of /v1/models; without it the service's usual one")

    @model_validator(mode="before")
    @classmethod
    def _no_half_characters(cls, values: Any) -> Any:
        """Half a surrogate pair is legal JSON, and yet no text that anything could be written with."""
        try:
            json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"\\u{ord(error.object[error.start]):04x} is half a surrogate pair, and no text") from None
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        return values

    def sampling(self, base: SamplingParams) -> SamplingParams:
        """The parameters that are asked for, laid over `base`. Raises BadPrompt."""
        given = {name: value for name, value in (self.model_extra or {}).items() if not rows.asks_nothing(name, value)}
        return parse_params(rows.parameters(given), base)


class StreamOptions(BaseModel):
    """Of OpenAI's, the one that changes anything here."""

    model_config = ConfigDict(extra="ignore")

    include_usage: StrictBool = Field(False, description="a last event with the token counts")


class Choices(Body):
    """What OpenAI's two addresses have in common."""

    n: Annotated[int, Field(ge=1, le=MOST_CHOICES, strict=True)] | None = Field(
        None, description="answers to the same prompt; with a seed, the i-th (from 0) is drawn from seed + i"
    )
    stream: StrictBool | None = Field(None, description="server-sent events, a block at a time")
    stream_options: StreamOptions | None = None
    stream_rate: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        None, description="tokens a second at which the stream is smoothed; 0 for blocks as they come"
    )


def prompts_of(given: dict[str, Any]) -> list[Prompt]:
    """One prompt under its name (`prompt`, `messages`, `prompt_token_ids`), or several under `prompt`.

    Raises ApiError naming the field.
    """
    value = given.get("prompt")
    several = isinstance(value, list) and bool(value) and not all(type(one) is int for one in value)
    each = [{**given, "prompt": one} for one in value] if isinstance(value, list) and several else [given]
    return [_prompt(one) for one in each]


def jobs_of(
    prompts: Sequence[Prompt], params: SamplingParams, reply_to: str, n: int = 1, stream: bool = False
) -> list[PromptJob]:
    """`n` jobs for each prompt, of one request; a choice's number is its job's `index`."""
    if len(prompts) * n > MOST_CHOICES:
        raise bad_request(f"prompts times n must not be more than {MOST_CHOICES}", "n")
    request, now = new_request(), time.time()
    return [
        PromptJob(
            batch=request,
            index=index,
            line=1,
            id=str(index),
            **_asked(prompts[index // n]),
            params=_drawn(params, index % n),
            submitted_at=now,
            reply_to=reply_to,
            stream=stream,
        )
        for index in range(len(prompts) * n)
    ]


def text_of(prompt: Prompt) -> str | None:
    """What a filter reads; None for token ids."""
    if isinstance(prompt, str):
        return prompt
    turns = [one.content for one in prompt if isinstance(one, Message)]
    return "\n".join(turns) if turns else None


def _prompt(given: dict[str, Any]) -> Prompt:
    named = next((name for name in PROMPTS if given.get(name) is not None), PROMPTS[0])
    try:
        return rows.prompt(given)
    except BadPrompt as error:
        raise of_bad_prompt(error, named) from None


def _asked(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    return {"messages" if isinstance(prompt[0], Message) else "prompt_token_ids": prompt}


def _drawn(params: SamplingParams, choice: int) -> SamplingParams:
    """Choices with one seed would all be the same."""
    if params.seed is None or choice == 0:
        return params
    return params.model_copy(update={"seed": (params.seed + choice) % SEEDS})
