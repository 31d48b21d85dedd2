"""Makes tests/data/tiny/: one tiny random checkpoint per architecture, with what transformers computes from it.

Run it with torch and transformers installed (the tests themselves need neither):

    python tests/data/make_tiny.py              # write all folders with the seeds of SPECS
    python tests/data/make_tiny.py --only qwen3 --search 40    # print how good seeds 0..39 are, write nothing

Expected values are computed in float32 with eager attention from the files just written, read back by
`from_pretrained`; so they describe the stored values (bfloat16 ones too) and transformers' own reading of config.json.
A seed is good when every greedy step has a clear winner (MIN_GAP) and the continuations are not one token repeated.
"""

# torch and transformers are no dependencies, so the type checker does not find them either.
# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask
from transformers.models.gemma3.modeling_gemma3 import eager_attention_forward

OUT = Path(__file__).parent / "tiny"
LENGTHS = (1, 5, 17, 40, 100)
ALL_POSITIONS_UP_TO = 17  # longer prompts keep the last position's logits only, to stay small
NEW_TOKENS = 24
MIN_GAP = 1.5e-2
BOS, EOS, IM_START, IM_END = 280, 281, 282, 283

COMMON = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": None, "max_position_embeddings": 256}
# Odd vocabulary and FFN sizes on purpose: no mesh axis divides them, so padding is exercised.
SPECS: dict[str, dict[str, Any]] = {
    "llama2": {
        "covers": "LlamaForCausalLM, multi-head attention, untied embeddings, head size 80, two shards with an index",
        "class": "Llama",
        "seed": 38,
        "shard": "150KB",
        "config": dict(
            vocab_size=291, hidden_size=24, intermediate_size=42, num_hidden_layers=2, num_attention_heads=3,
            num_key_value_heads=3, head_dim=80, rms_norm_eps=1e-5, tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ),
    },
    "llama3": {
        "covers": "LlamaForCausalLM, grouped queries, llama3 RoPE scaling from position 32, head size 64, "
        "config.json in the style of transformers 4, two EOS ids",
        "class": "Llama",
        "seed": 39,
        "legacy": True,
        "config": dict(
            vocab_size=293, hidden_size=28, intermediate_size=45, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=64, rms_norm_eps=1e-5, tie_word_embeddings=False,
            eos_token_id=[EOS, IM_END],
            rope_parameters={
                "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
            },
        ),
    },
    "llama-bias": {
        "covers": "LlamaForCausalLM with attention_bias and mlp_bias, head size 64, config.json without head_dim",
        "class": "Llama",
        "seed": 29,
        "drop": ["head_dim"],
        "config": dict(
            vocab_size=290, hidden_size=64, intermediate_size=30, num_hidden_layers=2, num_attention_heads=1,
            num_key_value_heads=1, head_dim=64, rms_norm_eps=1e-5, tie_word_embeddings=True, attention_bias=True,
            mlp_bias=True, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ),
    },
    "smollm2": {
        "covers": "LlamaForCausalLM, 9 query and 3 KV heads, tied embeddings, head size 64, stored in bfloat16, "
        "chat template",
        "class": "Llama",
        "seed": 29,
        "dtype": "bfloat16",
        "chat": True,
        "bos": False,
        "config": dict(
            vocab_size=291, hidden_size=36, intermediate_size=50, num_hidden_layers=2, num_attention_heads=9,
            num_key_value_heads=3, head_dim=64, rms_norm_eps=1e-5, tie_word_embeddings=True, eos_token_id=IM_END,
            rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        ),
    },
    "mistral": {
        "covers": "MistralForCausalLM, window of 24 in every layer, head size 128",
        "class": "Mistral",
        "seed": 42,
        "config": dict(
            vocab_size=289, hidden_size=24, intermediate_size=44, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=128, rms_norm_eps=1e-5, tie_word_embeddings=False, sliding_window=24,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ),
    },
    "qwen2": {
        "covers": "Qwen2ForCausalLM, QKV bias, tied embeddings, head size 96",
        "class": "Qwen2",
        "seed": 14,
        "bos": False,
        "config": dict(
            vocab_size=295, hidden_size=24, intermediate_size=46, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=96, rms_norm_eps=1e-6, tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        ),
    },
    "qwen3": {
        "covers": "Qwen3ForCausalLM, QK norm, tied embeddings, head size 128 with hidden size 16, chat template",
        "class": "Qwen3",
        "seed": 30,
        "chat": True,
        "bos": False,
        "config": dict(
            vocab_size=291, hidden_size=16, intermediate_size=38, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=128, rms_norm_eps=1e-6, tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        ),
    },
    "gemma3": {
        "covers": "Gemma3ForCausalLM, window of 16 with two local layers to one global, two RoPE bases, QK norm, 1+w "
        "norms, scaled embeddings, head size 256, stored in bfloat16, config.json in the style of transformers 4",
        "class": "Gemma3",
        "seed": 7,
        "dtype": "bfloat16",
        "legacy": True,
        "config": dict(
            vocab_size=291, hidden_size=24, intermediate_size=44, num_hidden_layers=3, num_attention_heads=2,
            num_key_value_heads=1, head_dim=256, rms_norm_eps=1e-6, tie_word_embeddings=True, sliding_window=16,
            query_pre_attn_scalar=256, layer_types=["sliding_attention"] * 2 + ["full_attention"],
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            },
        ),
    },
    "gemma3-softcap": {
        "covers": "Gemma3ForCausalLM, five local layers to one global, window of 24, attention and final soft caps, "
        "linear RoPE scaling of the global layer, query_pre_attn_scalar other than the head size, head size 64",
        "class": "Gemma3",
        "seed": 75,
        "config": dict(
            vocab_size=289, hidden_size=16, intermediate_size=36, num_hidden_layers=6, num_attention_heads=2,
            num_key_value_heads=1, head_dim=64, rms_norm_eps=1e-6, tie_word_embeddings=True, sliding_window=24,
            query_pre_attn_scalar=24, layer_types=["sliding_attention"] * 5 + ["full_attention"],
            attn_logit_softcapping=2.0, final_logit_softcapping=8.0,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
            },
        ),
    },
}  # fmt: skip

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = ["the thing that is there", "naïve café: 漢字 🙂", "  two  spaces\n\nand 12345"]
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there"}]


