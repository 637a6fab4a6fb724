"""Throughput over the last hour as a picture inside the page: SVG of numbers and clock times, and nothing else.

Colours and lines are those of the page's own style sheet, so that light and dark both have them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from markupsafe import Markup

from producer.review import Review

WIDTH, HEIGHT = 720, 180
LEFT, RIGHT, TOP, BOTTOM = 60, 8, 14, 24
CLOCKS = 4
"""Stretches between the clock times below the picture."""


def throughput(found: Review) -> Markup:
    """Output tokens per second, a step for each bin of time."""
    values = [one.tokens_per_s for one in found.bins]
    top = _round_up(max(values, default=0.0))
    mean = found.total.output_tokens / max(found.until - found.since, 1.0)
    told = f"Output tokens per second, {_clock(found.since)} to {_clock(found.until)}"
    most = f"at most {max(values, default=0.0):.1f}, {mean:.1f} on average"
    line = "".join(_steps(values, top))
    floor = HEIGHT - BOTTOM
    return Markup(
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{told}: {most}" class="chart">'
        f"{''.join(_grid(top))}"
        f'<path class="area" d="M{LEFT},{floor}{line}V{floor}Z"/><path class="line" d="M{line[1:]}"/>'
        f"{''.join(_clocks(found))}</svg>"
    )


def _steps(values: list[float], top: float) -> Iterator[str]:
    wide = (WIDTH - LEFT - RIGHT) / max(1, len(values))
    for number, value in enumerate(values):
        yield f"L{LEFT + number * wide:.1f},{_height(value, top):.1f}H{LEFT + (number + 1) * wide:.1f}"


def _grid(top: float) -> Iterator[str]:
    for part in (0.0, 0.5, 1.0):
        y = _height(part * top, top)
        yield f'<path class="grid" d="M{LEFT},{y:.1f}H{WIDTH - RIGHT}"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{part * top:g}</text>'


def _clocks(found: Review) -> Iterator[str]:
    for number in range(CLOCKS + 1):
        x = LEFT + number / CLOCKS * (WIDTH - LEFT - RIGHT)
        at = found.since + number / CLOCKS * (found.until - found.since)
        anchor = "end" if number == CLOCKS else "middle" if number else "start"
        yield f'<text x="{x:.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{_clock(at)}</text>'


def _height(value: float, top: float) -> float:
    return TOP + (1 - value / top) * (HEIGHT - TOP - BOTTOM)


def _round_up(value: float) -> float:
    """The next of 1, 2, 5, 10, 20, …"""
    if value <= 1:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if value <= step * power)


def _clock(at: float) -> str:
    return time.strftime("%H:%M", time.localtime(at))
