"""The first law: greedy tokens equal to the reference in float32, on every pair of meshes.

The suite runs one uneven pair of SmolLM2-135M through `jaxpd.LLM`; `make reference` runs all pairs by the command that
people type, and `make gemma` two pairs of Gemma 3 270M. The references come from transformers (tests/data/README.md).
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import jax
import pytest

from jaxpd import LLM, SamplingParams

pytestmark = pytest.mark.heavy  # a model of 135 million parameters

ROOT = pathlib.Path(__file__).parent.parent.parent
REFERENCE = ROOT / "tests" / "data" / "reference"
PAIRS = ("1x1/1x1", "8x1/1x8", "2x1/1x2", "4x1/2x2", "3x1/1x1", "1x2/4x1", "1x8/8x1")


def reference(name: str) -> list[dict[str, Any]]:
    return json.loads((REFERENCE / f"{name}.json").read_text())["prompts"]


def excused(prompt: dict[str, Any], got: list[int]) -> bool:
    """A difference that starts where the reference's two best logits are closer than 1e-3."""
    step = next(i for i, (a, b) in enumerate(zip(got, prompt["greedy_ids"], strict=True)) if a != b)
    return prompt["top1_minus_top2"][step] < 1e-3


def test_smollm2_on_uneven_meshes() -> None:
    limits: dict[str, Any] = {
        "max_model_len": 1024,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 4,
        "precompile": False,
    }
    prompts = reference("smollm2-135m")
    with LLM("smollm2-135m", prefill_mesh="4x1", decode_mesh="1x2", **limits) as llm:
        answers = llm.generate([p["prompt_ids"] for p in prompts], SamplingParams(max_tokens=32, ignore_eos=True))
        text = llm.generate(prompts[0]["text"], SamplingParams(max_tokens=32, ignore_eos=True))[0]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert list(answer.token_ids) == prompt["greedy_ids"], prompt["label"]
    assert list(text.prompt_ids) == prompts[0]["prompt_ids"]
    assert llm.tokenizer.decode(text.token_ids, skip_special_tokens=False) == prompts[0]["greedy_text"]
    assert text.text == prompts[0]["greedy_text"].replace("<|im_start|>", "").replace("<|im_end|>", "")


def generate(model: str, pair: str) -> list[dict[str, Any]]:
    """What `jaxpd generate` prints for the reference's prompts."""
    prefill, decode = pair.split("/")
    command = [sys.executable, "-m", "jaxpd", "generate", model, "--prefill-mesh", prefill, "--decode-mesh", decode]
    command += ["--prompt-file", str(REFERENCE / f"{model}.json"), "--max-tokens", "32", "--ignore-eos", "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("pair", PAIRS)
def test_smollm2_by_command(pair: str) -> None:
    prompts = reference("smollm2-135m")
    for prompt, answer in zip(prompts, generate("smollm2-135m", pair), strict=True):
        assert answer["token_ids"] == prompt["greedy_ids"], f"{pair} {prompt['label']}"


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize(
    ("kernels", "dtype"), [("pallas_tpu_interpret", "float32"), ("pallas_gpu_interpret", "bfloat16")]
)
def test_smollm2_with_interpreted_kernels(kernels: str, dtype: str) -> None:
    """The kernels for accelerators do the main job's work, on CPU under simulated memory: a short prompt, some tokens.

    Those for GPUs multiply in bfloat16 only; the reference's first tokens are far enough from the second best for it.
    """
    if "gpu" in kernels and jax.__version_info__ < (0, 12):
        pytest.skip("Mosaic GPU is interpreted since jax 0.12")
    prompt, tokens = reference("smollm2-135m")[0], 5
    limits: dict[str, Any] = {"max_model_len": 32, "max_num_batched_tokens": 16, "max_num_seqs": 1}
    with LLM("smollm2-135m", prefill_mesh="1x1", decode_mesh="1x1", kernels=kernels, dtype=dtype, **limits) as llm:
        answer = llm.generate([prompt["prompt_ids"]], SamplingParams(max_tokens=tokens, ignore_eos=True))[0]
    assert list(answer.token_ids) == prompt["greedy_ids"][:tokens]


@pytest.mark.gemma
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("pair", ["1x1/1x1", "4x1/2x2"])
def test_gemma_by_command(pair: str) -> None:
    prompts = reference("gemma3-270m")
    for prompt, answer in zip(prompts, generate("gemma3-270m", pair), strict=True):
        same = answer["token_ids"] == prompt["greedy_ids"]
        assert same or excused(prompt, answer["token_ids"]), f"{pair} {prompt['label']}"
