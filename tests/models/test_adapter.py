import json
import shutil

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters
from mlx_lm.utils import load_model as mlx_lm_load
from models.gguf_files import write_gguf
from models.test_formats import quantise
from oracle import Oracle, assert_matches, greedy, varied_prompt

from mlx_paged_attention import LLM
from mlx_paged_attention.errors import ModelLoadError, UnsupportedModelError
from mlx_paged_attention.models.load import load_model
from mlx_paged_attention.models.source import resolve

TOKENS = mx.array([[3, 141, 59, 26, 5, 35]])
PARAMETERS = {"rank": 4, "scale": 2.0, "dropout": 0.1}


def write_adapter(model, directory, *, kind="lora", num_layers=2, seed=0, **parameters):
    """A random adapter of the model in a directory, as mlx-lm's training saves it."""
    directory.mkdir()
    parameters = PARAMETERS | parameters
    module, _ = mlx_lm_load(model)
    module.freeze()
    linear_to_lora_layers(module, num_layers, parameters, use_dora=kind == "dora")
    weights = {}
    for number, (name, array) in enumerate(tree_flatten(module.trainable_parameters())):
        noise = mx.random.normal(array.shape, key=mx.random.key(1000 * seed + number))
        weights[name] = array * (1 + 0.1 * noise) if name.endswith(".m") else 0.1 * noise
    mx.save_safetensors(str(directory / "adapters.safetensors"), weights)
    config = {"fine_tune_type": kind, "num_layers": num_layers, "lora_parameters": parameters}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def adapter(tiny_model, tmp_path):
    return write_adapter(tiny_model("llama"), tmp_path / "tuned")


def load(model, adapter, device="cpu"):
    path = None if adapter is None else str(adapter)
    return load_model(resolve(str(model), adapter=path, progress=False), dtype="auto", device=device)


def refused(model, adapter, error=ModelLoadError):
    with pytest.raises(error) as caught:
        load(model, adapter)
    message = str(caught.value)
    assert "\n" not in message, "one line"
    return message


def edit_config(adapter, **changes):
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(adapter, change):
    path = str(adapter / "adapters.safetensors")
    weights = mx.load(path)
    mx.eval(weights)
    mx.save_safetensors(path, change(weights))


@pytest.mark.parametrize("keys", [None, ["self_attn.q_proj", "mlp.down_proj"]])
@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_moe"])
def test_a_fused_adapter_computes_what_mlx_lm_does_beside_the_weights(name, kind, keys, tiny_model, tmp_path):
    if (name, kind, keys) == ("qwen3_moe", "dora", None):
        pytest.skip("mlx-lm has no DoRA for experts")
    keys = keys if name != "qwen3_moe" else ["self_attn.q_proj", "self_attn.o_proj"]
    adapter = write_adapter(tiny_model(name), tmp_path / "tuned", kind=kind, keys=keys)
    loaded = load(tiny_model(name), adapter)
    reference, _ = mlx_lm_load(tiny_model(name))
    plain = np.array(reference(TOKENS))
    reference = load_adapters(reference, str(adapter))
    reference.eval()
    expected = np.array(reference(TOKENS))
    np.testing.assert_allclose(np.array(loaded.model(TOKENS)), expected, atol=2e-3)
    assert np.abs(expected - plain).max() > 0.1, "the adapter matters"
    assert not any("lora" in path for path, _ in tree_flatten(loaded.model.parameters()))


def test_the_engine_answers_with_the_adapter(adapter, tiny_model):
    model = tiny_model("llama")
    loaded = load(model, adapter)
    oracle = Oracle.with_weights_of(loaded.model, loaded.config)
    prompts = [varied_prompt(length, seed) for seed, length in enumerate((33, 1, 16))]
    with LLM(str(model), adapter_path=str(adapter), skip_tokenizer_init=True, num_blocks=64) as llm:
        assert llm.info.notes[0] == "the LoRA adapter tuned was added to 14 layers"
        outputs = llm.generate(prompts, greedy(8, ignore_eos=True))
    for output, prompt in zip(outputs, prompts, strict=True):
        assert_matches(output.outputs[0], oracle.greedy(prompt, 8))


def test_a_gguf_takes_an_adapter_too(adapter, tiny_model, tmp_path):
    write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf")
    from_gguf, from_directory = load(tmp_path / "tiny.gguf", adapter), load(tiny_model("llama"), adapter)
    np.testing.assert_allclose(
        np.array(from_gguf.model(TOKENS)), np.array(from_directory.model(TOKENS)), atol=1e-5
    )


