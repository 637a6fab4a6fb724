"""A model is found by name, path or hub id; its tokenizer fits it; nothing that lies in its folder is ever run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from contract.errors import ModelLoadError
from contract.jobs import Message
from contract.paths import Folders
from contract.sampling import SamplingParams
from contract.settings import WorkerSettings
from tests import checkpoints
from tests.canvas_checkpoint import diffusion_gemma
from worker.model import Model, model_folder, open_model
from worker.tokenizing import Tokenizer

Write = Callable[..., Path]
FAMILIES = [
    checkpoints.llama_block,
    checkpoints.llada,
    checkpoints.illada,
    checkpoints.dream,
    checkpoints.a2d_qwen3,
    checkpoints.llada_moe,
    checkpoints.llada2,
    checkpoints.sdar_moe,
    checkpoints.dream_reasoner,
    checkpoints.stable_diffcoder,
    checkpoints.nemotron,
    checkpoints.wedlm,
    checkpoints.modernbert,
    checkpoints.bert,
    checkpoints.mdlm,
    checkpoints.bd3lm,
    diffusion_gemma,
]
MODULES = ("configuration_trap.py", "modeling_trap.py", "tokenization_trap.py", "__init__.py", "setup.py")


def opened(folder: Path) -> Model:
    return open_model(WorkerSettings(root=folder, model=str(folder), device="cpu", dtype="float32"))


def answer(model: Model) -> str:
    turn = (Message(role="user", content="Why?"),)
    model.engine.add(model.request("r", turn, SamplingParams(max_new_tokens=8)))
    while not (finished := model.engine.step()):
        pass
    assert finished[0].error is None
    return model.tokenizer.decode(finished[0].token_ids)


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def trap(folder: Path) -> Path:
    """Modules that leave a file behind when they are run, named wherever a checkpoint can name code; that file."""
    marker = folder / "ran"
    for name in MODULES:
        (folder / name).write_text(f"open({str(marker)!r}, 'w').close()\nraise SystemExit('ran')\n")
    names = {"AutoConfig": "configuration_trap.Config"}
    names |= dict.fromkeys(("AutoModel", "AutoModelForCausalLM", "AutoModelForMaskedLM"), "modeling_trap.Model")
    change(folder / "config.json", auto_map=names)
    tokenizers = ["tokenization_trap.Slow", "tokenization_trap.Fast"]
    settings = folder / "tokenizer_config.json"
    if "auto_map" in json.loads(settings.read_text()):
        change(settings, auto_map={"AutoTokenizer": tokenizers})
    return marker


@pytest.mark.parametrize("write", FAMILIES)
def test_code_in_a_checkpoint_is_never_run(tmp_path: Path, write: Write) -> None:
    folder = write(tmp_path, chat_template=True)
    marker = trap(folder)
    assert isinstance(answer(opened(folder)), str)
    assert not marker.exists()
    assert not any(name.startswith("transformers_modules") for name in sys.modules)


def test_a_tokenizer_that_needs_code_of_its_own_is_refused(tmp_path: Path) -> None:
    """And nobody is asked at the terminal."""
    folder = checkpoints.llada(tmp_path)
    marker = trap(folder)
    names = ["tokenization_trap.Slow", "tokenization_trap.Fast"]
    change(folder / "tokenizer_config.json", tokenizer_class="TrapTokenizer", auto_map={"AutoTokenizer": names})
    with pytest.raises(ModelLoadError, match="no usable tokenizer"):
        opened(folder)
    assert not marker.exists()


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    folder = checkpoints.llada(tmp_path)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    last = tokenizer["added_tokens"][-1]
    tokenizer["added_tokens"].append(last | {"id": last["id"] + 1, "content": "<|one more|>"})
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(ModelLoadError, match=r"the tokenizer knows 260 tokens, the model only 259"):
        opened(folder)


def test_dreams_tokenizer_reads_special_tokens_and_every_byte(tmp_path: Path) -> None:
    tokenizer = Tokenizer(checkpoints.dream(tmp_path), checkpoints.VOCABULARY, "raw", "Qwen2Tokenizer")
    text = "Wärme 7 ≠ heat\n"
    ids = tokenizer.encode(text + "<|mask|><|end|>")
    assert ids[-2:] == (checkpoints.MASK, checkpoints.STOP)
    assert len(ids) == len(text.encode()) + 2
    assert tokenizer.decode(ids) == text


def test_the_chat_template_is_given_the_familys_values(tmp_path: Path) -> None:
    folder = checkpoints.a2d_qwen3(tmp_path, chat_template=True)
    template = checkpoints.CHAT_TEMPLATE + "{% if enable_thinking is false %}<think></think>{% endif %}"
    change(folder / "tokenizer_config.json", chat_template=template)
    request = opened(folder).request("r", "Why?", SamplingParams())
    assert Tokenizer(folder, checkpoints.VOCABULARY).decode(request.prompt_ids).endswith("<think></think>")


def test_a_family_gives_its_chat_template_to_a_tokenizer_that_has_none(tmp_path: Path) -> None:
    folder = checkpoints.modernbert(tmp_path)
    model = opened(folder)
    turns = ("system", " Be brief. "), ("user", "Why?\n"), ("assistant", "Because."), ("user", "Why?")
    messages = tuple(Message(role=role, content=content) for role, content in turns)
    request = model.request("r", messages, SamplingParams())
    assert Tokenizer(folder, checkpoints.VOCABULARY).decode(request.prompt_ids) == (
        "[SYS]\nBe brief.\n[/SYS]\n\n[Question]\nWhy?\n[/Question]\n\n[Answer]\nBecause.\n[/Answer]\n\n"
        "[Question]\nWhy?\n[/Question]\n\n[Answer]\n"
    )


def test_a_tokenizers_own_chat_template_comes_before_the_familys(tmp_path: Path) -> None:
    model = opened(checkpoints.modernbert(tmp_path, chat_template=True))
    assert checkpoints.TURN in model.request("r", "Why?", SamplingParams()).prompt_ids


@pytest.mark.parametrize(
    ("text", "answer"),
    [("So.\n[/Answer]\n\n[Question]", "So."), (" So. \n", " So. \n"), ("[/Answer]", ""), ("[/Answer", "[/Answer")],
)
def test_answers_are_cut_at_the_text_that_ends_them(tmp_path: Path, text: str, answer: str) -> None:
    folder = checkpoints.modernbert(tmp_path)
    tokenizer = Tokenizer(folder, checkpoints.VOCABULARY, "raw", end_of_answer="[/Answer]")
    assert tokenizer.decode(tokenizer.encode(text)) == answer


def test_gpt2s_files_are_read_whatever_the_configuration_names(tmp_path: Path) -> None:
    """Its tokenizer_config.json names no class, and the model_type is not one of transformers'."""
    model = opened(checkpoints.mdlm(tmp_path))
    text = "Wärme 7 ≠ heat\n"
    ids = model.request("r", f"<|endoftext|>{text}", SamplingParams()).prompt_ids
    assert ids[0] == checkpoints.STOP
    assert len(ids) == len(text.encode()) + 1
    assert model.tokenizer.decode(ids) == text


