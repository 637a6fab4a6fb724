"""Slots: compact within a class, moved when a row grows, reused when it leaves."""

from __future__ import annotations

import random
from itertools import count

import pytest
import torch

from tests.engine.running import engine_of, prompt, request
from worker.engine import Loaded
from worker.engine.cache import SlotClass, Slots, capacity_for
from worker.engine.models.spec import DecoderConfig

CONFIG = DecoderConfig(
    vocab_size=10,
    hidden_size=8,
    intermediate_size=8,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=4,
    norm_eps=1e-5,
    rope_theta=1e4,
    max_positions=1024,
)


@pytest.fixture
def slots() -> Slots:
    return Slots(CONFIG, torch.float32, [torch.device("cpu")] * CONFIG.layers)


def write(where: tuple[SlotClass, int], value: float) -> None:
    held, slot = where
    held.parts[0][:, :, slot] = value


def holds(where: tuple[SlotClass, int], value: float, positions: int = 128) -> bool:
    held, slot = where
    return bool((held.parts[0][:, :, slot, :, :positions] == value).all())


@pytest.mark.parametrize(("positions", "capacity"), [(1, 128), (128, 128), (129, 256), (256, 256), (1000, 1024)])
def test_classes_double(positions: int, capacity: int) -> None:
    assert capacity_for(positions) == capacity


def test_rows_of_a_class_lie_side_by_side(slots: Slots) -> None:
    places = [slots.reserve(row, 100) for row in range(5)]
    assert [slot for _, slot in places] == [0, 1, 2, 3, 4]
    assert len({id(held) for held, _ in places}) == 1


def test_reserving_again_keeps_the_slot(slots: Slots) -> None:
    assert slots.reserve(7, 10) == slots.reserve(7, 128)
    assert len(slots) == 1


def test_keys_survive_a_full_class_that_grows(slots: Slots) -> None:
    for row in range(9):
        write(slots.reserve(row, 10), row + 1.0)
    assert all(holds(slots.reserve(row, 10), row + 1.0) for row in range(9))


def test_a_row_that_leaves_is_replaced_by_the_last_with_its_keys(slots: Slots) -> None:
    for row in range(4):
        write(slots.reserve(row, 10), row + 1.0)
    slots.release(1)
    held, slot = slots.reserve(3, 10)
    assert slot == 1
    assert holds((held, slot), 4.0)
    assert sorted(slots.reserve(row, 10)[1] for row in (0, 2, 3)) == [0, 1, 2]
    assert holds(slots.reserve(0, 10), 1.0)
    assert holds(slots.reserve(2, 10), 3.0)


def test_a_freed_slot_is_empty_and_used_again(slots: Slots) -> None:
    write(slots.reserve(0, 10), torch.nan)
    slots.release(0)
    where = slots.reserve(1, 10)
    assert where[1] == 0
    assert holds(where, 0.0)


def test_a_row_that_grows_takes_its_keys_along(slots: Slots) -> None:
    for row in range(3):
        write(slots.reserve(row, 100), row + 1.0)
    held, slot = slots.reserve(0, 129)
    assert held.capacity == 256
    assert holds((held, slot), 1.0)
    assert bool((held.parts[0][:, :, slot, :, 128:] == 0).all())
    assert holds(slots.reserve(2, 100), 3.0)
    assert sorted(slots.reserve(row, 100)[1] for row in (1, 2)) == [0, 1]


def test_releasing_an_unknown_row_is_no_mistake(slots: Slots) -> None:
    slots.release(99)
    assert len(slots) == 0


def test_held_bytes_count_what_is_allocated(slots: Slots) -> None:
    assert slots.held_bytes() == 0
    slots.reserve(0, 10)
    assert slots.held_bytes() == 2 * 128 * slots.bytes_per_position  # the first two slots are made together
    slots.release(0)
    assert slots.held_bytes() == 2 * 128 * slots.bytes_per_position


def test_any_coming_and_going_keeps_every_rows_keys(slots: Slots) -> None:
    """A random walk against a plain dictionary."""
    source, names, sizes = random.Random(0), count(), {}
    for _ in range(400):
        move = source.random()
        if not sizes or move < 0.4:
            row = next(names)
            sizes[row] = source.randint(1, 200)
            write(slots.reserve(row, sizes[row]), float(row))
        elif move < 0.7:
            row = source.choice(list(sizes))
            before = slots.reserve(row, sizes[row])[0].capacity
            sizes[row] = min(900, sizes[row] + source.randint(1, 200))
            assert holds(slots.reserve(row, sizes[row]), float(row), before)
            write(slots.reserve(row, sizes[row]), float(row))
        else:
            row = source.choice(list(sizes))
            del sizes[row]
            slots.release(row)
        assert len(slots) == len(sizes)
        places = {row: slots.reserve(row, size) for row, size in sizes.items()}
        assert all(held.capacity == max(held.capacity, capacity_for(sizes[row])) for row, (held, _) in places.items())
        assert all(holds(place, float(row)) for row, place in places.items())
        for held in {id(held): held for held, _ in places.values()}.values():
            assert sorted(slot for other, slot in places.values() if other is held) == list(range(len(held.owners)))


def test_memory_does_not_grow_with_the_rows_that_passed(either: Loaded) -> None:
    """Hundreds of rows through an engine of four: no more is held than by the first few."""
    engine = engine_of(either, max_rows=4)
    held = []
    for number in range(200):
        engine.add(request(number, prompt(number, 1 + number % 150), max_new_tokens=8, block_length=8))
        while engine.room() == 0:
            engine.step()
            held.append(engine.runner.slots.held_bytes())
    while engine.active():
        engine.step()
    assert len(engine.runner.slots) == 0
    # Four rows at once: at most four slots in each of the two classes that prompts of this length need.
    assert max(held) <= 4 * (128 + 256) * engine.runner.slots.bytes_per_position
