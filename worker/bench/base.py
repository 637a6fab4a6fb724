"""The autoregressive model that a diffusion model was made from: `models/NAME-base`, beside `models/NAME`.

The folder is in our own layout (`LlamaForBlockDiffusion`, block length 1), which transformers reads as the plain Llama
that it is, since it goes by `model_type`. That of the demo model is made from its wheel at first use.
"""

from __future__ import annotations

from pathlib import Path

from contract.errors import UsageError
from worker.engine import Loaded, load


def base_folder(model_folder: Path) -> Path:
    """Where the base of the model in `model_folder` lies, or would lie."""
    return model_folder.with_name(f"{model_folder.name}-base")


def ensure_base(folder: Path) -> Path:
    """The folder, built first when it is the demo model's. Raises UsageError saying what is missing."""
    if (folder / "config.json").is_file():
        return folder
    if folder.name != "demo-base":
        raise UsageError(
            f"no base model: {folder} is not there; 'ar' and 'causal' need it, leave them out of --compare"
        )
    # Imported here: needed once per machine.
    from worker.demo_model import build_base

    try:
        build_base(folder)
    except ImportError as error:
        raise UsageError(f"the base model cannot be read: run `pip install 'dllm-batch[demo]'` ({error})") from None
    return folder


def load_base(folder: Path, like: Loaded) -> Loaded:
    """The base in this engine, on the device and in the dtype of `like`."""
    loaded = load(ensure_base(folder), str(like.decoder.device), str(like.decoder.dtype).removeprefix("torch."))
    if not isinstance(loaded, Loaded) or loaded.spec.attention != "causal_context":
        raise UsageError(f"{folder}: family '{loaded.spec.family}' cannot run autoregressively")
    return loaded
