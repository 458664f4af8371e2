import math

import gguf
import mlx.core as mx
import mlx_lm.utils
import numpy as np
import pytest
from mlx.utils import tree_flatten
from models.gguf_files import PACKED, permute, write_gguf

from mlx_paged_attention.errors import ModelLoadError, UnsupportedModelError
from mlx_paged_attention.models.gguf import config_from_gguf, unpermute_rows, weights_from_gguf
from mlx_paged_attention.models.gguf_header import read_gguf_header
from mlx_paged_attention.models.load import load_model
from mlx_paged_attention.models.source import ModelSource

NAMES = ["llama", "qwen2", "qwen3", "gemma2", "gemma3"]
TOKENS = mx.array([[3, 141, 59, 26, 5, 35, 89, 79, 32, 38, 46, 26, 43, 38]])


def logits(model):
    return np.array(model(TOKENS).astype(mx.float32))


def load(path, device="cpu", dtype="auto"):
    return load_model(ModelSource("gguf", path, "tiny"), dtype=dtype, device=device)


@pytest.mark.parametrize("name", NAMES)
def test_a_float_gguf_computes_what_its_directory_does(name, tiny_model, tmp_path):
    write_gguf(tiny_model(name), tmp_path / "tiny.gguf")
    loaded = load(tmp_path / "tiny.gguf")
    reference, config = mlx_lm.utils.load_model(tiny_model(name))
    # Gemma's norms are stored with 1 added, which rounds their last bits.
    np.testing.assert_allclose(logits(loaded.model), logits(reference), atol=2e-4)
    assert np.abs(logits(reference)).max() > 1, "logits are large beside the tolerance"
    assert loaded.config["rms_norm_eps"] == config["rms_norm_eps"]
    assert loaded.eos_token_ids == [7]
    assert (loaded.vocab_size, loaded.max_model_len) == (256, 8192)
    assert (loaded.dtype, loaded.quantisation, loaded.notes) == ("float32", None, [])


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_on_a_cpu_quantised_tensors_become_what_the_gguf_package_dequantises(
    name, kind, tiny_model, tmp_path
):
    held = write_gguf(tiny_model(name), tmp_path / "tiny.gguf", quantised=kind)
    loaded = load(tmp_path / "tiny.gguf")
    parameters = dict(tree_flatten(loaded.model.parameters()))
    assert parameters.keys() == held.keys()
    for parameter, expected in held.items():
        assert parameters[parameter].dtype == mx.float32
        np.testing.assert_allclose(np.array(parameters[parameter]), np.array(expected), rtol=1e-6, atol=1e-6)
    assert loaded.quantisation is None
    assert loaded.notes == [f"the {kind} weights were expanded to float32, which is faster on a CPU"]


@pytest.mark.parametrize("kind", PACKED)
def test_on_a_gpu_quantised_tensors_stay_packed_and_floats_share_one_type(kind, tiny_model, tmp_path):
    # The rules for GPUs, carried out by whatever device there is.
    held = write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", quantised=kind)
    loaded = load(tmp_path / "tiny.gguf", device="gpu")
    parameters = dict(tree_flatten(loaded.model.parameters()))
    assert {p.dtype for p in parameters.values()} == {mx.uint32, mx.float16}
    assert (loaded.dtype, loaded.quantisation) == ("float16", kind)
    query = "model.layers.0.self_attn.q_proj"
    weight = mx.dequantize(
        parameters[f"{query}.weight"],
        parameters[f"{query}.scales"].astype(mx.float32),
        parameters[f"{query}.biases"].astype(mx.float32),
        group_size=32,
        bits=int(kind[1]),
    )
    np.testing.assert_allclose(np.array(weight), np.array(held[f"{query}.weight"]), rtol=1e-6, atol=1e-6)


def test_on_a_gpu_the_float_type_can_be_chosen(tiny_model, tmp_path):
    write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", quantised="Q4_1")
    loaded = load(tmp_path / "tiny.gguf", device="gpu", dtype="bfloat16")
    assert loaded.dtype == "bfloat16"
    assert loaded.model.model.norm.weight.dtype == mx.bfloat16
    assert loaded.model.model.layers[0].self_attn.q_proj.scales.dtype == mx.bfloat16


def test_on_a_gpu_gemma_gets_a_type_that_holds_its_activations(tiny_model, tmp_path):
    write_gguf(tiny_model("gemma3"), tmp_path / "tiny.gguf", quantised="Q8_0")
    loaded = load(tmp_path / "tiny.gguf", device="gpu")
    assert loaded.dtype == "bfloat16"
    assert loaded.model.model.layers[0].input_layernorm.weight.dtype == mx.bfloat16


