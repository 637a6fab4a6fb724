"""Text <-> token ids, with the model's own tokenizer and chat template. The engine never sees text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError

from contract.errors import BadPrompt, ModelLoadError
from contract.jobs import Message, Prompt

PromptFormat = Literal["chat", "raw"]
HALF = "\ufffd"
"""What bytes are decoded to that make no whole character, yet or for ever."""
BYTES = tuple(f"<0x{number:02X}>" for number in range(256))
"""Tokens of single bytes, as vocabularies of SentencePiece name them."""


class Tokenizer:
    """A checkpoint's tokenizer.

    A `prompt` becomes one user turn when the model has a chat template and `prompt_format` is `chat`; `messages`
    always go through the template, which sees `template_values` too. `class_name` is transformers' class for a
    checkpoint that names one of its own, `chat_template` for one that has none, `end_of_answer` a text at which answers
    are cut, and `home` the repository that has the tokenizer of checkpoints published without one.
    """

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        prompt_format: PromptFormat = "chat",
        class_name: str | None = None,
        template_values: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        end_of_answer: str | None = None,
        home: str | None = None,
    ) -> None:
        # Imported here: transformers takes seconds to import, and `worker --help` should not.
        import transformers

        hint = f"; this family's is that of '{home}': put its files into the folder" if home else ""
        kind = getattr(transformers, class_name or "AutoTokenizer")
        try:  # unless told not to, transformers asks at the terminal whether to run the checkpoint's code
            self._tokenizer: Any = kind.from_pretrained(folder, trust_remote_code=False)
            known = self._tokenizer("a", add_special_tokens=False)["input_ids"]
        except Exception as error:  # noqa: BLE001 - of two libraries, one of which raises no other kind itself
            what = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ModelLoadError(f"{folder}: no usable tokenizer: {what}{hint}") from None
        if not known:  # what a named class makes of no files
            raise ModelLoadError(f"{folder}: no usable tokenizer: its files are missing{hint}")
        if len(self._tokenizer) > vocab_size:
            raise ModelLoadError(
                f"{folder}: the tokenizer knows {len(self._tokenizer)} tokens, the model only {vocab_size}; "
                "they do not belong together"
            )
        self._tokenizer.chat_template = self._tokenizer.chat_template or chat_template
        self._vocab_size = vocab_size
        self._template_values = dict(template_values or {})
        self.end_of_answer = end_of_answer
        self._wrap = prompt_format == "chat" and self._tokenizer.chat_template is not None

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt, ready to be answered; ids that are given already are only checked.

        Raises BadPrompt: `empty_prompt` or `bad_row`.
        """
        if not isinstance(prompt, str):
            turns = [one.model_dump() for one in prompt if isinstance(one, Message)]
            return self._conversation(turns) if turns else self._known([one for one in prompt if isinstance(one, int)])
        if not prompt.strip():
            raise BadPrompt("empty_prompt", "the prompt is empty")
        if self._wrap:
            return self._conversation([{"role": "user", "content": prompt}])
        return tuple(self._tokenizer(prompt)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of an answer, special tokens left out."""
        text = self.decode_raw(token_ids)
        if self.end_of_answer and self.end_of_answer in text:
            return text[: text.index(self.end_of_answer)].rstrip()
        return text

    def decode_raw(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones left out, whatever it says."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def settled(self, token_ids: Sequence[int]) -> int:
        """How many of the first tokens have a text that tokens after them do not change, but for its very end."""
        end = len(token_ids)
        while end and token_ids[end - 1] in self._joining:
            end -= 1
        return end

    def lasting(self, text: str) -> str:
        """What of a text, decoded from its first tokens, stays when others follow."""
        text = text.rstrip(HALF)
        # Where spaces are cleaned up, it is those before and within the last word that the next one may take away.
        return text[: max(text.rfind(" "), 0)] if self._cleans_up else text

    @cached_property
    def _joining(self) -> frozenset[int]:
        """Tokens of single bytes, where there are any: a run of them is decoded as a whole, special ones within too."""
        vocabulary = self._tokenizer.get_vocab()
        single = {vocabulary[name] for name in BYTES if name in vocabulary}
        return frozenset(single | set(self._tokenizer.all_special_ids)) if single else frozenset()

    @property
    def _cleans_up(self) -> bool:
        return bool(self._tokenizer.clean_up_tokenization_spaces)

    def _known(self, token_ids: list[int]) -> tuple[int, ...]:
        for number, token in enumerate(token_ids, start=1):
            if not 0 <= token < self._vocab_size:
                what = f"token {number} is {token}, and the model's are 0 to {self._vocab_size - 1}"
                raise BadPrompt("bad_row", f"prompt_token_ids: {what}")
        return tuple(token_ids)

    def _conversation(self, turns: list[dict[str, str]]) -> tuple[int, ...]:
        if self._tokenizer.chat_template is None:
            raise BadPrompt("bad_row", "this model has no chat template: give the row a 'prompt' instead of 'messages'")
        # The template writes its own special tokens; adding them again would double the first one.
        try:
            text = self._tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=True, **self._template_values
            )
        except TemplateError as error:  # templates refuse what they cannot write: a second system turn, say
            raise BadPrompt("bad_row", f"the model's chat template refuses the messages: {error}") from None
        except Exception as error:  # noqa: BLE001 - a template is a program, and fails as programs do
            what = f"{type(error).__name__}: {error}"
            raise BadPrompt("bad_row", f"the model's chat template fails on the messages: {what}") from None
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])
