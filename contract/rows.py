"""One row of a table, understood: the id, the prompt, the parameters it asks for, and what it carries along.

Knows two shapes, a plain row (`prompt`, `messages` or `prompt_token_ids`, parameters beside them or under `params`) and
a row of an OpenAI batch file (`custom_id`, `method`, `url`, `body`). Every violation is a BadPrompt whose message
names the key and what would be right. Knows no files, lines or batches: `contract.parser` puts the place in front of
the message.

Keys of a plain row that mean nothing to us are its metadata, unless they look like a parameter that was mistyped or
are one of other systems that changes answers: passing those over would change what is answered without a word.
"""

from __future__ import annotations

import difflib
import json
import re
from functools import cache
from typing import Any, TypeVar

from contract.columns import IDS, PROMPTS, Columns
from contract.errors import BadPrompt, nearest
from contract.jobs import ErrorCode, Message, Prompt
from contract.sampling import ALIASES, SamplingParams

Row = dict[str, Any]
T = TypeVar("T")

ROLES = ("system", "user", "assistant")
ENDPOINTS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}
PARAMETERS = (*SamplingParams.model_fields, *ALIASES)
CONTENT = (*PROMPTS, "model")
LARGEST_TOKEN = 2**31 - 1
PLAIN_KEYS = frozenset([*IDS, "params", *CONTENT, *PARAMETERS])
BATCH_KEYS = ("custom_id", "method", "url", "body")
LONGEST_NAME = 100
"""A key longer than any we know is not compared or repeated in full: it may be megabytes."""
DISTINCT_LETTERS = 9
"""A parameter's name this long is resembled by accident only; a shorter one may be near to an honest word."""
ALIKE = 0.85
DEEPEST = 64
NO_COLUMNS = Columns()

# Keys of OpenAI bodies that ask nothing of us, whatever they hold.
IGNORED = {"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier", "stream_options"}
# Keys of OpenAI bodies for things we do not do, with the values that do not ask for them. null never asks.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "stop": ([], ""),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
# Those of them that nobody calls a column of data by chance.
UNMISTAKABLE = (
    "stop",
    "best_of",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "presence_penalty",
    "frequency_penalty",
    "response_format",
    "tool_choice",
)


def decode(raw: bytes, offset: int) -> Row:
    """The JSON object on a line that starts at byte `offset` of its file.

    Raises BadPrompt: bad_encoding (naming the byte in the file), bad_json (naming the column), bad_row (no object).
    """
    row = _json(text(raw, offset))
    if not isinstance(row, dict):
        raise BadPrompt(ErrorCode.BAD_ROW, f"expected a JSON object, found {_kind(row)}")
    if rb"\ud" in raw.lower():
        _refuse_lone_surrogates(row)
    return row


def text(raw: bytes, offset: int) -> str:
    """`raw` as UTF-8. Raises BadPrompt('bad_encoding') with the offset in the file of the first wrong byte."""
    if (zero := raw.find(0)) >= 0:  # valid UTF-8, but no text: most often every other byte of a UTF-16 file
        what = f"byte 0x00 at offset {offset + zero} of the file is not text; is the file UTF-16?"
        raise BadPrompt(ErrorCode.BAD_ENCODING, what)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        where = offset + error.start
        what = f"byte 0x{raw[error.start]:02x} at offset {where} of the file is not UTF-8"
        raise BadPrompt(ErrorCode.BAD_ENCODING, what) from None


def arrange(row: Row, columns: Columns = NO_COLUMNS) -> Row:
    """A plain row under our own keys, all others gathered under `metadata`; a row of a batch file as it is."""
    if is_request(row, columns):
        return row
    kept: Row = {}
    others: Row = {}
    for name, value in row.items():
        if name in columns.ours:
            kept[columns.ours[name]] = value
        elif name in PLAIN_KEYS and name not in columns.displaced:
            kept[name] = value
        else:
            others[name] = value
    return {**kept, "metadata": others} if others else kept


