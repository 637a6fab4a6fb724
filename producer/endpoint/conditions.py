"""Under which conditions an endpoint was measured: what somebody needs to measure it again, and no secret."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib import metadata
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from contract import machine
from producer.endpoint.client import MAX_TOKENS
from producer.endpoint.load import Plan, Round
from producer.endpoint.opening import Opened
from producer.endpoint.prompts import PromptSet

LIBRARIES = ("dllm-batch", "httpx2")


def conditions(opened: Opened, plan: Plan, prompts: PromptSet, key_from: str | None) -> dict[str, Any]:
    """What is known before the first measured call."""
    target = opened.target
    return {
        "base_url": without_secrets(target.base_url),
        "server": opened.server,
        "model": target.model,
        "api": target.api,
        "stream": target.stream,
        "include_usage": target.dialect.include_usage,
        "max_tokens": target.max_tokens or {"of each prompt, else": MAX_TOKENS},
        "params": dict(target.params),
        "prompts": prompts.facts(),
        "concurrency": list(plan.levels),
        "rounds": plan.rounds,
        "calls_per_round": [plan.calls_at(level) for level in plan.levels],
        "warmup_calls": [plan.warmup_at(level) for level in plan.levels],
        "timeout_s": target.timeout_s,
        "api_key_from": key_from,
        "through_proxy": _through_proxy(target.base_url),
        "client": {"host": platform.node(), "platform": platform.platform(), **_versions(), **machine.facts()},
    }


def answered_as(rounds: Sequence[Round]) -> list[str]:
    """The models that answers name."""
    return sorted({call.model for one in rounds for call in one.answered if call.model})


def without_secrets(url: str) -> str:
    """`url` without user, password, query and fragment."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def _through_proxy(url: str) -> bool:
    """Whether the environment sends such requests through a proxy, which then is measured too."""
    parts, proxies = urlsplit(url), getproxies()
    return bool((parts.scheme in proxies or "all" in proxies) and not proxy_bypass(parts.hostname or ""))


def _versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