def test_a_tokenizer_that_is_published_elsewhere_is_named(tmp_path: Path) -> None:
    folder = checkpoints.mdlm(tmp_path, tokenizer=False)
    with pytest.raises(ModelLoadError, match="is that of 'openai-community/gpt2': put its files into the folder"):
        opened(folder)


def test_a_named_tokenizer_without_files_is_refused(tmp_path: Path) -> None:
    """transformers would make one that knows no text."""
    with pytest.raises(ModelLoadError, match="no usable tokenizer: its files are missing"):
        opened(checkpoints.dream(tmp_path, tokenizer=False))


def test_a_model_of_random_canvases_answers_through_its_own_template(tmp_path: Path) -> None:
    """Published in a file beside the tokenizer's."""
    model = opened(diffusion_gemma(tmp_path, chat_template=True))
    request = model.request("r", "Why?", SamplingParams(max_new_tokens=40))
    assert model.tokenizer.decode(request.prompt_ids) == "user\nWhy?\nmodel\n"
    model.engine.add(request)
    while not (finished := model.engine.step()):
        pass
    assert len(model.tokenizer.decode(finished[0].token_ids)) > 0
    facts = model.describe()
    assert (facts["family"], facts["mask_id"], facts["context"]) == ("diffusion_gemma", None, 512)
    assert facts["rows_at_full_context"] > 0


def test_a_name_under_models_comes_before_a_path_and_the_hub(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (folders.models / "org/name", folders.root / "org/name"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(folders.root)
    assert model_folder(folders, "org/name") == folders.models / "org/name"
    (folders.models / "org/name").rmdir()
    assert model_folder(folders, "org/name") == Path("org/name")


def test_a_hub_id_is_fetched_without_code_and_pickles(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    published = {
        "model-00001-of-00002.safetensors": True,
        "model.safetensors.index.json": True,
        "config.json": True,
        "tokenizer.json": True,
        "tokenizer_config.json": True,
        "vocab.json": True,
        "merges.txt": True,
        "chat_template.jinja": True,
        "modeling_dream.py": False,
        "pytorch_model.bin": False,
        "README.md": False,
    }
    fetched: list[str] = []

    def snapshot_download(repo_id: str, allow_patterns: list[str]) -> str:
        assert repo_id == "Dream-org/Dream-v0-Instruct-7B"
        fetched.extend(filter_repo_objects(published, allow_patterns=allow_patterns))
        return "/cache/snapshot"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert model_folder(folders, "Dream-org/Dream-v0-Instruct-7B") == Path("/cache/snapshot")
    wanted = {name for name, wanted in published.items() if wanted}
    assert set(fetched) == wanted
    fetched.clear()
    model_folder(folders, "Dream-org/Dream-v0-Instruct-7B", allow_pickles=True)
    assert set(fetched) == wanted | {"pytorch_model.bin"}


def test_a_hub_id_without_a_connection_says_so(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError) as caught:
        model_folder(folders, "no-such-org/no-such-model")
    said = str(caught.value)
    assert said.startswith("no model 'no-such-org/no-such-model': neither ")
    assert "the hub does not give it: " in said
    assert "\n" not in said


@pytest.mark.parametrize("model", ["nowhere", "/no/such/folder", "../no/such", "a/b/c", "./a"])
def test_what_cannot_be_a_hub_id_is_not_asked_for(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(ModelLoadError, match="is a folder"):
        model_folder(folders, model)
