"""The shapes that travel: a prompt job on its way in, a completion or an error on its way out.

Everything here is plain JSON on the wire. `SCHEMA` rises when a field changes its meaning; a worker refuses
a job newer than itself with a clear error instead of guessing.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from contract.sampling import SamplingParams

SCHEMA = 1

Priority = Literal["high", "normal", "low"]
PRIORITIES: tuple[Priority, ...] = ("high", "normal", "low")
LaneName = Literal["interactive", "high", "normal", "low"]
LANES: tuple[LaneName, ...] = ("interactive", *PRIORITIES)
"""A model's queues, the most urgent first: that of requests (`contract.interactive`), and one for each priority."""
FinishReason = Literal["stop", "length"]
OutputFormat = Literal["jsonl", "csv", "parquet", "openai"]


class ErrorCode(StrEnum):
    """Why a prompt has no output. A closed list: scripts may rely on these words."""

    BAD_JSON = "bad_json"
    BAD_ENCODING = "bad_encoding"
    BAD_ROW = "bad_row"
    BAD_PARAMS = "bad_params"
    BAD_FILE = "bad_file"
    DUPLICATE_ID = "duplicate_id"
    EMPTY_PROMPT = "empty_prompt"
    PROMPT_TOO_LONG = "prompt_too_long"
    UNKNOWN_MODEL = "unknown_model"
    OUT_OF_MEMORY = "out_of_memory"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    MODEL_ERROR = "model_error"
    WORKER_CRASHED = "worker_crashed"
    SOURCE_LOST = "source_lost"
    CANCELLED = "cancelled"


REMEDIES: dict[ErrorCode, str] = {
    ErrorCode.BAD_JSON: "make the line one complete JSON object",
    ErrorCode.BAD_ENCODING: "save the file as UTF-8",
    ErrorCode.BAD_ROW: "give the row a 'prompt' (text), 'messages' (list of role and content) or 'prompt_token_ids'",
    ErrorCode.BAD_PARAMS: "correct the named parameter; the README's table lists them all",
    ErrorCode.BAD_FILE: "correct what the message names and submit the file again: from that line on it was not read",
    ErrorCode.DUPLICATE_ID: "give every row its own custom_id",
    ErrorCode.EMPTY_PROMPT: "put text into the prompt or remove the row",
    ErrorCode.PROMPT_TOO_LONG: "shorten the prompt to the limit named in the message, or set truncate",
    ErrorCode.UNKNOWN_MODEL: "remove the row's 'model' or submit the file with --model set to it",
    ErrorCode.OUT_OF_MEMORY: "lower max_new_tokens, shorten the prompt, or use a larger device",
    ErrorCode.DEADLINE_EXCEEDED: "raise timeout_s, lower max_new_tokens, or let fewer prompts run together",
    ErrorCode.MODEL_ERROR: "read the exception in the worker's log, then `producer retry`",
    ErrorCode.WORKER_CRASHED: "this prompt was running at each of several worker crashes: read the logs, "
    "then `producer retry`",
    ErrorCode.SOURCE_LOST: "Redis lost the prompt and its source file is gone: submit the prompt again",
    ErrorCode.CANCELLED: "it was cancelled as asked: submit the prompt again if it is wanted after all",
}

RETRIES: dict[ErrorCode, int | None] = {ErrorCode.MODEL_ERROR: None, ErrorCode.OUT_OF_MEMORY: 1}
"""How often a worker tries a failed prompt again by itself; None: up to `max_attempts`. Other codes: never.

Memory may suffice on another device, or when another process has given its own back; but each time it does not, a
worker goes on with fewer rows.
"""


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Literal["system", "user", "assistant"]
    content: str


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Prompt = str | tuple[Message, ...] | tuple[int, ...]
"""Text, the turns of a conversation, or the token ids of a prompt that is tokenised already."""
ShownPrompt = str | list[dict[str, str]] | list[int]


def shown(prompt: Prompt) -> ShownPrompt:
    """The prompt as the user wrote it, for output and error rows."""
    if isinstance(prompt, str):
        return prompt
    if turns := [one.model_dump() for one in prompt if isinstance(one, Message)]:
        return turns
    return [one for one in prompt if isinstance(one, int)]


class PromptJob(BaseModel):
    """One prompt on its way to a worker. Exactly one of `prompt`, `messages` and `prompt_token_ids` is set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = SCHEMA
    batch: str
    index: int = Field(ge=0, description="position among the batch's rows, from 0; the order of the output")
    line: int = Field(ge=1, description="line in the source file, from 1")
    id: str = Field(description="the user's custom_id, else the index")
    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    prompt_token_ids: tuple[TokenId, ...] | None = None
    params: SamplingParams = SamplingParams()
    metadata: dict[str, Any] = Field(default={}, description="the row's other keys, for its output or error row")
    submitted_at: float = Field(description="seconds since the epoch")
    reply_to: str | None = Field(None, description="a request's: key of the stream on which its service is answered")
    stream: bool = Field(False, description="a request's: are its blocks wanted as they are finished?")

    @property
    def job_id(self) -> str:
        """The RQ job id: enqueuing the same prompt twice names the same job."""
        return f"{self.batch}-{self.index}"

    @property
    def asked(self) -> Prompt:
        """What is to be answered; empty text in a job that was damaged."""
        given = (self.prompt, self.messages, self.prompt_token_ids)
        return next((prompt for prompt in given if prompt is not None), "")


class Usage(BaseModel):
    """Token counts of one row. Completion tokens end at the stop token, which is not counted."""

    prompt_tokens: int
    completion_tokens: int


class Completion(BaseModel):
    """One line of `batch_outputs/{name}.jsonl`."""

    index: int
    id: str
    prompt: ShownPrompt
    output: str
    finish_reason: FinishReason
    notes: list[str] = Field(default=[], description="what was done to the prompt or its parameters to make them fit")
    usage: Usage
    model: str
    params: dict[str, Any] = Field(description="the sampling parameters as they were applied, seed included")
    timing: dict[str, float] = Field(description="queued_s, denoise_s")
    denoise: dict[str, int | float] = Field(description="steps, forwards, tokens_per_forward")
    worker: str
    cached: bool = Field(False, description="the answer is one that was given before; nothing was denoised")
    metadata: dict[str, Any] = {}


class ErrorDetail(BaseModel):
    """What went wrong with a prompt, after how many attempts, and when, in seconds since the epoch, if it is known."""

    code: ErrorCode
    message: str
    attempts: int = 0
    at: float | None = None


class ErrorRow(BaseModel):
    """One line of `batch_outputs/{name}.errors.jsonl`."""

    index: int
    id: str
    line: int
    prompt: ShownPrompt | None
    error: ErrorDetail
    worker: str | None = None
    metadata: dict[str, Any] = {}


Row = Completion | ErrorRow
