"""Checkpoints that load, and complaints that name what is wrong with those that do not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from contract.errors import ModelLoadError
from tests import checkpoints
from tests.engine.running import prompt, request, run
from worker.engine import Loaded, load

WEIGHTS = "model.safetensors"
EMBEDDING = "model.embed_tokens.weight"
Write = Callable[..., Path]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return checkpoints.llama_block(tmp_path / "model", tokenizer=False)


def change_config(folder: Path, **values: Any) -> None:
    """Set fields of `config.json`; `...` takes one out."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | values
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS)


def shard(folder: Path) -> list[str]:
    """Split the weights over two files and an index; returns the names of the files."""
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: weights[name] for name in part}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return list(parts)


def pickled(folder: Path, shards: int) -> None:
    """Store the weights as torch pickles, one file or several with an index."""
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    if shards == 1:
        torch.save(weights, folder / "pytorch_model.bin")
        return
    where = {name: f"pytorch_model-{number % shards + 1:05}.bin" for number, name in enumerate(weights)}
    for file in set(where.values()):
        torch.save({name: weights[name] for name in weights if where[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))


class Trap:
    """Whoever unpickles it creates a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self._file,)


def complaint(folder: Path, **options: Any) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(folder, **{"device": "cpu", "dtype": "float32", **options})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def answer(loaded: Loaded) -> tuple[int, ...]:
    return run(loaded, [request("r", prompt(1, 9), max_new_tokens=12, block_length=4)])["r"].token_ids


@pytest.mark.parametrize("write", [checkpoints.llama_block, checkpoints.llada])
def test_shards_load_like_one_file(tmp_path: Path, write: Write) -> None:
    folder = write(tmp_path, tokenizer=False)
    whole = load(folder, "cpu", "float32")
    shard(folder)
    sharded = load(folder, "cpu", "float32")
    assert sharded.parameters == whole.parameters
    assert answer(sharded) == answer(whole)


def test_parameters_are_counted_once(llama: Path) -> None:
    """The tied head is no second matrix."""
    expected = sum(weight.numel() for weight in load_file(llama / WEIGHTS).values())
    assert load(llama, "cpu", "float32").parameters == expected


def test_a_tied_head_that_is_stored_as_well_is_no_mistake(llama: Path) -> None:
    change_weights(llama, lambda weights: weights.update({"lm_head.weight": weights[EMBEDDING].clone()}))
    assert load(llama, "cpu", "float32").decoder.head.shape == (checkpoints.VOCABULARY, checkpoints.HIDDEN)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_are_in_the_dtype_asked_for(llama: Path, dtype: str) -> None:
    loaded = load(llama, "cpu", dtype)
    assert str(loaded.decoder.dtype) == f"torch.{dtype}"
    finished = run(loaded, [request(n, prompt(n, n + 1), max_new_tokens=8) for n in range(4)])
    assert all(one.error is None for one in finished.values())


def test_auto_takes_what_is_there(llama: Path) -> None:
    loaded = load(llama)
    assert loaded.decoder.device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_a_missing_weight_is_named(llama: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    change_weights(llama, lambda weights: weights.pop(name))
    assert f"missing {name}" in complaint(llama)


def test_an_unexpected_weight_is_named(llama: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    change_weights(llama, lambda weights: weights.update({name: torch.zeros(64)}))
    assert f"unexpected {name}" in complaint(llama)


def test_a_wrongly_shaped_weight_is_named_with_both_shapes(llama: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    change_weights(llama, lambda weights: weights.update({name: torch.zeros(64, 64)}))
    assert f"{name} has shape [64, 64], expected [32, 64]" in complaint(llama)


def test_many_complaints_are_counted(llama: Path) -> None:
    change_config(llama, num_hidden_layers=4)
    said = complaint(llama)
    assert said.count("missing ") == 5
    assert "and 13 more" in said


def test_a_missing_shard_is_named(llama: Path) -> None:
    gone = shard(llama)[1]
    (llama / gone).unlink()
    assert f"{gone} missing" in complaint(llama)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}'])
def test_an_unreadable_index_is_named(llama: Path, text: str) -> None:
    (llama / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json is not an index" in complaint(llama)


def test_a_folder_without_weights_is_named(llama: Path) -> None:
    (llama / WEIGHTS).unlink()
    assert complaint(llama) == f"{llama}: no *.safetensors file"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_pickled_weights_are_named_and_not_read(llama: Path, name: str) -> None:
    (llama / WEIGHTS).rename(llama / name)
    assert f"{name} may run code when read: convert the weights to safetensors" in complaint(llama)


@pytest.mark.parametrize("shards", [1, 2])
def test_pickled_weights_are_read_where_that_is_allowed(llama: Path, shards: int) -> None:
    expected = load(llama, "cpu", "float32").decoder
    pickled(llama, shards)
    found = load(llama, "cpu", "float32", allow_pickles=True).decoder
    assert torch.equal(found.embed, expected.embed)
    x = torch.randn(3, checkpoints.HIDDEN)
    assert torch.equal(found.head(x), expected.head(x))


def test_a_pickle_that_would_run_code_does_not(llama: Path, tmp_path: Path) -> None:
    pickled(llama, 1)
    trap = tmp_path / "sprung"
    torch.save({"weight": Trap(trap)}, llama / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin cannot be read"):
        load(llama, "cpu", "float32", allow_pickles=True)
    assert not trap.exists()


def test_safetensors_come_before_pickles(llama: Path) -> None:
    (llama / "pytorch_model.bin").write_bytes(b"no pickle at all")
    assert load(llama, "cpu", "float32", allow_pickles=True).spec.family == "llama_block_diffusion"


def test_pickled_shards_are_counted(llama: Path) -> None:
    (llama / WEIGHTS).unlink()
    for number in (1, 2, 3):
        (llama / f"pytorch_model-{number:05}-of-00003.bin").touch()
    assert "pytorch_model-00001-of-00003.bin and 2 more may run code" in complaint(llama)


def test_a_torn_weight_file_is_named(llama: Path) -> None:
    whole = (llama / WEIGHTS).read_bytes()
    (llama / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    said = complaint(llama)
    assert WEIGHTS in said
    assert "cannot be read" in said


def test_an_unknown_family_names_the_nearest(llama: Path) -> None:
    change_config(llama, architectures=["LLaDAModel"])
    said = complaint(llama)
    assert "unknown model family 'LLaDAModel' (did you mean 'LLaDAModelLM'?)" in said
    assert "LlamaForBlockDiffusion" in said


@pytest.mark.parametrize("architectures", [..., [], None])
def test_a_config_without_a_family_is_refused(llama: Path, architectures: Any) -> None:
    change_config(llama, architectures=architectures)
    assert "unknown model family" in complaint(llama)


@pytest.mark.parametrize("field", ["vocab_size", "mask_token_id", "eos_token_id", "block_length"])
def test_a_missing_field_is_named(llama: Path, field: str) -> None:
    change_config(llama, **{field: ...})
    assert f"lacks the field '{field}'" in complaint(llama)


@pytest.mark.parametrize("mask_id", [checkpoints.VOCABULARY, -1, None, 126336])
def test_a_mask_outside_the_vocabulary_is_refused(llama: Path, mask_id: int | None) -> None:
    change_config(llama, mask_token_id=mask_id)
    assert f"mask_token_id {mask_id} is not in the vocabulary of {checkpoints.VOCABULARY}" in complaint(llama)


def test_llada_without_a_mask_id_has_its_familys_which_must_fit(tmp_path: Path) -> None:
    folder = checkpoints.llada(tmp_path, tokenizer=False)
    change_config(folder, mask_token_id=...)
    assert "mask_token_id 126336 is not in the vocabulary" in complaint(folder)


@pytest.mark.parametrize("stop", [None, -1, [checkpoints.STOP, 9999]])
def test_a_stop_token_outside_the_vocabulary_is_refused(llama: Path, stop: Any) -> None:
    """Answers would never end, and nobody would know why."""
    change_config(llama, eos_token_id=stop)
    assert "eos_token_id" in complaint(llama)


def test_a_mask_that_is_a_stop_token_is_refused(llama: Path) -> None:
    change_config(llama, eos_token_id=[checkpoints.STOP, checkpoints.MASK])
    assert "both mask_token_id and eos_token_id" in complaint(llama)


def test_several_stop_tokens_are_taken(llama: Path) -> None:
    change_config(llama, eos_token_id=[checkpoints.STOP, 10])
    assert load(llama, "cpu", "float32").spec.stop_ids == {checkpoints.STOP, 10}


def test_heads_that_do_not_divide_are_refused(llama: Path) -> None:
    change_config(llama, num_key_value_heads=3)
    assert "4 heads cannot share 3" in complaint(llama)


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_a_scaled_rope_is_refused(llama: Path, field: str) -> None:
    change_config(llama, **{field: {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0}})
    assert "rope type 'yarn' is not supported" in complaint(llama)


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    assert f"no model at {tmp_path}" in complaint(tmp_path)


@pytest.mark.parametrize(("text", "why"), [("{", "is not JSON"), ("[]", "is not a JSON object")])
def test_a_broken_config_is_named(llama: Path, text: str, why: str) -> None:
    (llama / "config.json").write_text(text)
    assert f"config.json {why}" in complaint(llama)


def test_an_unknown_device_is_refused(llama: Path) -> None:
    assert "unknown device 'gpu'" in complaint(llama, device="gpu")


def test_a_device_that_is_not_there_is_refused(llama: Path) -> None:
    assert "device 'cuda:99' is not there" in complaint(llama, device="cuda:99")


@pytest.mark.parametrize("params", [{}, {"rule": "entropy_bound"}, {"temperature": 1.0, "top_p": 0.9, "top_k": 5}])
@pytest.mark.parametrize("write", [checkpoints.llama_block, checkpoints.llada])
def test_weights_that_are_not_numbers_fail_rows_and_not_the_engine(
    tmp_path: Path, write: Write, params: dict[str, Any]
) -> None:
    folder = write(tmp_path, tokenizer=False)
    change_weights(folder, lambda weights: [weight.fill_(torch.nan) for weight in weights.values()])
    finished = run(load(folder, "cpu", "float32"), [request(n, prompt(n, n + 1), **params) for n in range(3)])
    assert {one.error.code for one in finished.values() if one.error} == {"model_error"}
    assert all(one.error for one in finished.values())
