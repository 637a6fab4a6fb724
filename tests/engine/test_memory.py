"""Out of memory degrades and is remembered; what fits is known before it starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from contract.errors import BadPrompt
from tests.engine.running import drain, prompt, request, run
from worker.engine import Engine, Loaded, Request
from worker.engine.models.decoder import Attend, Decoder


class SmallDevice(Decoder):
    """A decoder on a device that has no memory for more than `most` positions in one forward."""

    def __init__(self, decoder: Decoder, most: int) -> None:
        self.__dict__.update(decoder.__dict__)
        self.most = most

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend, wanted: Tensor) -> Tensor:
        if len(tokens) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().hidden(tokens, positions, attend, wanted)


def requests(count: int, **params: Any) -> list[Request]:
    return [request(n, prompt(n, 20 + n), **{"max_new_tokens": 12, **params}) for n in range(count)]


def on_small_device(loaded: Loaded, most: int, prompts: list[Request], **limits: Any) -> tuple[Engine, Any]:
    engine = Engine(loaded.spec, SmallDevice(loaded.decoder, most), **limits)
    for one in prompts:
        engine.add(one)
    return engine, drain(engine)


def test_fewer_rows_run_after_memory_ran_out_and_all_end_as_they_would_have(either: Loaded) -> None:
    engine, finished = on_small_device(either, 80, requests(9), prefix_cache_mb=0)
    assert engine.max_rows <= 4
    assert all(one.error is None for one in finished.values())
    plenty = run(either, requests(9))
    assert {n: one.token_ids for n, one in finished.items()} == {n: one.token_ids for n, one in plenty.items()}
    assert len(engine.runner.slots) == 0


def test_a_row_that_begins_again_keeps_the_notes_on_its_prompt(causal: Loaded) -> None:
    prompts = [request(n, prompt(n, 600), max_new_tokens=400, truncate="left") for n in range(2)]
    engine, finished = on_small_device(causal, 300, prompts, prefix_cache_mb=0, max_step_tokens=400)
    assert engine.max_rows == 1
    assert all("prompt cut from 600 to 256 tokens" in one.plan.notes[0] for one in finished.values())


def test_a_long_prompt_alone_is_prefilled_in_shorter_chunks(causal: Loaded) -> None:
    engine, finished = on_small_device(causal, 70, [request(0, prompt(0, 300), max_new_tokens=8)])
    assert finished[0].error is None
    assert engine.scheduler.max_step_tokens == 64
    assert finished[0].token_ids == run(causal, [request(0, prompt(0, 300), max_new_tokens=8)])[0].token_ids


def test_a_row_that_does_not_fit_alone_fails_and_the_others_go_on(bidirectional: Loaded) -> None:
    prompts = [*requests(2), request("big", prompt(9, 200), max_new_tokens=20)]
    _, finished = on_small_device(bidirectional, 100, prompts)
    assert finished["big"].error is not None
    assert finished["big"].error.code == "out_of_memory"
    assert finished[0].error is None
    assert finished[1].error is None


def test_other_errors_are_not_taken_for_it(causal: Loaded) -> None:
    class Broken(SmallDevice):
        def hidden(self, *_: Any) -> Tensor:
            raise RuntimeError("shapes do not match")

    engine = Engine(causal.spec, Broken(causal.decoder, 0))
    engine.add(requests(1)[0])
    with pytest.raises(RuntimeError, match="shapes"):
        engine.step()


def test_rows_wait_until_there_is_memory_for_all_they_may_hold(either: Loaded) -> None:
    engine = Engine(either.spec, either.decoder)
    slot = engine.memory.need(100)
    engine = Engine(either.spec, either.decoder, memory_budget=2 * slot)
    for one in requests(5):
        engine.add(one)
    while engine.active():
        engine.step()
        assert engine.runner.slots.held_bytes() <= 2 * slot
        assert len(engine.runner.slots) <= 2


def test_a_prompt_that_can_never_fit_is_refused_with_what_would_help(either: Loaded) -> None:
    engine = Engine(either.spec, either.decoder)
    engine = Engine(either.spec, either.decoder, memory_budget=engine.memory.need(256))
    assert engine.memory.rows(128) == 2
    with pytest.raises(BadPrompt, match="memory holds 256") as refused:
        engine.add(request(0, prompt(0, 200), max_new_tokens=200))
    assert refused.value.code == "out_of_memory"
    engine.add(request(0, prompt(0, 200), max_new_tokens=40))
    assert drain(engine)[0].error is None
