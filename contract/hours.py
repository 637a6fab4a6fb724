"""When a batch may run: not before a moment, or only in a daily window such as 22:00-06:00.

Clock times mean the local time of the machine whose producer takes the batch (its `TZ`). They are turned into absolute
times there, once, clock changes included, and travel in the batch's spec: nobody else needs that machine's time zone,
and what decides is the server's clock. A window is kept as stretches: `days` times, every 24 hours from `first` on, it
opens for `length` seconds; each clock change begins another one. They reach YEARS ahead; the last one goes on for ever.

A night in which the clock changes is as long as the clock makes it (22:00-06:00 is once 7 and once 9 hours). A time
that the clock jumps over is as much later, one that it shows twice is the first of the two, and a window of which that
leaves nothing does not open that night.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from datetime import date, datetime, time, timedelta
from typing import NamedTuple, cast

from pydantic import BaseModel, ConfigDict
from redis import Redis

DAY_S = 86_400
YEARS = 3
FOR_EVER = 1_000_000
SETTLED = 7
"""Nights alike in a row after which they may be taken for the usual ones."""

MOMENT = "give a time such as 22:00 (the next one), 2026-12-03T22:00 or +2h30m"
WINDOW = "give two different times, from and to, such as 22:00-06:00"


class Stretch(NamedTuple):
    """Alike openings of a window on consecutive days: the first in seconds since the epoch, their length in seconds."""

    first: float
    days: int
    length: float


class Hours(BaseModel):
    """When a batch may run. `window` is for people; `stretches` is what it means, none for any time of the day."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    not_before: float = 0.0
    window: str | None = None
    stretches: tuple[Stretch, ...] = ()

    @staticmethod
    def of(not_before: str | None, window: str | None, now: float) -> Hours | None:
        """What the settings of these names mean at `now`; None for a batch that may always run. Raises ValueError."""
        if not_before is None and window is None:
            return None
        return Hours(
            not_before=0.0 if not_before is None else moment(not_before, now),
            window=window,
            stretches=() if window is None else tuple(_stretches(*clock_window(window), now)),
        )


def moment(text: str, now: float) -> float:
    """The moment that `--not-before` names, in seconds since the epoch. Raises ValueError."""
    if delay := re.fullmatch(r"\+(?=\d)(?:(\d{1,4})d)?(?:(\d{1,4})h)?(?:(\d{1,4})m)?", text):
        days, hours, minutes = (int(part or 0) for part in delay.groups())
        return now + timedelta(days=days, hours=hours, minutes=minutes).total_seconds()
    if clock := _clock(text):
        today = datetime.fromtimestamp(now).date()
        return next(at for day in (0, 1, 2) if (at := _local(today + timedelta(days=day), clock)) > now)
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise ValueError(MOMENT) from None


def clock_window(text: str) -> tuple[time, time]:
    """From and to of a daily window; it wraps midnight when the second is the earlier one. Raises ValueError."""
    opens, dash, closes = (_clock(part.strip()) if part != "-" else part for part in text.partition("-"))
    if not dash or not isinstance(opens, time) or not isinstance(closes, time) or opens == closes:
        raise ValueError(WINDOW)
    return opens, closes


def _clock(text: str) -> time | None:
    found = re.fullmatch(r"([01]?[0-9]|2[0-3]):([0-5][0-9])", text, re.ASCII)
    return time(int(found[1]), int(found[2])) if found else None


def _local(day: date, clock: time) -> float:
    return datetime.combine(day, clock).timestamp()


def _stretches(opens: time, closes: time, now: float) -> list[Stretch]:
    """From yesterday's opening on, which may last until today, to YEARS ahead."""
    found: list[Stretch] = []
    for first, length in _nights(opens, closes, datetime.fromtimestamp(now).date() - timedelta(days=1)):
        last = found[-1] if found else None
        if last and length == last.length and first == last.first + last.days * DAY_S:
            found[-1] = last._replace(days=last.days + 1)
        elif last and last.days >= SETTLED and first > now + YEARS * 365 * DAY_S:
            break
        else:
            found.append(Stretch(first, 1, length))
        if found[-1].days > YEARS * 366:
            break  # a zone whose clock never changes
    return [*found[:-1], found[-1]._replace(days=FOR_EVER)]


def _nights(opens: time, closes: time, since: date) -> Iterator[tuple[float, float]]:
    """Opening and length in seconds of each day's window."""
    wraps = timedelta(days=int(closes < opens))
    for number in itertools.count():
        day = since + timedelta(days=number)
        first = _local(day, opens)
        if (length := _local(day + wraps, closes) - first) > 0:
            yield first, length


# Lua: when a batch of these hours (JSON of Hours) may run next, from `now` on, and until when: two times.
STRETCH = f"""
local function open_stretch(text, now)
  local hours = cjson.decode(text)
  local at = math.max(now, hours.not_before)
  for _, stretch in ipairs(hours.stretches) do
    local first, days, length = stretch[1], stretch[2], stretch[3]
    local day = math.max(0, math.floor((at - first - length) / {DAY_S}) + 1)
    local opens = first + day * {DAY_S}
    if day < days then return math.max(at, opens), opens + length end
  end
  return at, math.huge
end
"""

_CLOSED = (
    STRETCH
    + """
local clock, found = redis.call('TIME'), {}
local now = clock[1] + clock[2] / 1e6
for place, text in ipairs(ARGV) do
  local opens = open_stretch(text, now)
  found[place] = opens > now and string.format('%.3f', opens) or ''
end
return found
"""
)


def closed_until(redis: Redis, hours: Sequence[Hours]) -> list[float | None]:
    """For each: when it opens next, in seconds since the epoch; None when it is open now, by the server's clock."""
    if not hours:
        return []
    found = redis.eval(_CLOSED, 0, *(one.model_dump_json() for one in hours))
    return [float(opens) if opens else None for opens in cast("list[bytes]", found)]
