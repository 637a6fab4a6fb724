"""The function named in every prompt job. It exists so that a worker that cannot denoise says so.

`worker run` reads the jobs itself and never calls it; a stock `rq worker` on our queues would.
"""

from __future__ import annotations

import time
from typing import Any, NoReturn

from contract.errors import UsageError

PAUSE_S = 1.0


def denoise(payload: dict[str, Any]) -> NoReturn:
    """Refuse: prompts are denoised many at a time by `worker run`, not one by one by `rq worker`."""
    # RQ puts the job back at once: without a pause the wrong worker would spin, and use up the job's RQ retries.
    time.sleep(PAUSE_S)
    raise UsageError("this queue holds prompts for a diffusion model: run `worker run` on it instead of `rq worker`")
