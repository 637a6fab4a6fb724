"""The diffusion engine: token ids in, token ids out. The rest of the worker uses only what is named here."""

from worker.engine.engine import Engine
from worker.engine.loading import Loaded, load
from worker.engine.request import Finished, Request
from worker.engine.stats import EngineStats

__all__ = ["Engine", "EngineStats", "Finished", "Loaded", "Request", "load"]
