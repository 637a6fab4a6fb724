"""The loaded model as the rest of the worker uses it: engine, tokenizer, and rows made of what the engine returns."""

from __future__ import annotations

import re
import resource
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from contract.errors import ModelLoadError
from contract.jobs import Prompt
from contract.paths import Folders
from contract.sampling import SamplingParams
from contract.settings import WorkerSettings
from worker.engine import AnyEngine, AnyLoaded, Finished, Loaded, Plan, Request, engine_of, load
from worker.tokenizing import Tokenizer

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
"""What is fetched of a hub's repository: no code, and pickles only where they are allowed."""
HUB_PICKLES = ("pytorch_model*.bin",)


@dataclass(frozen=True)
class Model:
    """A checkpoint ready to answer prompts."""

    name: str
    engine: AnyEngine
    tokenizer: Tokenizer
    loaded: AnyLoaded
    folder: Path
    """Where the checkpoint's files lie."""

    @property
    def always_samples(self) -> bool:
        """Random canvases draw their tokens, whatever the temperature."""
        return not isinstance(self.loaded, Loaded)

    def describe(self) -> dict[str, Any]:
        """Facts for logs and checks."""
        spec = self.loaded.spec
        return {
            **self.place(),
            "family": spec.family,
            "parameters": self.loaded.parameters,
            "context": spec.decoder.max_positions,
            "mask_id": spec.mask_id,
            "stop_ids": sorted(spec.stop_ids),
            "rows_at_full_context": self.engine.memory.rows(spec.decoder.max_positions),
        }

    def place(self) -> dict[str, str]:
        """Model, device and arithmetic, for throughput records."""
        return {
            "model": self.name,
            "device": self.loaded.device,
            "dtype": str(self.loaded.decoder.dtype).removeprefix("torch."),
            "quantize": self.loaded.quantize,
        }

    def peak_memory_mb(self) -> int:
        """The most memory held so far: of the device for CUDA, else of the process (Linux counts KB, macOS bytes)."""
        device = self.loaded.decoder.device
        if device.type == "cuda":
            held = range(torch.cuda.device_count())  # a model may be spread over several
            return sum(torch.cuda.max_memory_allocated(number) for number in held) >> 20
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak >> 20 if sys.platform == "darwin" else peak >> 10

    def device_memory(self) -> dict[tuple[str, str], int]:
        """Bytes by (number of the CUDA device, kind of `dllm_gpu_memory_bytes`); nothing on a CPU."""
        device = self.loaded.decoder.device
        found: dict[tuple[str, str], int] = {}
        if device.type == "cuda":
            spread = "+" in self.loaded.device
            for number in range(torch.cuda.device_count()) if spread else [device.index or 0]:
                free, total = torch.cuda.mem_get_info(number)
                found[str(number), "allocated"] = torch.cuda.memory_allocated(number)
                found[str(number), "reserved"] = torch.cuda.memory_reserved(number)
                found[str(number), "used"], found[str(number), "total"] = total - free, total
        return found

    def request(self, name: str, prompt: Prompt, params: SamplingParams, urgent: bool = False) -> Request:
        """The engine's view of a prompt. Raises BadPrompt when it cannot be tokenised.

        A row that samples without a seed gets one from its name, so that running it again gives the same text.
        """
        if params.seed is None:
            params = params.model_copy(update={"seed": zlib.crc32(name.encode())})
        return Request(name, self.tokenizer.encode(prompt), params, urgent)


def model_folder(folders: Folders, model: str, allow_pickles: bool = False) -> Path:
    """`models/NAME` under the root when that exists, else `model` as a path, else as the hub's `org/name`."""
    for folder in (folders.models / model, Path(model)):
        if folder.is_dir():
            return folder
    missing = f"no model '{model}': neither {folders.models / model} nor {model} is a folder"
    if HUB_ID.fullmatch(model):
        return _from_hub(model, missing, HUB_FILES + HUB_PICKLES if allow_pickles else HUB_FILES)
    hint = " (`make demo` builds it)" if model == "demo" else ""
    raise ModelLoadError(f"{missing}{hint}")


def _from_hub(model: str, missing: str, files: tuple[str, ...]) -> Path:
    """The hub's snapshot in the local cache, downloaded where it is not there yet."""
    # Imported here: needed for hub ids only.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=list(files)))
    except Exception as error:  # of several libraries: the connection, the hub's answer, the cache
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelLoadError(f"{missing}, and the hub does not give it: {reason}") from error


def open_model(settings: WorkerSettings) -> Model:
    """Load the model that the settings name. Raises ModelLoadError saying what does not fit."""
    folder = model_folder(settings.folders, settings.model, settings.allow_pickle_weights)
    how = (settings.device, settings.dtype, settings.threads, settings.allow_pickle_weights, settings.quantize)
    loaded = load(folder, *how)
    spec = loaded.spec
    tokenizer = Tokenizer(
        folder,
        spec.decoder.vocab_size,
        settings.prompt_format,
        spec.tokenizer_class,
        spec.template_values,
        spec.chat_template,
        spec.end_of_answer,
        spec.tokenizer_home,
    )
    limits = (settings.max_rows, settings.max_step_tokens, settings.prefix_cache_mb)
    engine = engine_of(loaded, *limits, urgent_rows=settings.interactive_rows)
    return Model(settings.queue_model, engine, tokenizer, loaded, folder)


def applied_params(finished: Finished) -> dict[str, Any]:
    """The sampling parameters as they were applied, for the output row: what to send to get the same text again."""
    plan = finished.plan
    if plan.attention == "canvas":
        return _of_canvases(plan)
    by_rule: dict[str, Any] = {
        "fixed_steps": {"denoise_steps": plan.denoise_steps},
        "factor": {"factor": plan.number},
        "entropy_bound": {"entropy_bound": plan.number},
        "entropy_threshold": {"entropy_threshold": plan.number},
        "klass": {"threshold": plan.number, "kl_threshold": plan.bound},
        "joint_threshold": {"threshold": plan.number, "edit_threshold": plan.bound},
    }.get(plan.rule, {"threshold": plan.number})
    by_attention: dict[str, Any] = {} if plan.attention == "causal" else {"commit": plan.commit}
    if plan.attention == "bidirectional":
        by_attention = {"cache": plan.cache} | ({"cache_refresh": plan.cache_refresh} if plan.cache != "none" else {})
    return {
        "max_new_tokens": plan.max_new_tokens,
        **({"truncate": plan.truncate} if plan.truncate else {}),
        "rule": plan.rule,
        **by_rule,
        "block_length": plan.block_length,
        **by_attention,
        "temperature": plan.temperature,
        "top_p": plan.top_p,
        "top_k": plan.top_k,
        "seed": plan.seed,
    }


def _of_canvases(plan: Plan) -> dict[str, Any]:
    """Those that random canvases take; the rule is the only one, and not named beside `denoise_steps`."""
    return {
        "max_new_tokens": plan.max_new_tokens,
        **({"truncate": plan.truncate} if plan.truncate else {}),
        "denoise_steps": plan.denoise_steps,
        "entropy_bound": plan.number,
        "temperature": plan.temperature,
        "seed": plan.seed,
    }
