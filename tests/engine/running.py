"""Running requests through an engine to their end."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterable
from typing import Any

from contract.sampling import SamplingParams
from worker.engine import Engine, Finished, Loaded, Request


def prompt(seed: int, length: int) -> tuple[int, ...]:
    """`length` random byte tokens."""
    source = random.Random(seed)
    return tuple(source.randrange(256) for _ in range(length))


def request(name: Hashable, prompt_ids: Iterable[int], **params: Any) -> Request:
    return Request(name, tuple(prompt_ids), SamplingParams(**params))


def engine_of(loaded: Loaded, **limits: int) -> Engine:
    return Engine(loaded.spec, loaded.decoder, **limits)


def drain(engine: Engine) -> dict[Hashable, Finished]:
    """Step until nothing is left; results by id."""
    finished: dict[Hashable, Finished] = {}
    while engine.active():
        for one in engine.step():
            assert one.id not in finished, "a row ended twice"
            finished[one.id] = one
    return finished


def run(loaded: Loaded, requests: Iterable[Request], **limits: int) -> dict[Hashable, Finished]:
    """All requests together in a fresh engine."""
    engine = engine_of(loaded, **limits)
    for one in requests:
        engine.add(one)
    return drain(engine)