def softcap_attention(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Gemma 3's own eager attention, with the cap that its attention module reads from the config but (in transformers
    5.24) does not hand over."""
    return eager_attention_forward(module, *args, softcap=module.attn_logit_softcapping, **kwargs)


def make_config(spec: dict[str, Any]) -> Any:
    cls = getattr(transformers, spec["class"] + ("TextConfig" if spec["class"] == "Gemma3" else "Config"))
    return cls(**{**COMMON, **spec["config"]})


def random_model(spec: dict[str, Any], seed: int) -> torch.nn.Module:
    """A model whose layers, norms and biases all matter: nothing is left at one or zero."""
    model = getattr(transformers, spec["class"] + "ForCausalLM")(make_config(spec)).eval()
    stored = getattr(torch, spec.get("dtype", "float32"))
    rng = np.random.default_rng(seed)
    gemma = spec["class"] == "Gemma3"
    hidden = spec["config"]["hidden_size"]
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if name == "model.norm.weight":  # sets the size of the logits
            value = rng.uniform(3.5, 6.5, shape) - 1 if gemma else rng.uniform(1.0, 2.0, shape)
        elif gemma and ("post_attention" in name or "post_feedforward" in name):  # else a token predicts itself
            value = rng.uniform(1.5, 3.5, shape) - 1
        elif "norm" in name:
            value = rng.uniform(0.6, 1.6, shape) - gemma
        elif name.endswith("bias"):
            value = rng.normal(0, 0.5, shape)
        elif name.endswith("embed_tokens.weight"):
            value = rng.normal(0, 0.5 if not gemma else 0.5 / hidden**0.5, shape)
        elif name == "lm_head.weight":
            value = rng.normal(0, 2.0 / hidden**0.5, shape)
        elif "q_proj" in name or "k_proj" in name:  # small enough that attention spreads and rounding is not amplified
            value = rng.normal(0, 0.9 / shape[1] ** 0.5, shape)
        else:
            value = rng.normal(0, 1.4 / shape[1] ** 0.5, shape)
        parameter.data = torch.tensor(value, dtype=torch.float32).to(stored).float()  # buffers stay float32
    return model


def prompts_of(spec: dict[str, Any]) -> dict[str, list[int]]:
    rng = np.random.default_rng(7)
    return {f"len{n}": rng.integers(0, spec["config"]["vocab_size"], n).tolist() for n in LENGTHS}


@torch.no_grad()
def greedy(model: Any, prompt: list[int]) -> tuple[np.ndarray, np.ndarray, list[int], list[float]]:
    """(logits of the prompt [P, V], logits that chose the last token [V], greedy ids, gaps), without a KV cache."""
    ids, chosen, gaps = list(prompt), [], []
    first = last = np.zeros(0)
    for step in range(NEW_TOKENS):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
        top = logits[-1].topk(2)
        chosen.append(int(top.indices[0]))
        gaps.append(float(top.values[0] - top.values[1]))
        ids.append(chosen[-1])
        first = logits.numpy() if step == 0 else first
        last = logits[-1].numpy()
    return first, last, chosen, gaps


def attention_of(spec: dict[str, Any]) -> str:
    return "eager_softcap" if spec["config"].get("attn_logit_softcapping") else "eager"


def search(name: str, seeds: int) -> None:
    """Prints the smallest gap and the fewest distinct tokens of each seed that passes MIN_GAP."""
    spec = SPECS[name]
    for seed in range(seeds):
        model = random_model(spec, seed)
        model.set_attn_implementation(attention_of(spec))  # type: ignore[operator]
        gaps: list[float] = []
        distinct: list[int] = []
        for prompt in prompts_of(spec).values():
            _, _, ids, gap = greedy(model, prompt)
            gaps += gap
            distinct.append(len(set(ids)))
            if min(gaps) < MIN_GAP:
                break
        else:
            print(f"{name} seed {seed}: smallest gap {min(gaps):.3f}, distinct tokens {distinct}", flush=True)


def make_tokenizer(bos: bool) -> Tokenizer:
    """Byte-level BPE: ids 0..255 are the bytes, then 24 merges (to 279), then BOS, EOS, <|im_start|>, <|im_end|>."""
    letters = bytes_to_letters()
    merges = ["t h", "i n", "e r", "a n", "r e", "o n", "Ġ t", "Ġ a", "Ġt h", "th e", "Ġth e", "in g", "l l", "o u",
              "e n", "Ġ s", "h e", "a t", "i s", "Ġ w", "o r", "he ll", "hell o", "Ġt o"]  # fmt: skip
    vocab = {letter: i for i, letter in enumerate(letters)}
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        left, right = merge.split()
        pairs.append((left, right))
        vocab[left + right] = len(vocab)
    assert len(vocab) == BOS
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<s>", "</s>", "<|im_start|>", "<|im_end|>")]
    )
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]
        )
    return tokenizer


def bytes_to_letters() -> list[str]:
    """The printable letter that byte-level BPE (GPT-2's) writes for each byte: itself where printable, else 256 + n."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(hidden)) for b in range(256)]


def legacy_config(config: dict[str, Any]) -> dict[str, Any]:
    """The same config.json as transformers 4 would have written it."""
    config = dict(config)
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:
        config["rope_theta"] = rope["full_attention"]["rope_theta"]
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        config["rope_scaling"] = None
        config["sliding_window_pattern"] = config.pop("layer_types").index("full_attention") + 1
        config.pop("_sliding_window_pattern", None)
    else:
        config["rope_theta"] = rope["rope_theta"]
        config["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    config["torch_dtype"] = config.pop("dtype")
    return config


def write_folder(name: str) -> dict[str, Any]:
    spec = SPECS[name]
    folder = OUT / name
    shutil.rmtree(folder, ignore_errors=True)
    model = random_model(spec, spec["seed"]).to(getattr(torch, spec.get("dtype", "float32")))
    model.save_pretrained(folder, max_shard_size=spec.get("shard", "1GB"))  # type: ignore[operator]
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)
    config = json.loads((folder / "config.json").read_text())
    config = legacy_config(config) if spec.get("legacy") else config
    config = {key: value for key, value in config.items() if key not in spec.get("drop", ())}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    text = write_tokenizer(folder, spec)

    loaded = getattr(transformers, spec["class"] + "ForCausalLM").from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention_of(spec)
    )
    loaded.generation_config.eos_token_id = None
    logits, prompts = {}, []
    for key, prompt in prompts_of(spec).items():
        first, last, ids, gaps = greedy(loaded.eval(), prompt)
        cached = loaded.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, use_cache=True)
        assert cached[0, len(prompt) :].tolist() == ids, f"{name} {key}: cached and uncached ids differ"
        assert min(gaps) > MIN_GAP, f"{name} {key}: smallest gap {min(gaps)}; run --search for another seed"
        every = len(prompt) <= ALL_POSITIONS_UP_TO
        logits[key] = first if every else first[-1:]
        logits[key + ".final"] = last
        prompts.append(
            {
                "name": key, "prompt_ids": prompt, "logits": "all" if every else "last", "greedy_ids": ids,
                "top1_minus_top2": [round(g, 5) for g in gaps],
            }
        )  # fmt: skip
    np.savez_compressed(folder / "expected.npz", **logits)  # type: ignore[arg-type]
    (folder / "expected.json").write_text(dump({"prompts": prompts, **text}))
    return {
        "covers": spec["covers"],
        "seed": spec["seed"],
        "stored_dtype": spec.get("dtype", "float32"),
        "config": spec["config"],
        "smallest_gap": round(min(g for p in prompts for g in p["top1_minus_top2"]), 4),
        "bytes": sum(f.stat().st_size for f in folder.iterdir()),
    }


