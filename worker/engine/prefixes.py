"""Beginnings that several prompts share (one system prompt for a million rows) are computed once.

A tree of chunks of tokens, each with its keys and values once a second prompt has asked for it; a prompt that begins
with them gets a copy into its own slot and prefills the rest. Only for attention whose finished text never changes
(`causal_context`, `block_causal`, `causal`), where the copy is what the row would have computed itself. Where text sees
whole blocks, that holds for blocks that end where chunks do, among rows of one block length.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from torch import Tensor

from worker.engine.cache import Slots
from worker.engine.sequence import Row

CHUNK = 16
"""Tokens per chunk: the grain in which prompts are compared."""
MOST_SEEN = 20_000
"""Chunks seen once that are remembered; they cost a few words each, no keys and values."""


@dataclass(eq=False)
class Chunk:
    """A piece of prompt text after all that stands above it in the tree."""

    parent: Chunk | None
    tokens: tuple[int, ...]
    end: int  # in tokens from the prompt's beginning
    children: dict[tuple[int, ...], Chunk] = field(default_factory=dict)
    stored: list[Tensor] | None = None  # (layers, 2, kv_heads, CHUNK, head_dim), a part for each device
    leader: int | None = None  # key of the row that computes it now
    wanted: bool = False  # a second prompt has it too


class Prefixes:
    """The tree, under a budget of `budget_bytes`; what was not asked for longest goes first."""

    def __init__(self, slots: Slots, budget_bytes: int) -> None:
        self._slots = slots
        self.most = budget_bytes // max(1, slots.bytes_per_position * CHUNK)
        self._roots: dict[int, Chunk] = {}  # by the blocks in which text sees itself
        self.stored: OrderedDict[Chunk, None] = OrderedDict()
        self._seen: OrderedDict[Chunk, None] = OrderedDict()
        self.leading: dict[int, list[Chunk]] = {}
        self.reused = 0
        """Prompt tokens that did not have to be computed."""

    def enter(self, row: Row) -> bool:
        """Give the row what is known of its prompt. False: another row is computing more of it; ask again later."""
        if not self.most or CHUNK % row.context_block or row.context_origin:
            return True
        root = self._roots.setdefault(row.context_block, Chunk(None, (), 0))
        known, rest = self._known(root, row.request.prompt_ids)
        at = known[-1] if known else root
        if rest and self._is_coming(at, rest):
            return False
        if known:
            self._copy(row, known)
        self._lead(row, at, rest)
        return True

    def computed(self, row: Row) -> None:
        """The row has prefilled further: keep the chunks that others want, let those go that nobody does."""
        led = self.leading.get(row.key, [])
        while led and led[0].end <= row.prefilled:
            chunk = led.pop(0)
            chunk.leader = None
            if chunk.wanted:
                self._store(row, chunk)
        if not led:
            self.leading.pop(row.key, None)

    def leave(self, row_key: int) -> None:
        """The row is gone; whoever waited for it goes on alone."""
        for chunk in self.leading.pop(row_key, []):
            chunk.leader = None

    def _known(self, root: Chunk, prompt: tuple[int, ...]) -> tuple[list[Chunk], list[tuple[int, ...]]]:
        """Stored chunks that the prompt begins with, and its further chunks. Its last token is always computed."""
        pieces = [prompt[at : at + CHUNK] for at in range(0, (len(prompt) - 1) // CHUNK * CHUNK, CHUNK)]
        known: list[Chunk] = []
        at = root
        for piece in pieces:
            following = at.children.get(piece)
            if following is None or following.stored is None:
                break
            known.append(following)
            at = following
        return known, pieces[len(known) :]

    def _is_coming(self, at: Chunk, rest: list[tuple[int, ...]]) -> bool:
        """Is the next chunk being computed? Then ask for it, and for what follows it."""
        coming = False
        for piece in rest:
            following = at.children.get(piece)
            if following is None or following.leader is None:
                break
            following.wanted = coming = True
            at = following
        return coming

    def _copy(self, row: Row, known: list[Chunk]) -> None:
        held, slot = self._slots.reserve(row.key, known[-1].end)
        for chunk in known:
            assert chunk.stored is not None
            held.paste(slot, chunk.end - CHUNK, chunk.stored)
        for chunk in reversed(known):  # what stands above is needed at least as often
            self.stored.move_to_end(chunk)
        self.reused += known[-1].end
        row.prefilled = known[-1].end

    def _lead(self, row: Row, at: Chunk, rest: list[tuple[int, ...]]) -> None:
        led = []
        for piece in rest:
            following = at.children.get(piece)
            if following is None:
                following = at.children[piece] = Chunk(at, piece, at.end + CHUNK)
                self._remember(following)
            else:
                following.wanted = True
            if following.leader is None and following.stored is None:
                following.leader = row.key
                led.append(following)
            at = following
        if led:
            self.leading[row.key] = led

    def _remember(self, chunk: Chunk) -> None:
        self._seen[chunk] = None
        while len(self._seen) > MOST_SEEN:
            self._forget(self._seen.popitem(last=False)[0])

    def _store(self, row: Row, chunk: Chunk) -> None:
        held, slot = self._slots.reserve(row.key, chunk.end)
        chunk.stored = held.copy(slot, chunk.end - CHUNK, chunk.end)
        self._seen.pop(chunk, None)
        self.stored[chunk] = None
        while len(self.stored) > self.most:
            oldest = self.stored.popitem(last=False)[0]
            oldest.stored = None
            self._forget(oldest)

    def _forget(self, chunk: Chunk) -> None:
        if chunk.parent is not None and chunk.parent.children.get(chunk.tokens) is chunk:
            del chunk.parent.children[chunk.tokens]