def is_request(row: Row, columns: Columns = NO_COLUMNS) -> bool:
    """Is it a row of a batch file? A table may well have columns called url, method or body."""
    if isinstance(row.get("body"), dict):
        return True
    has_prompt = columns.names_the_prompt or any(name in row for name in PROMPTS)
    return not has_prompt and any(name in row for name in ("body", "url", "method"))


def metadata(row: Row) -> Row:
    """What an arranged row, or a batch file's, carries along; an object under `metadata` counts as its keys.

    Raises BadPrompt('bad_row') for what no output row could hold.
    """
    given = row["body"].get("metadata") if isinstance(row.get("body"), dict) else row.get("metadata")
    found = given if isinstance(given, dict) else {}
    if isinstance(inner := found.get("metadata"), dict):
        found = {**inner, **{name: value for name, value in found.items() if name != "metadata"}}
    if any(_deeper(value, DEEPEST) for value in found.values()):
        raise BadPrompt(ErrorCode.BAD_ROW, f"its other keys are nested more than {DEEPEST} deep")
    return found


def refuse_mistaken(row: Row) -> None:
    """Raises BadPrompt for a key of an arranged row that cannot have been meant as metadata: bad_params, bad_row."""
    found = row.get("metadata")
    if is_request(row) or not isinstance(found, dict):
        return
    for name, value in found.items():
        if name in UNMISTAKABLE and not _asks_nothing(name, value):
            raise BadPrompt(ErrorCode.BAD_PARAMS, f"{name} = {_value(value)} is not supported: remove it")
        if meant := mistyped(name):
            what = f"unknown key '{name}' (did you mean '{meant}'?): if not, put it under 'metadata'"
            raise BadPrompt(ErrorCode.BAD_PARAMS, what)
    inner = found.get("metadata")
    if isinstance(inner, dict) and (twice := next((name for name in inner if name in found), None)):
        raise BadPrompt(ErrorCode.BAD_ROW, f"'{twice[:LONGEST_NAME]}' stands beside metadata and in it")


def mistyped(name: str) -> str | None:
    """The parameter of which `name` seems to be a slip: the same letters but for case and dashes, or nearly the same.

    A parameter's name with another word before or after it (`temperature_c`) is a name of its own.
    """
    return None if len(name) > LONGEST_NAME or name in PLAIN_KEYS else _mistyped(name)


@cache
def _mistyped(name: str) -> str | None:
    bare = _bare(name)
    for known in PARAMETERS:
        if bare == _bare(known):
            return known
    for known in PARAMETERS:
        own_word = name.startswith(f"{known}_") or name.endswith(f"_{known}")
        if len(known) >= DISTINCT_LETTERS and not own_word and _likeness(name, known) >= ALIKE:
            return known
    return None


def _bare(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


def _likeness(name: str, known: str) -> float:
    return difflib.SequenceMatcher(None, name, known).ratio()


def _deeper(value: Any, levels: int) -> bool:
    """Do lists and objects stand in each other more than `levels` deep? Not every reader of JSON takes those."""
    if not isinstance(value, dict | list):
        return False
    inside = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_deeper(one, levels - 1) for one in inside)


def from_cells(row: Row) -> Row:
    """An arranged row whose values are all text, as those of a CSV: lists and objects are read as JSON, "" is none."""
    return {name: _cell(name, value) for name, value in row.items()}


def _cell(name: str, value: Any) -> Any:
    if name in ("messages", "prompt_token_ids", "params") and value:
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value  # refused as what it is, text
    return None if value == "" and name != "prompt" else value


def row_id(row: Row) -> str | None:
    """The row's `custom_id` or `id`; None when it has neither."""
    given = {name: row[name] for name in ("custom_id", "id") if row.get(name) is not None}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
            raise BadPrompt(ErrorCode.BAD_ROW, f"{name} must be a text that is not empty, found {_kind(value)}")
    names = {str(value) for value in given.values()}
    if len(names) > 1:
        raise BadPrompt(ErrorCode.BAD_ROW, "id and custom_id differ: keep one of them")
    return names.pop() if names else None