def write_tokenizer(folder: Path, spec: dict[str, Any]) -> dict[str, Any]:
    """Writes the tokenizer files; returns what transformers makes of TEXTS and CHAT with them."""
    tokenizer = make_tokenizer(spec.get("bos", True))
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    if spec.get("chat"):
        config |= {"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    fast = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    out: dict[str, Any] = {"texts": [{"text": t, "ids": fast.encode(t)} for t in TEXTS]}
    for item in out["texts"]:
        assert fast.decode(item["ids"], skip_special_tokens=True) == item["text"]
    if spec.get("chat"):
        ids = fast.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=True, return_dict=False)
        out["chat"] = {"messages": CHAT, "ids": list(ids)}
    return out


def dump(value: dict[str, Any]) -> str:
    """JSON with one short line per innermost list, so that a diff can be read."""
    lines = []
    for key, items in value.items():
        items = items if isinstance(items, list) else [items]
        body = ",\n".join("    " + json.dumps(item, ensure_ascii=False) for item in items)
        lines.append(f'  "{key}": [\n{body}\n  ]')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=sorted(SPECS), help="these folders instead of all")
    parser.add_argument("--search", type=int, metavar="SEEDS", help="try seeds and print the good ones; write nothing")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    AttentionInterface.register("eager_softcap", softcap_attention)
    AttentionMaskInterface.register("eager_softcap", eager_mask)
    names = args.only or list(SPECS)
    if args.search:
        for name in names:
            search(name, args.search)
        return
    index_path = OUT / "index.json"
    index = json.loads(index_path.read_text()) if index_path.exists() else {"folders": {}}
    index["made_with"] = {
        "torch": torch.__version__, "transformers": transformers.__version__, "tokenizers": tokenizers.__version__,
        "dtype": "float32", "attention": "eager",
    }  # fmt: skip
    for name in names:
        index["folders"][name] = write_folder(name)
        print(name, index["folders"][name]["smallest_gap"], index["folders"][name]["bytes"], flush=True)
    index["folders"] = {name: index["folders"][name] for name in SPECS if name in index["folders"]}
    index_path.write_text(json.dumps(index, indent=2) + "\n")


if __name__ == "__main__":
    main()
