"""The diffusion engine: token ids in, token ids out. The rest of the worker uses only what is named here."""

from worker.engine.engine import Engine
from worker.engine.loading import Loaded
from worker.engine.opening import AnyEngine, AnyLoaded, engine_of, load
from worker.engine.request import Finished, Plan, Request
from worker.engine.stats import EngineStats

__all__ = [
    "AnyEngine",
    "AnyLoaded",
    "Engine",
    "EngineStats",
    "Finished",
    "Loaded",
    "Plan",
    "Request",
    "engine_of",
    "load",
]