@pytest.mark.parametrize("shape", [(48,), (48, 5)])
def test_unpermuting_undoes_the_interleaving_of_weights_and_biases(shape):
    array = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    assert not np.array_equal(permute(array, 3), array)
    np.testing.assert_array_equal(np.array(unpermute_rows(mx.array(permute(array, 3)), 3)), array)


def llama3_factors(config, factor=8.0):
    frequency = config["rope_theta"] ** -(np.arange(0, config["head_dim"], 2) / config["head_dim"])
    wavelength = 2 * np.pi / frequency
    smooth = (8192 / wavelength - 1) / 3
    middle = 1 / ((1 - smooth) / factor + smooth)
    return np.where(wavelength < 2048, 1, np.where(wavelength > 8192, factor, middle)).astype(np.float32)


def test_llama_3_frequency_factors_become_rope_scaling(tiny_model, tmp_path):
    factors = llama3_factors({"rope_theta": 10000.0, "head_dim": 16})
    assert len(set(factors)) >= 2
    write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", extra_tensors={"rope_freqs.weight": factors})
    loaded = load(tmp_path / "tiny.gguf")
    rope = loaded.model.model.layers[0].self_attn.rope
    assert loaded.config["rope_scaling"]["factor"] == 8.0
    np.testing.assert_allclose(
        np.array(rope._freqs), factors * 10000.0 ** (np.arange(0, 16, 2) / 16), rtol=1e-5
    )


def test_other_frequency_factors_are_refused(tiny_model, tmp_path):
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", extra_tensors={"rope_freqs.weight": factors})
    with pytest.raises(UnsupportedModelError, match="Llama 3's formula"):
        load(tmp_path / "tiny.gguf")


def test_an_unknown_architecture_is_refused_with_the_known_ones(tiny_model, tmp_path):
    write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", architecture="mamba")
    with pytest.raises(UnsupportedModelError, match=r"'mamba'.*llama, qwen2, qwen3, gemma2, gemma3"):
        load(tmp_path / "tiny.gguf")


def test_tensors_that_would_be_left_out_are_refused(tiny_model, tmp_path):
    experts = np.zeros((2, 64, 64), dtype=np.float32)
    write_gguf(
        tiny_model("llama"), tmp_path / "tiny.gguf", extra_tensors={"blk.0.ffn_gate_exps.weight": experts}
    )
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.ffn_gate_exps"):
        load(tmp_path / "tiny.gguf")


def test_a_missing_tensor_is_named(tiny_model, tmp_path):
    write_gguf(
        tiny_model("qwen2"), tmp_path / "tiny.gguf", architecture="llama"
    )  # no attention_bias of o_proj
    with pytest.raises(ModelLoadError, match=r"o_proj\.bias"):
        load(tmp_path / "tiny.gguf")


def test_yarn_is_refused_and_linear_scaling_is_kept(tiny_model, tmp_path):
    keys = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    write_gguf(tiny_model("llama"), tmp_path / "yarn.gguf", extra_keys=keys)
    with pytest.raises(UnsupportedModelError, match="yarn"):
        config_from_gguf(read_gguf_header(tmp_path / "yarn.gguf"))
    keys["llama.rope.scaling.type"] = "linear"
    write_gguf(tiny_model("llama"), tmp_path / "linear.gguf", extra_keys=keys)
    config = config_from_gguf(read_gguf_header(tmp_path / "linear.gguf"))
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


@pytest.mark.model
def test_every_tensor_of_the_default_model_equals_the_gguf_package(smollm2_source):
    header = read_gguf_header(smollm2_source.path)
    config = config_from_gguf(header)
    assert config["rms_norm_eps"] == 1e-5
    assert config["tie_word_embeddings"] is True
    weights, _ = weights_from_gguf(smollm2_source.path, header, config, expand=True, float_type=mx.float32)
    short = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
             "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
             "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
             "embed_tokens": "token_embd", "norm": "output_norm"}  # fmt: skip
    reference = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2_source.path).tensors}
    assert len(reference) == len(weights) == 272
    for name, array in weights.items():
        parts = name.split(".")
        stem = short[parts[-2]]
        tensor = reference[f"blk.{parts[2]}.{stem}.weight" if "layers" in parts else f"{stem}.weight"]
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        heads = {"attn_q": 9, "attn_k": 3}.get(stem)
        got = np.array(array) if heads is None else permute(np.array(array), heads)
        np.testing.assert_allclose(got, expected.reshape(got.shape), rtol=1e-6, atol=1e-6, err_msg=name)
