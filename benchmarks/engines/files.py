"""The same weights as files that peers can read: a float32 GGUF and a float32 Hugging Face folder."""

from __future__ import annotations

import json
import pathlib

import numpy as np

from jaxpd.checkpoints.source import Checkpoint


def write_float32_gguf(source: pathlib.Path, target: pathlib.Path) -> None:
    """`source` with every tensor dequantised to float32 by the `gguf` package; other metadata as it is."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    made_by_the_writer = ("general.architecture", "general.file_type", "general.quantization_version")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in made_by_the_writer:
            inner = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_hf_folder(checkpoint: Checkpoint, folder: pathlib.Path) -> None:
    """A Llama checkpoint as config.json and float32 safetensors."""
    from safetensors.numpy import save_file

    config = checkpoint.config
    if config.architecture != "llama" or config.rope.kind != "default":
        raise SystemExit(f"{checkpoint.name} is of architecture {config.architecture}; this script takes plain Llama")
    folder.mkdir()
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(described), encoding="utf-8")
    weights = {name: np.array(checkpoint.source.read(name), np.float32) for name in checkpoint.source.names()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
