"""The command `worker` on an engine that fails. Arguments: the fault, the row that brings it about, the command's own.

Faults while the row is in the engine (`any`: whichever row): `poison`, an error as CUDA raises it, after which every
further step fails too; `hang`, a step that does not end, once and never again as long as the file `hung` lies there;
`slow`, steps that take their time and are counted by the bytes of the file `steps`.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import worker.model
import worker.restarts
from worker.cli import main
from worker.engine import Engine, Finished

ASSERT = "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"


class Faulty:
    """The engine, and what becomes of it."""

    def __init__(self, engine: Engine, fault: str, row: str) -> None:
        self._engine = engine
        self._fault = fault
        self._row = row
        self._poisoned = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> list[Finished]:
        active = self._engine.active()
        if self._row in active or (self._row == "any" and active):
            getattr(self, self._fault)()
        if self._poisoned:
            raise torch.AcceleratorError(ASSERT)
        return self._engine.step()

    def poison(self) -> None:
        self._poisoned = True

    def hang(self) -> None:
        if not Path("hung").exists():
            Path("hung").touch()
            time.sleep(3600)

    def slow(self) -> None:
        with Path("steps").open("a") as steps:
            steps.write(".")
        time.sleep(0.05)


if __name__ == "__main__":
    fault, row = sys.argv[1:3]
    del sys.argv[1:3]
    open_model = worker.model.open_model
    worker.model.open_model = lambda settings: replace(
        opened := open_model(settings), engine=Faulty(opened.engine, fault, row)
    )
    worker.restarts.FIRST_PAUSE_S = 0.01
    main()
