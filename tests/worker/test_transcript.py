"""The pieces of a text are the text: with every kind of tokenizer, however its tokens come, whatever ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Made

from worker.tokenizing import HALF, Tokenizer
from worker.transcript import Answer, Transcript, answer

bounded = settings(
    max_examples=150,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
WORDS = ("▁the", "▁end", "▁", "e", "n", "d", ".", "é", "▁n't", "'", "▁a")


def byte_level() -> Made:
    """Every byte is a token, as in the vocabularies of GPT-2 and Qwen; so are a few pairs."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("e", "n"), ("Ġ", "e"), ("Ġ", "a")]
    vocabulary = {word: number for number, word in enumerate([*letters, *(a + b for a, b in pairs)])}
    made = Made(models.BPE(vocab=vocabulary, merges=pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def byte_fallback() -> Made:
    """Words, and bytes for what has none, as in the vocabularies of Llama and Gemma."""
    words = [*(f"<0x{number:02X}>" for number in range(256)), *WORDS]
    made = Made(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[], byte_fallback=True))
    spaces, fallback, strip = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Strip(" ", 1, 0)
    made.decoder = decoders.Sequence([spaces, fallback, decoders.Fuse(), strip])
    return made


def word_pieces() -> Made:
    """Pieces of words, whose spaces are cleaned up, as in BERT's vocabulary."""
    words = ["[UNK]", "the", "end", "do", "n't", "'", "s", "##s", "##nd", ".", ",", "é", "[", "]", "##d"]
    made = Made(models.WordPiece(vocab={word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    return made


KINDS: dict[str, tuple[Callable[[], Made], dict[str, Any]]] = {
    "byte_level": (byte_level, {}),
    "byte_fallback": (byte_fallback, {}),
    "word_pieces": (word_pieces, {"clean_up_tokenization_spaces": True}),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tokenizer]:
    @cache
    def opened(kind: str, end_of_answer: str | None = None) -> Tokenizer:
        make, options = KINDS[kind]
        made = make()
        made.add_special_tokens([AddedToken("<|special|>", special=True)])
        folder = tmp_path_factory.mktemp(kind)
        made.save(str(folder / "tokenizer.json"))
        from transformers import PreTrainedTokenizerFast

        whole = PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), pad_token="<|special|>", **options
        )
        whole.save_pretrained(folder)
        return Tokenizer(Path(folder), 1000, "raw", "PreTrainedTokenizerFast", end_of_answer=end_of_answer)

    return opened


def told(one: Tokenizer, token_ids: Sequence[int], cuts: Sequence[int], stops: Sequence[str]) -> tuple[str, bool]:
    """All pieces of a text whose tokens come in stretches of these lengths, and whether a stop ended it."""
    transcript, text, left = Transcript(one, stops), "", list(token_ids)
    for length in [*cuts, len(left)]:
        part, left = left[:length], left[length:]
        transcript.take(part)
        assert transcript.shown == len(text)
        text += transcript.piece()
        if transcript.stopped:
            return text, True
    return text, False


tokens = st.lists(st.integers(0, 300), max_size=60)
lengths = st.lists(st.integers(0, 9), max_size=20)
stop_texts = st.lists(st.sampled_from(["e", "en", "end", " a", "é", "\n", ".", "the e", HALF]), max_size=3)


@pytest.mark.parametrize("kind", KINDS)
@bounded
@given(drawn=tokens, cuts=lengths, stops=stop_texts, ends=st.sampled_from([None, "]", "end"]))
def test_pieces_are_the_beginning_of_the_output_whatever_the_tokens(
    tokenizer: Callable[..., Tokenizer],
    kind: str,
    drawn: list[int],
    cuts: list[int],
    stops: list[str],
    ends: str | None,
) -> None:
    one = tokenizer(kind, ends)
    size = len(one._tokenizer)
    token_ids = [token % size for token in drawn]
    text, stopped = told(one, token_ids, cuts, stops)
    output = answer(one, token_ids, stops)
    assert output.text.startswith(text)
    if stopped and ends is None:
        assert output.stopped
    if not stops and ends is None and kind == "byte_level":
        assert output.text.rstrip(HALF) == text


def test_a_long_text_is_decoded_a_window_at_a_time(tokenizer: Callable[..., Tokenizer]) -> None:
    one = tokenizer("byte_level")
    text = "ein längerer Text, – 長い文章。 " * 60
    token_ids = one.encode(text)
    decoded: list[int] = []
    raw = one.decode_raw
    one.decode_raw = lambda ids: decoded.append(len(ids)) or raw(ids)  # type: ignore[func-returns-value,method-assign]
    try:
        assert told(one, token_ids, [7] * (len(token_ids) // 7), [])[0] == text
    finally:
        one.decode_raw = raw  # type: ignore[method-assign]
    assert len(token_ids) > 2000
    assert max(decoded) < 300


@pytest.mark.parametrize(
    ("text", "stops", "kept", "tokens"),
    [
        ("one two", ["x"], "one two", 7),
        ("one two", [" t", "two"], "one", 3),
        ("one two", ["one"], "", 0),
        ("né fin", ["é"], "n", 1),
        ("né fin", [" fin", "in"], "né", 3),  # a character of two tokens
        ("an en", ["n"], "a", 1),
    ],
)
def test_an_answer_ends_before_the_first_stop_text_and_counts_its_tokens(
    tokenizer: Callable[..., Tokenizer], text: str, stops: list[str], kept: str, tokens: int
) -> None:
    one = tokenizer("byte_level")
    written = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    token_ids = [letters.index(letter) for piece, _ in written for letter in piece]
    assert answer(one, token_ids, stops) == Answer(kept, tokens, stopped=kept != text)


def test_what_may_become_a_stop_is_not_shown_before_it_cannot(tokenizer: Callable[..., Tokenizer]) -> None:
    one = tokenizer("byte_level")
    transcript = Transcript(one, ["###"])
    shown = []
    for text in ("a#", "#", "b##", "#c"):
        transcript.take(one.encode(text))
        shown.append(transcript.piece())
    assert shown == ["a", "", "##b", ""]
    assert transcript.stopped
