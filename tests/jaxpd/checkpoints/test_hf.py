"""Hugging Face folders: what is read, and every way in which one can be broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpd.checkpoints import open_path
from jaxpd.errors import InvalidArgument, JaxpdError, NotFound

MISSING = "model.layers.1.mlp.up_proj.weight"


def test_reads_config_weights_and_tokenizer(tiny: Any, tmp_path: Path) -> None:
    config = tiny.config(tie_word_embeddings=False)
    weights = tiny.weights(config)
    checkpoint = open_path(tiny.write_hf(tmp_path / "model", config, weights))
    assert checkpoint.name == "model"
    assert (checkpoint.config.num_heads, checkpoint.config.eos_token_ids) == (4, (257,))
    assert set(checkpoint.source.names()) == set(weights)
    for name, values in weights.items():
        assert checkpoint.source.shape(name) == values.shape
        np.testing.assert_array_equal(checkpoint.source.read(name), values)
    assert checkpoint.tokenizer() is checkpoint.tokenizer()
    assert checkpoint.tokenizer().encode("aé") == [97, 195, 169]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_weights_are_views_of_the_file_in_their_stored_type(tiny: Any, tmp_path: Path, dtype: Any) -> None:
    weights = {name: values.astype(dtype) for name, values in tiny.weights(tiny.config()).items()}
    source = open_path(tiny.write_hf(tmp_path, tiny.config(), weights)).source
    for name, values in weights.items():
        read = source.read(name)
        assert read.dtype == values.dtype
        assert not read.flags.owndata and not read.flags.writeable
        np.testing.assert_array_equal(read, values)


def sharded(tiny: Any, folder: Path) -> dict[str, np.ndarray]:
    weights = tiny.weights(tiny.config())
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tiny.config()))
    for file, part in parts.items():
        save_file({name: weights[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return weights


def test_reads_several_files_by_their_index(tiny: Any, tmp_path: Path) -> None:
    weights = sharded(tiny, tmp_path)
    source = open_path(tmp_path).source
    for name, values in weights.items():
        np.testing.assert_array_equal(source.read(name), values)


def test_a_missing_part_is_named(tiny: Any, tmp_path: Path) -> None:
    sharded(tiny, tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(NotFound, match="model-00002-of-00002.safetensors is missing"):
        open_path(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(NotFound, match="index.json"):
        open_path(tmp_path)


def test_an_index_that_does_not_fit_its_files(tiny: Any, tmp_path: Path) -> None:
    sharded(tiny, tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    text = index.read_text()
    first = json.loads(text)["weight_map"]
    first["model.nowhere"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps({"weight_map": first}))
    with pytest.raises(InvalidArgument, match=r"lacks model\.nowhere"):
        open_path(tmp_path)
    index.write_text(text.replace("model-00001-of", "../model-00001-of"))
    with pytest.raises(InvalidArgument, match="outside its folder"):
        open_path(tmp_path)


def test_end_tokens_of_the_generation_config_win(tiny: Any, tmp_path: Path) -> None:
    tiny.write_hf(tmp_path, tiny.config(), tiny.weights(tiny.config()))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 258]}))
    checkpoint = open_path(tmp_path)
    assert checkpoint.config.eos_token_ids == (257, 258)
    assert checkpoint.tokenizer().eos_token_ids == (257, 258)


def test_a_file_cut_anywhere_is_refused(tiny: Any, tmp_path: Path) -> None:
    path = tiny.write_hf(tmp_path, tiny.config(), tiny.weights(tiny.config())) / "model.safetensors"
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for length in (0, 4, 8, header // 2, header, header + 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(InvalidArgument, match=r"model\.safetensors is corrupt or truncated"):
            open_path(tmp_path)


@pytest.mark.parametrize(
    "header",
    [b"not json", b"[]", b'{"a": 1}', b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}'],
)
def test_a_header_that_makes_no_sense_is_refused(tiny: Any, tmp_path: Path, header: bytes) -> None:
    path = tiny.write_hf(tmp_path, tiny.config(), tiny.weights(tiny.config())) / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    with pytest.raises(InvalidArgument, match="corrupt or truncated"):
        open_path(tmp_path)


def test_missing_weights_are_named(tiny: Any, tmp_path: Path) -> None:
    weights = tiny.weights(tiny.config())
    del weights[MISSING]
    with pytest.raises(InvalidArgument, match=f"lacks {MISSING}"):
        open_path(tiny.write_hf(tmp_path, tiny.config(), weights))


def test_wrong_shapes_are_named_with_both_values(tiny: Any, tmp_path: Path) -> None:
    weights = tiny.weights(tiny.config())
    weights[MISSING] = weights[MISSING].T.copy()
    with pytest.raises(InvalidArgument, match=r"up_proj\.weight has shape \(32, 64\), and the config says \(64, 32\)"):
        open_path(tiny.write_hf(tmp_path, tiny.config(), weights))


def test_weights_that_would_be_ignored_are_refused(tiny: Any, tmp_path: Path) -> None:
    weights = tiny.weights(tiny.config())
    derived = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    open_path(tiny.write_hf(tmp_path / "a", tiny.config(), weights | derived | {"lm_head.weight": np.ones(1)}))
    extra = {"model.layers.0.self_attn.q_proj.bias": np.ones(32, np.float32)}
    with pytest.raises(InvalidArgument, match=r"holds model\.layers\.0\.self_attn\.q_proj\.bias"):
        open_path(tiny.write_hf(tmp_path / "b", tiny.config(), weights | extra))


def test_a_weight_of_another_type_is_named_when_read(tiny: Any, tmp_path: Path) -> None:
    weights = tiny.weights(tiny.config())
    weights[MISSING] = weights[MISSING].astype(np.int8)
    checkpoint = open_path(tiny.write_hf(tmp_path, tiny.config(), weights))
    with pytest.raises(InvalidArgument, match="type I8"):
        checkpoint.source.read(MISSING)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "unsupported architecture: GPT2LMHeadModel"),
        ({"quantization_config": {"quant_method": "gptq"}}, "unsupported quantization_config 'gptq'"),
        ({"hidden_size": "wide"}, "wide"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
    ],
)
def test_configs_that_are_refused(tiny: Any, tmp_path: Path, config: dict[str, Any], message: str) -> None:
    folder = tiny.write_hf(tmp_path, tiny.config(), tiny.weights(tiny.config()))
    (folder / "config.json").write_text(json.dumps(tiny.config() | config))
    with pytest.raises(InvalidArgument, match=message):
        open_path(folder)


def test_a_config_that_lacks_a_field_or_is_no_json(tiny: Any, tmp_path: Path) -> None:
    folder = tiny.write_hf(tmp_path / "hf", tiny.config(), tiny.weights(tiny.config()))
    config = tiny.config()
    del config["rms_norm_eps"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidArgument, match=r"hf: config\.json has no field 'rms_norm_eps'"):
        open_path(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(InvalidArgument, match="corrupt"):
        open_path(folder)


def test_folders_without_weights_or_tokenizer(tiny: Any, tmp_path: Path) -> None:
    folder = tiny.write_hf(tmp_path, tiny.config(), tiny.weights(tiny.config()), tokenizer=False)
    with pytest.raises(NotFound, match=r"tokenizer\.json"):
        open_path(folder).tokenizer()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(NotFound, match=r"convert its \.bin files"):
        open_path(folder)


def test_a_corrupt_tokenizer_is_a_clear_error(tiny: Any, tmp_path: Path) -> None:
    folder = tiny.write_hf(tmp_path, tiny.config(), tiny.weights(tiny.config()))
    (folder / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(JaxpdError, match=r"tokenizer\.json is not a tokenizer"):
        open_path(folder).tokenizer()
