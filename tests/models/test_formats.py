"""The engine answers the same from every format that a model may come in."""

import json
import shutil

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model as mlx_lm_load
from models.gguf_files import QUANTISED, write_gguf
from oracle import Oracle, assert_matches, greedy, varied_prompt
from tiny_models import TinyModel, write_model

from mlx_paged_attention import LLM
from mlx_paged_attention.models.load import load_model
from mlx_paged_attention.models.source import ModelSource

PROMPTS = [varied_prompt(length, seed) for seed, length in enumerate((33, 1, 16))]
# Rows of K-quants are multiples of 256.
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    return write_model(TinyModel({"model_type": "llama", **WIDE}), tmp_path_factory.mktemp("wide"))


def save_like(directory, weights, target):
    """A model directory that holds ``weights`` as plain floats."""
    target.mkdir()
    (target / "config.json").write_text((directory / "config.json").read_text())
    mx.save_safetensors(str(target / "model.safetensors"), weights)
    return target


def assert_answers(path, oracle):
    with LLM(model=str(path), skip_tokenizer_init=True, num_blocks=64) as llm:
        outputs = llm.generate(PROMPTS, greedy(8, ignore_eos=True))
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        assert_matches(output.outputs[0], oracle.greedy(prompt, 8))


@pytest.mark.parametrize("kind", [*QUANTISED, "F16", "BF16"])
def test_a_gguf_answers_as_its_values_in_plain_floats(wide, kind, tmp_path):
    held = write_gguf(wide, tmp_path / "tiny.gguf", quantised=kind)
    assert_answers(tmp_path / "tiny.gguf", Oracle.load(save_like(wide, held, tmp_path / "plain")))


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_packed_gguf_computes_what_its_values_do(wide, kind, tmp_path):
    # The rules for GPUs, carried out by whatever device there is.
    held = write_gguf(wide, tmp_path / "tiny.gguf", quantised=kind)
    source = ModelSource("gguf", tmp_path / "tiny.gguf", "tiny")
    packed = load_model(source, dtype="float32", device="gpu")
    plain = load_model(source, dtype="auto", device="cpu")
    parameters = dict(tree_flatten(plain.model.parameters()))
    assert all(np.array_equal(np.array(parameters[name]), np.array(held[name])) for name in held)
    layer = packed.model.layers[1].mlp.up_proj
    weight = mx.dequantize(layer.weight, layer.scales, layer.biases, layer.group_size, layer.bits)
    expected = held["model.layers.1.mlp.up_proj.weight"]
    anew = kind in ("Q2_K", "Q3_K", "Q6_K")
    tolerance = float(abs(expected).max()) * (0.1 if anew else 1e-6)
    np.testing.assert_allclose(np.array(weight), np.array(expected), atol=tolerance)
    assert packed.quantisation == kind
    if anew:
        assert packed.notes == [
            "weights in groups of 16, which MLX does not have, were quantised anew in groups of 32: "
            f"{kind} to {layer.bits} bits"
        ]
    else:
        tokens = mx.array([PROMPTS[0]])
        assert packed.notes == []
        np.testing.assert_allclose(
            np.array(packed.model(tokens)), np.array(plain.model(tokens)), atol=1e-3
        )  # fmt: skip


def test_several_kinds_in_one_file_are_all_named(wide, tmp_path):
    kinds = {"attn_q": "Q6_K", "ffn_down": "Q2_K", "ffn_up": "F16"}
    write_gguf(wide, tmp_path / "tiny.gguf", quantised="Q5_0", others=kinds)
    source = ModelSource("gguf", tmp_path / "tiny.gguf", "tiny")
    plain = load_model(source, dtype="auto", device="cpu")
    assert plain.notes == ["the Q5_0, Q2_K, Q6_K weights were expanded to float32, which is faster on a CPU"]
    packed = load_model(source, dtype="auto", device="gpu")
    assert packed.notes[0].endswith(": Q2_K to 4 bits, Q6_K to 8 bits")
    bits = [packed.model.layers[0].mlp.down_proj.bits, packed.model.layers[0].self_attn.q_proj.bits]
    assert bits == [4, 8]
    assert "scales" not in packed.model.layers[0].mlp.up_proj


