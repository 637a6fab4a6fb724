"""The function named in every prompt job. It exists so that a worker that cannot denoise says so.

`worker run` reads the jobs itself and never calls it; a stock `rq worker` on our queues would.
"""

from __future__ import annotations

from typing import Any, NoReturn

from contract.errors import UsageError


def denoise(payload: dict[str, Any]) -> NoReturn:
    """Refuse: prompts are denoised many at a time by `worker run`, not one by one by `rq worker`."""
    raise UsageError("this queue holds prompts for a diffusion model: run `worker run` on it instead of `rq worker`")
