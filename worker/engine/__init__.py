"""The diffusion engine: token ids in, token ids out. The rest of the worker uses only what is named here."""

from worker.engine.engine import Engine, EngineStats
from worker.engine.loading import Loaded, load
from worker.engine.sequence import Finished, Request

__all__ = ["Engine", "EngineStats", "Finished", "Loaded", "Request", "load"]
