import json
import shutil
import types

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model as mlx_lm_load
from models.gguf_files import write_gguf

import mlx_paged_attention.models.load as load_module
from mlx_paged_attention.errors import ModelLoadError, UnsupportedModelError
from mlx_paged_attention.models import weight_memory
from mlx_paged_attention.models.gguf_header import read_gguf_header
from mlx_paged_attention.models.load import load_model
from mlx_paged_attention.models.source import ModelSource, resolve

TOKENS = mx.array([[3, 141, 59, 26, 5, 35]])


@pytest.fixture
def model(tiny_model, tmp_path):
    """A copy of a tiny model's directory, to be changed."""
    return shutil.copytree(tiny_model("llama"), tmp_path / "tiny")


def edit_json(path, **changes):
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | changes))


def rewrite(directory, change):
    """Save the weights of ``directory`` anew, after ``change`` to their dictionary."""
    weights = mx.load(str(directory / "model.safetensors"))
    mx.eval(weights)
    weights = change(weights)
    mx.save_safetensors(str(directory / "model.safetensors"), weights)


def quantise(directory, mode="affine", group_size=32, bits=4):
    """Quantise the model in ``directory`` as mlx-lm's converter does."""
    module, _ = mlx_lm_load(directory)
    nn.quantize(module, group_size=group_size, bits=bits, mode=mode)
    mx.save_safetensors(str(directory / "model.safetensors"), dict(tree_flatten(module.parameters())))
    edit_json(directory / "config.json", quantization={"group_size": group_size, "bits": bits, "mode": mode})
    return module


def load(directory, dtype="auto", device="cpu"):
    return load_model(ModelSource("directory", directory, "tiny"), dtype=dtype, device=device)


def dtypes(loaded):
    return {str(p.dtype).removeprefix("mlx.core.") for _, p in tree_flatten(loaded.model.parameters())}


def halved(weights):
    return {name: array.astype(mx.bfloat16) for name, array in weights.items()}


def test_a_directory_is_loaded_with_what_the_engine_asks_about_it(model):
    loaded = load(model)
    reference, config = mlx_lm_load(model)
    np.testing.assert_array_equal(np.array(loaded.model(TOKENS)), np.array(reference(TOKENS)))
    assert loaded.config == config
    assert (loaded.dtype, loaded.quantisation, loaded.notes) == ("float32", None, [])
    assert (loaded.vocab_size, loaded.max_model_len) == (256, 8192)
    assert loaded.eos_token_ids == []
    assert len(bytes.fromhex(loaded.fingerprint)) == 32


def test_eos_ids_come_from_both_files_each_once(model):
    edit_json(model / "config.json", eos_token_id=7)
    edit_json(model / "generation_config.json", eos_token_id=[9, 7], temperature=0.6)
    loaded = load(model)
    assert loaded.eos_token_ids == [7, 9]


def test_eos_id_zero_counts(model):
    edit_json(model / "config.json", eos_token_id=0)
    assert load(model).eos_token_ids == [0]