def body(row: Row) -> Row:
    """The part of a row that holds prompt, model and parameters, in either shape."""
    if not is_request(row):
        return _plain_body(row)
    _refuse_unknown(row, BATCH_KEYS, ErrorCode.BAD_ROW)
    if row.get("method", "POST") != "POST":
        raise BadPrompt(ErrorCode.BAD_ROW, "method must be 'POST'")
    request = row.get("body")
    if not isinstance(request, dict):
        raise BadPrompt(ErrorCode.BAD_ROW, f"body must be a JSON object, found {_kind(request)}")
    _refuse_other_endpoints(row.get("url"), request)
    return {name: value for name, value in request.items() if not _asks_nothing(name, value)}


def prompt(request: Row) -> Prompt:
    """What is to be answered: text, messages or token ids. Raises BadPrompt: bad_row, empty_prompt."""
    given = [name for name in PROMPTS if request.get(name) is not None]
    if not given:
        raise BadPrompt(ErrorCode.BAD_ROW, f"'prompt', 'messages' or 'prompt_token_ids' is missing{_instead(request)}")
    if len(given) > 1:
        raise BadPrompt(ErrorCode.BAD_ROW, f"'{given[0]}' and '{given[1]}' exclude each other")
    value = request[given[0]]
    if given[0] == "messages":
        return _messages(value)
    if given[0] == "prompt_token_ids" or _are_tokens(value):  # OpenAI's completions take ids as their prompt
        return _token_ids(value)
    if not isinstance(value, str):
        raise BadPrompt(ErrorCode.BAD_ROW, f"prompt must be text, found {_kind(value)}: give each prompt its own row")
    return _not_empty(value, value)


def model(request: Row) -> str | None:
    """The model the row names, by the last part of its path; None when it names none."""
    name = request.get("model")
    if name is not None and not isinstance(name, str):
        raise BadPrompt(ErrorCode.BAD_ROW, f"model must be text, found {_kind(name)}")
    return name.rstrip("/").rsplit("/", 1)[-1] if name else None


def parameters(request: Row) -> Row:
    """Everything else in the body: sampling parameters by any name; `parse_params` judges names and values."""
    skipped = (*CONTENT, "metadata")
    names = {name: value for name, value in request.items() if name not in skipped and value is not None}
    for name in names:
        if name in NEUTRAL:
            raise BadPrompt(ErrorCode.BAD_PARAMS, f"{name} = {_value(names[name])} is not supported: remove it")
        if len(name) > LONGEST_NAME:
            raise BadPrompt(ErrorCode.BAD_PARAMS, f"unknown parameter '{name[:LONGEST_NAME]}…'")
    return names


def _refuse_other_endpoints(url: Any, request: Row) -> None:
    """Without a url, prompt or messages in the body tell which endpoint is meant."""
    if url is None:
        return
    if not isinstance(url, str) or url not in ENDPOINTS:
        raise BadPrompt(ErrorCode.BAD_ROW, f"url must be one of {', '.join(ENDPOINTS)}")
    if request.get(ENDPOINTS[url]) is None:
        raise BadPrompt(ErrorCode.BAD_ROW, f"the body of {url} needs '{ENDPOINTS[url]}'")


def _plain_body(row: Row) -> Row:
    nested = row.get("params")
    if nested is None:
        nested = {}
    if not isinstance(nested, dict):
        raise BadPrompt(ErrorCode.BAD_ROW, f"params must be a JSON object, found {_kind(nested)}")
    for name in nested:
        if name in row or name in (*CONTENT, "metadata"):
            raise BadPrompt(ErrorCode.BAD_PARAMS, f"'{name[:LONGEST_NAME]}' belongs beside params or in it, not both")
    return {**{name: value for name, value in row.items() if name not in (*IDS, "params")}, **nested}


def _instead(request: Row) -> str:
    """Which key may have been meant for the prompt."""
    short = [name for name in request.get("metadata") or () if len(name) <= LONGEST_NAME]
    close = next((name for name in short if nearest(name, PROMPTS)), None)
    return f"; is '{close}' it? Name it 'prompt', or set --prompt-column" if close else ""