def test_quantised_layers_are_expanded_before_on_a_cpu_and_quantised_anew_on_a_gpu(tiny_model, tmp_path):
    quantise(tiny_model("llama"), tmp_path / "quantised", {"group_size": 32, "bits": 8})
    adapter = write_adapter(tmp_path / "quantised", tmp_path / "tuned")
    plain = load(tmp_path / "quantised", adapter)
    assert plain.notes[-1] == "the LoRA adapter tuned was added to 14 layers"
    packed = load(tmp_path / "quantised", adapter, device="gpu")
    assert packed.notes == ["the LoRA adapter tuned was added to 14 layers, which quantised them anew"]
    assert packed.quantisation == "8-bit"
    np.testing.assert_allclose(np.array(packed.model(TOKENS)), np.array(plain.model(TOKENS)), atol=0.5)


def test_the_adapter_and_its_scale_change_the_fingerprint(adapter, tiny_model, tmp_path):
    model = tiny_model("llama")
    other = write_adapter(model, tmp_path / "other", seed=1)
    louder = shutil.copytree(adapter, tmp_path / "louder")
    edit_config(louder, lora_parameters=PARAMETERS | {"scale": 3.0})
    copy = shutil.copytree(adapter, tmp_path / "copy")
    prints = [load(model, path).fingerprint for path in (None, adapter, other, louder)]
    assert len(set(prints)) == 4
    assert load(model, copy).fingerprint == prints[1]


def test_an_adapter_of_another_model_is_refused(tiny_model, tmp_path):
    adapter = write_adapter(tiny_model("gemma3"), tmp_path / "tuned", num_layers=4)
    assert "was made for another model: this one has no model.layers.2." in refused(
        tiny_model("llama"), adapter
    )


def test_a_tensor_of_another_shape_is_named(adapter, tiny_model):
    name = "model.layers.0.self_attn.q_proj.lora_a"
    edit_weights(adapter, lambda weights: weights | {name: mx.zeros((32, 4))})
    assert f"{name} is [32, 4], this one needs [64, 4]" in refused(tiny_model("llama"), adapter)


def test_a_missing_tensor_is_named(adapter, tiny_model):
    name = "model.layers.0.self_attn.q_proj.lora_a"
    edit_weights(adapter, lambda weights: {key: array for key, array in weights.items() if key != name})
    assert f"lacks {name}, for which its adapter_config.json asks" in refused(tiny_model("llama"), adapter)


def test_an_alpha_in_place_of_a_scale_is_told_with_mlx_lms_words(adapter, tiny_model):
    edit_config(adapter, lora_parameters={"rank": 4, "alpha": 8, "dropout": 0.0})
    message = refused(tiny_model("llama"), adapter)
    assert "does not fit this model: KeyError" in message
    assert "scale" in message


def test_a_full_fine_tune_is_refused_with_what_to_do(adapter, tiny_model):
    edit_config(adapter, fine_tune_type="full")
    assert "mlx_lm.fuse" in refused(tiny_model("llama"), adapter, UnsupportedModelError)


def test_what_is_no_adapter_directory_is_refused_before_anything_is_loaded(adapter, tmp_path):
    model = tmp_path / "no-model"
    assert "there is no adapter directory" in refused(model, tmp_path / "nothing")
    (adapter / "adapter_config.json").rename(tmp_path / "adapter_config.json")
    assert "has no adapter_config.json" in refused(model, adapter)
    (adapter / "adapters.safetensors").rename(adapter / "adapter_model.safetensors")
    assert "is an adapter of PEFT" in refused(model, adapter, UnsupportedModelError)


def test_a_truncated_adapter_is_refused(adapter, tiny_model):
    path = adapter / "adapters.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert "cut short or damaged" in refused(tiny_model("llama"), adapter)


@pytest.mark.parametrize("scale", ["2.0", None])
def test_a_scale_that_is_no_number_is_refused_in_one_line(adapter, tiny_model, scale):
    edit_config(adapter, lora_parameters=PARAMETERS | {"scale": scale})
    assert "cannot be fused" in refused(tiny_model("llama"), adapter)


@pytest.mark.parametrize("key", ["num_layers", "lora_parameters"])
def test_a_configuration_that_lacks_a_key_is_told_which(adapter, tiny_model, key):
    path = adapter / "adapter_config.json"
    config = json.loads(path.read_text())
    del config[key]
    path.write_text(json.dumps(config))
    assert f"has no {key}" in refused(tiny_model("llama"), adapter)


def test_a_fine_tune_type_of_another_kind_is_refused(adapter, tiny_model):
    edit_config(adapter, fine_tune_type=["lora"])
    assert "fine_tune_type ['lora']" in refused(tiny_model("llama"), adapter, UnsupportedModelError)