def test_a_missing_context_length_is_assumed_and_said(model):
    edit_json(model / "config.json", max_position_embeddings=None)
    loaded = load(model)
    assert loaded.max_model_len == 4096
    assert "4096 tokens are assumed" in loaded.notes[0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_refused_on_a_cpu_with_the_reason(model, dtype):
    with pytest.raises(UnsupportedModelError, match=rf"{dtype} is not run on a CPU.*slower than float32"):
        load(model, dtype=dtype)


def test_on_a_cpu_half_precision_weights_become_float32(model):
    rewrite(model, halved)
    loaded = load(model)
    assert dtypes(loaded) == {"float32"}
    assert loaded.dtype == "float32"


@pytest.mark.parametrize(
    ("mode", "group_size", "bits"),
    [("affine", 32, bits) for bits in (2, 3, 4, 5, 6)]
    + [("affine", 64, 8), ("mxfp4", 32, 4), ("nvfp4", 16, 4), ("mxfp8", 32, 8)],
)
def test_on_a_cpu_quantised_layers_are_expanded_exactly(model, mode, group_size, bits):
    rewrite(model, halved)
    packed = quantise(model, mode, group_size, bits)
    loaded = load(model)
    assert dtypes(loaded) == {"float32"}
    assert loaded.quantisation is None
    name = f"{bits}-bit" if mode == "affine" else mode
    assert loaded.notes == [f"the {name} weights were expanded to float32, which is faster on a CPU"]
    layer = packed.model.layers[1].mlp.up_proj
    if mode == "affine":  # from float32 scales: bfloat16 ones would round every weight
        scales, biases = layer.scales.astype(mx.float32), layer.biases.astype(mx.float32)
    else:
        scales, biases = layer.scales, None
    expected = mx.dequantize(layer.weight, scales, biases, group_size=group_size, bits=bits, mode=mode)
    got = loaded.model.model.layers[1].mlp.up_proj.weight
    np.testing.assert_array_equal(np.array(got), np.array(expected.astype(mx.float32)))


def test_on_a_gpu_the_checkpoint_keeps_its_types(model):
    # The rules for GPUs, carried out by whatever device there is.
    rewrite(model, halved)
    quantise(model)
    loaded = load(model, device="gpu")
    assert dtypes(loaded) == {"bfloat16", "uint32"}
    assert (loaded.dtype, loaded.quantisation, loaded.notes) == ("bfloat16", "4-bit", [])


def test_on_a_gpu_a_dtype_casts_floats_and_leaves_packed_weights(model):
    rewrite(model, halved)
    quantise(model)
    loaded = load(model, device="gpu", dtype="float16")
    assert dtypes(loaded) == {"float16", "uint32"}
    assert loaded.dtype == "float16"


def test_a_dtype_and_other_weights_change_the_fingerprint(tiny_model):
    one, other = tiny_model("llama"), tiny_model("llama_other_weights")
    prints = {load(one).fingerprint, load(other).fingerprint, load(one, "float16", "gpu").fingerprint}
    assert len(prints) == 3


def test_an_unknown_architecture_is_refused(model):
    edit_json(model / "config.json", model_type="perceptron")
    with pytest.raises(UnsupportedModelError, match="does not know model type 'perceptron'"):
        load(model)


def drop(name):
    return lambda weights: {key: array for key, array in weights.items() if key != name}


def cut(name):
    return lambda weights: {key: array[:-1] if key == name else array for key, array in weights.items()}


def add(name):
    return lambda weights: weights | {name: mx.zeros((3,))}


@pytest.mark.parametrize("change", [drop, cut, add])
def test_weights_that_do_not_fit_are_named_in_one_line(model, change):
    name = "model.layers.1.mlp.up_proj.weight" if change is not add else "model.layers.9.extra"
    rewrite(model, change(name))
    with pytest.raises(ModelLoadError) as caught:
        load(model)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_configuration_value_is_told(model):
    config = json.loads((model / "config.json").read_text())
    del config["hidden_size"]
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="hidden_size"):
        load(model)


def give_memory(monkeypatch, nbytes):
    memory = types.SimpleNamespace(available=nbytes)
    monkeypatch.setattr(weight_memory.psutil, "virtual_memory", lambda: memory)


@pytest.mark.parametrize("bits", [3, 4, 6])
def test_memory_is_counted_for_the_expanded_weights(model, bits, monkeypatch):
    quantise(model, bits=bits)
    module, _ = mlx_lm_load(model)
    plain = load(model)
    exact = sum(array.nbytes for _, array in tree_flatten(plain.model.parameters()))
    assert weight_memory.float32_bytes(module) == exact
    give_memory(monkeypatch, exact)
    load(model)
    assert dtypes(load(model)) == {"float32"}


def test_quantised_layers_that_do_not_fit_expanded_stay_packed_with_float32_arithmetic(model, monkeypatch):
    rewrite(model, halved)
    quantise(model)
    plain = load(model)
    packed_module, _ = mlx_lm_load(model)
    packed = weight_memory.packed_bytes(packed_module)
    give_memory(monkeypatch, weight_memory.float32_bytes(packed_module) - 1)
    loaded = load(model)
    assert dtypes(loaded) == {"float32", "uint32"}
    assert loaded.quantisation == "4-bit"
    assert loaded.dtype == "float32"
    assert loaded.notes[0].startswith("the 4-bit weights stay packed, with float32 arithmetic")
    np.testing.assert_allclose(np.array(loaded.model(TOKENS)), np.array(plain.model(TOKENS)), atol=1e-4)
    give_memory(monkeypatch, packed - 1)
    with pytest.raises(ModelLoadError, match=r"needs 0\.0 GB of memory for its weights, 0\.0 GB are free"):
        load(model)