def _refuse_unknown(row: Row, known: tuple[str, ...], code: ErrorCode) -> None:
    for name in row:
        if name not in known:
            short = name[:LONGEST_NAME]
            raise BadPrompt(code, f"unknown key '{short}'{nearest(short, known)}")


def _asks_nothing(name: str, value: Any) -> bool:
    return value is None or name in IGNORED or (name in NEUTRAL and value in NEUTRAL[name])


def _messages(values: Any) -> tuple[Message, ...]:
    if not isinstance(values, list):
        raise BadPrompt(ErrorCode.BAD_ROW, f"messages must be a list, found {_kind(values)}")
    messages = tuple(_message(value, number) for number, value in enumerate(values, start=1))
    return _not_empty(messages, "".join(message.content for message in messages))


def _message(value: Any, number: int) -> Message:
    if not isinstance(value, dict):
        raise BadPrompt(ErrorCode.BAD_ROW, f"message {number} must be a JSON object, found {_kind(value)}")
    for name, extra in value.items():
        # Logs of conversations carry empty leftovers such as `"refusal": null`.
        if name not in ("role", "content") and extra not in (None, "", [], {}):
            short = name[:LONGEST_NAME]
            raise BadPrompt(ErrorCode.BAD_ROW, f"message {number}: '{short}' is not supported")
    role = value.get("role")
    if role not in ROLES:
        hint = nearest(role, ROLES) if isinstance(role, str) and len(role) < LONGEST_NAME else ""
        raise BadPrompt(ErrorCode.BAD_ROW, f"message {number}: role must be one of {', '.join(ROLES)}{hint}")
    return Message(role=role, content=_content(value.get("content"), number))


def _content(value: Any, number: int) -> str:
    """Text, or the lines of its text parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise BadPrompt(ErrorCode.BAD_ROW, f"message {number}: content must be text, found {_kind(value)}")
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BadPrompt(ErrorCode.BAD_ROW, f"message {number}: only content parts of type 'text' can be read")
    return "\n".join(part["text"] for part in value)


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


def _token_ids(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise BadPrompt(ErrorCode.BAD_ROW, f"prompt_token_ids must be a list of numbers, found {_kind(values)}")
    for number, value in enumerate(values, start=1):
        if type(value) is not int or not 0 <= value <= LARGEST_TOKEN:
            raise BadPrompt(
                ErrorCode.BAD_ROW, f"token {number} must be a whole number from 0 on, found {_value(value)}"
            )
    if not values:
        raise BadPrompt(ErrorCode.EMPTY_PROMPT, "the prompt has no tokens")
    return tuple(values)


def _not_empty(value: T, content: str) -> T:
    if not content.strip():
        raise BadPrompt(ErrorCode.EMPTY_PROMPT, "the prompt is empty")
    return value


def _json(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise BadPrompt(ErrorCode.BAD_JSON, f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise BadPrompt(ErrorCode.BAD_JSON, "not readable as JSON: nested too deeply") from None
    except ValueError:  # Python refuses integers of thousands of digits
        raise BadPrompt(ErrorCode.BAD_JSON, "not readable as JSON: a number has too many digits") from None


def _refuse_lone_surrogates(row: Row) -> None:
    """`\\ud800` alone is legal JSON, yet no text: no UTF-8 output could hold it."""
    try:
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        what = f"{half} is half a surrogate pair, which UTF-8 cannot hold: write the whole character"
        raise BadPrompt(ErrorCode.BAD_ENCODING, what) from None
    except RecursionError:
        raise BadPrompt(ErrorCode.BAD_JSON, "not readable as JSON: nested too deeply") from None


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "nothing"}
    return names.get(type(value), "a number")


def _value(value: Any) -> str:
    shown = re.sub(r"\s+", " ", repr(value))
    return shown if len(shown) <= 40 else f"{shown[:40]}…"