MIXED = {
    "model.layers.0.self_attn.q_proj": {"group_size": 64, "bits": 8},
    "model.layers.1.mlp.down_proj": {"group_size": 32, "bits": 3},
    "model.layers.1.mlp.up_proj": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "model.layers.1.self_attn.o_proj": False,
}
QUANTISATIONS = {
    **{f"affine {bits}-bit": {"group_size": 64, "bits": bits} for bits in (2, 3, 4, 5, 6, 8)},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    "mixed": {"group_size": 32, "bits": 6, **MIXED},
}


def quantise(directory, target, quantisation):
    """Write ``directory`` as mlx-lm's converter quantises it; returns what its tensors stand for."""
    shutil.copytree(directory, target)
    module, config = mlx_lm_load(target)
    top = {key: quantisation[key] for key in ("group_size", "bits", "mode") if key in quantisation}
    nn.quantize(
        module,
        **top,
        class_predicate=lambda name, m: hasattr(m, "to_quantized") and quantisation.get(name, True),
    )
    mx.save_safetensors(str(target / "model.safetensors"), dict(tree_flatten(module.parameters())))
    (target / "config.json").write_text(json.dumps(config | {"quantization": quantisation}))
    held = {}
    for name, layer in module.named_modules():
        for leaf, array in layer.items():
            if not isinstance(array, mx.array) or (leaf in ("scales", "biases") and "scales" in layer):
                continue
            if leaf == "weight" and "scales" in layer:
                array = mx.dequantize(
                    array, layer.scales, layer.get("biases"), layer.group_size, layer.bits, layer.mode
                )
            held[f"{name}.{leaf}"] = array.astype(mx.float32)
    return held


@pytest.mark.parametrize("quantisation", QUANTISATIONS.values(), ids=QUANTISATIONS)
def test_a_quantised_directory_answers_as_its_values_in_plain_floats(wide, quantisation, tmp_path):
    held = quantise(wide, tmp_path / "quantised", quantisation)
    assert_answers(tmp_path / "quantised", Oracle.load(save_like(wide, held, tmp_path / "plain")))


def test_several_quantisations_in_one_model_are_all_named(wide, tmp_path):
    quantise(wide, tmp_path / "quantised", QUANTISATIONS["mixed"])
    source = ModelSource("directory", tmp_path / "quantised", "tiny")
    plain = load_model(source, dtype="auto", device="cpu")
    assert plain.notes == [
        "the 6-bit, 3-bit, 8-bit, mxfp4 weights were expanded to float32, which is faster on a CPU"
    ]
    packed = load_model(source, dtype="auto", device="gpu")
    assert packed.quantisation == "6-bit, 3-bit, 8-bit, mxfp4"
    assert packed.model.layers[1].mlp.up_proj.mode == "mxfp4"
    assert "scales" not in packed.model.layers[1].self_attn.o_proj


def shard(directory, target, shards):
    """Write the model of ``directory`` in several files with an index."""
    target.mkdir()
    (target / "config.json").write_text((directory / "config.json").read_text())
    weights = sorted(mx.load(str(directory / "model.safetensors")).items())
    names = [f"model-{number + 1:05}-of-{shards:05}.safetensors" for number in range(shards)]
    for number, name in enumerate(names):
        mx.save_safetensors(str(target / name), dict(weights[number::shards]))
    weight_map = {tensor: names[number % shards] for number, (tensor, _) in enumerate(weights)}
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return target


def test_a_sharded_directory_answers_as_one_file(wide, tmp_path):
    assert_answers(shard(wide, tmp_path / "shards", 3), Oracle.load(wide))