def test_formats_that_mlx_does_not_run_in_float32_must_fit_expanded(model, monkeypatch):
    quantise(model, "mxfp4", 32, 4)
    module, _ = mlx_lm_load(model)
    give_memory(monkeypatch, weight_memory.float32_bytes(module) - 1)
    with pytest.raises(ModelLoadError, match="GB are free"):
        load(model)


def test_a_gguf_that_does_not_fit_expanded_stays_packed(model, tmp_path, monkeypatch):
    path = tmp_path / "tiny.gguf"
    write_gguf(model, path, quantised="Q4_1")
    source = ModelSource("gguf", path, "tiny")
    plain = load_model(source, dtype="auto", device="cpu")
    exact = sum(array.nbytes for _, array in tree_flatten(plain.model.parameters()))
    give_memory(monkeypatch, exact)
    assert dtypes(load_model(source, dtype="auto", device="cpu")) == {"float32"}
    give_memory(monkeypatch, exact - 1)
    loaded = load_model(source, dtype="auto", device="cpu")
    assert dtypes(loaded) == {"float32", "uint32"}
    assert loaded.notes[0].startswith("the Q4_1 weights stay packed, with float32 arithmetic")
    np.testing.assert_allclose(np.array(loaded.model(TOKENS)), np.array(plain.model(TOKENS)), atol=1e-4)
    packed = sum(array.nbytes for _, array in tree_flatten(loaded.model.parameters()))
    give_memory(monkeypatch, packed)
    load_model(source, dtype="auto", device="cpu")
    give_memory(monkeypatch, packed - 1)
    with pytest.raises(ModelLoadError, match="of memory for its weights"):
        load_model(source, dtype="auto", device="cpu")


def test_too_little_memory_is_told_before_a_gguf_is_read(model, tmp_path, monkeypatch):
    write_gguf(model, tmp_path / "tiny.gguf", quantised="Q4_1")
    give_memory(monkeypatch, 1000)
    monkeypatch.setattr(load_module, "weights_from_gguf", None)
    with pytest.raises(ModelLoadError, match="GB are free"):
        load_model(ModelSource("gguf", tmp_path / "tiny.gguf", "tiny"), dtype="auto", device="cpu")


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "qwen3_moe"])
def test_quantised_models_of_other_shapes_are_expanded(name, tiny_model, tmp_path):
    directory = shutil.copytree(tiny_model(name), tmp_path / name)
    quantise(directory, bits=8)
    reference, _ = mlx_lm_load(directory)
    loaded = load_model(resolve(str(directory)), dtype="auto", device="cpu")
    assert dtypes(loaded) == {"float32"}
    np.testing.assert_allclose(np.array(loaded.model(TOKENS)), np.array(reference(TOKENS)), atol=1e-2)


@pytest.mark.model
def test_the_default_model_knows_the_capital_of_france(smollm2_source):
    loaded = load_model(smollm2_source, dtype="auto", device="cpu")
    assert (loaded.vocab_size, loaded.max_model_len, loaded.eos_token_ids) == (49152, 8192, [2])
    tokens = read_gguf_header(smollm2_source.path).metadata["tokenizer.ggml.tokens"]
    prompt = mx.array([tokens.index(token) for token in ("The", "Ġcapital", "Ġof", "ĠFrance", "Ġis")])
    first = next(iter(generate_step(prompt, loaded.model, max_tokens=1)))[0]
    assert tokens[int(first)] == "ĠParis"


@pytest.mark.parametrize("value", ["x", {"id": 2}, [2, "x"], True])
def test_an_end_of_sequence_id_of_another_type_is_refused(tiny_model, tmp_path, value):
    directory = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"eos_token_id": value}))
    with pytest.raises(ModelLoadError, match="eos_token_id must be a token id"):
        load_model(resolve(str(directory), progress=False), dtype="auto", device="cpu")
