"""Tiny models, loaded once, and a way to run requests through an engine to their end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import checkpoints
from worker.engine import Loaded, load


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Matrices this small only lose time to a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A block-diffusion Llama: causal context, blocks of 4."""
    return _loaded(checkpoints.llama_block(tmp_path_factory.mktemp("causal"), tokenizer=False))


@pytest.fixture(scope="session")
def bidirectional(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A model in LLaDA's layout."""
    return _loaded(checkpoints.llada(tmp_path_factory.mktemp("bidirectional"), tokenizer=False))


@pytest.fixture(scope="session")
def block_causal(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A model in SDAR's layout: blocks of 4 on a grid."""
    return _loaded(checkpoints.sdar(tmp_path_factory.mktemp("block_causal"), tokenizer=False))


@pytest.fixture(scope="session")
def shifted(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A model in Fast-dLLM v2's layout: block-causal and shifted."""
    return _loaded(checkpoints.fast_dllm_v2(tmp_path_factory.mktemp("shifted"), tokenizer=False))


@pytest.fixture(scope="session")
def bd3lm(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A model in A2D Qwen3's layout whose name says `bd3lm`: block-causal, the answer begins with a block."""
    return _loaded(checkpoints.a2d_qwen3(tmp_path_factory.mktemp("bd3lm"), tokenizer=False))


@pytest.fixture(scope="session")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A model in Stable-DiffCoder's layout: block-causal, the last block ends with the answer."""
    return _loaded(checkpoints.stable_diffcoder(tmp_path_factory.mktemp("cut"), tokenizer=False))


@pytest.fixture(scope="session")
def nemotron(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A model in Nemotron-Labs-Diffusion's layout: causal context, not shifted, YaRN."""
    return _loaded(checkpoints.nemotron(tmp_path_factory.mktemp("nemotron"), tokenizer=False))


@pytest.fixture(scope="session")
def wedlm(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A model in WeDLM's layout: causal, masks put in last."""
    return _loaded(checkpoints.wedlm(tmp_path_factory.mktemp("wedlm"), tokenizer=False))


@pytest.fixture(scope="session", params=["causal", "block_causal", "bidirectional"])
def either(request: pytest.FixtureRequest) -> Loaded:
    """Every attention kind in turn."""
    loaded: Loaded = request.getfixturevalue(request.param)
    return loaded


def _loaded(folder: Path) -> Loaded:
    return load(folder, device="cpu", dtype="float32")
