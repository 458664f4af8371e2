import json
import shutil
from importlib.machinery import ModuleSpec

import numpy as np
import pytest
from models.gguf_files import write_gguf

import mlx_paged_attention.models.source as source_module
from mlx_paged_attention.errors import ModelLoadError, UnsupportedModelError
from mlx_paged_attention.models.source import ModelSource, resolve, stated_context


@pytest.fixture
def model(tiny_model, tmp_path):
    """A copy of a tiny model's directory, to be damaged."""
    return shutil.copytree(tiny_model("llama"), tmp_path / "tiny-llama")


def refused(path, error=ModelLoadError):
    with pytest.raises(error) as caught:
        resolve(str(path))
    message = str(caught.value)
    assert "\n" not in message, "one line"
    return message


def test_a_directory_is_named_after_itself(model, monkeypatch):
    assert resolve(str(model)) == ModelSource("directory", model, "tiny-llama")
    monkeypatch.chdir(model)
    assert resolve(".").name == "tiny-llama"


def test_a_gguf_file_is_named_after_itself(model, tmp_path):
    write_gguf(model, tmp_path / "my-model.gguf")
    assert resolve(str(tmp_path / "my-model.gguf")) == ModelSource(
        "gguf", tmp_path / "my-model.gguf", "my-model"
    )


@pytest.mark.parametrize("none", [None, ""])
def test_no_model_is_the_default_model(none, model, tmp_path, monkeypatch):
    write_gguf(model, tmp_path / "stored.gguf")
    monkeypatch.setattr(source_module, "fetch_default_model", lambda *, progress: tmp_path / "stored.gguf")
    assert resolve(none) == ModelSource("gguf", tmp_path / "stored.gguf", "SmolLM2-135M-Instruct")


@pytest.mark.parametrize(
    "name", ["/no", "/no/such", "./here", "../there/", "~/no/such", "~nobody/x", "a/b/c", "a/"]
)
def test_a_path_to_nothing_does_not_exist(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refused(name).startswith(f"{name} does not exist")


@pytest.mark.parametrize("name", ["white space", "a/b c", "-flag"])
def test_what_is_neither_a_path_nor_a_repo_id_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "neither a directory, a .gguf file nor a Hugging Face repo id" in refused(name)


def test_a_missing_gguf_file_is_not_looked_up_on_the_hub(monkeypatch):
    monkeypatch.setattr(source_module, "_download", None)
    assert "there is no file some/model.gguf" in refused("some/model.gguf")


def test_a_single_safetensors_file_is_refused(model):
    assert "give the directory" in refused(model / "model.safetensors")


def test_an_empty_directory_is_refused(tmp_path):
    assert "has no config.json" in refused(tmp_path)


def test_a_damaged_configuration_is_refused(model):
    (model / "config.json").write_text("{")
    assert "cannot read" in refused(model)
    (model / "config.json").write_text("[]")
    assert "not a JSON object" in refused(model)
    (model / "config.json").write_text("{}")
    assert "names no model_type" in refused(model)


def test_a_directory_without_weights_is_refused(model):
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert "mlx_lm.convert" in refused(model)


def test_an_unknown_architecture_is_told_before_what_else_is_wrong(model):
    (model / "model.safetensors").unlink()
    edit_config(model, model_type="perceptron")
    assert "does not know model type 'perceptron'" in refused(model, UnsupportedModelError)
    edit_config(model, model_type=["llama"])
    assert "does not know model type" in refused(model, UnsupportedModelError)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma4_unified", "bailing_hybrid"])
def test_architectures_that_mlx_lm_has_under_another_name_are_known(model, name):
    edit_config(model, model_type=name)
    assert resolve(str(model)).kind == "directory"


def test_an_mlx_lm_that_names_no_others_is_not_judged(model, tmp_path, monkeypatch):
    (tmp_path / "mlx_lm" / "models").mkdir(parents=True)
    (tmp_path / "mlx_lm" / "__init__.py").touch()
    (tmp_path / "mlx_lm" / "utils.py").write_text("MODEL_REMAPPING = read_a_file()")
    monkeypatch.setattr(
        source_module.importlib.util,
        "find_spec",
        lambda _: ModuleSpec("mlx_lm", None, origin=str(tmp_path / "mlx_lm" / "__init__.py")),
    )
    edit_config(model, model_type="perceptron")
    assert resolve(str(model)).kind == "directory"


def test_the_context_is_read_off_the_files(model, tmp_path):
    write_gguf(model, tmp_path / "x.gguf")
    assert stated_context(ModelSource("gguf", tmp_path / "x.gguf", "x")) == 8192
    directory = ModelSource("directory", model, "x")
    assert stated_context(directory) == 8192
    edit_config(model, max_position_embeddings=None, text_config={"n_ctx": 77})
    assert stated_context(directory) == 77
    edit_config(model, text_config=None)
    assert stated_context(directory) is None


def test_missing_shards_are_named(model):
    (model / "model.safetensors").rename(model / "model-00001-of-00003.safetensors")
    shards = {f"w{i}": f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    message = refused(model)
    assert "model-00002-of-00003.safetensors, model-00003-of-00003.safetensors" in message
    assert "model-00001" not in message


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1])
def test_a_truncated_safetensors_file_is_refused(model, keep):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    message = refused(model)
    assert "model.safetensors" in message
    assert "download it again" in message


def test_a_safetensors_header_of_garbage_is_refused(model):
    path = model / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[8:12] = b"\xff\xff\xff\xff"
    path.write_bytes(content)
    assert "header" in refused(model)
    path.write_bytes(b"\xff" * 100)  # a header of 2^64 - 1 bytes
    assert "cut short or no safetensors file" in refused(model)


def edit_config(model, **changes):
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_folder_that_wants_to_run_its_own_python_is_refused(model):
    (model / "mine.py").write_text("raise SystemExit('ran')")
    edit_config(model, model_file="mine.py")
    assert "its own Python (mine.py)" in refused(model, UnsupportedModelError)


def test_an_auto_map_for_other_libraries_is_ignored(model):
    edit_config(model, auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"})
    assert resolve(str(model)).kind == "directory"


def test_a_truncated_gguf_is_refused_with_both_sizes(model, tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(model, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    message = refused(path)
    assert "cut short" in message
    assert str(len(whole) - 100) in message


def test_a_gguf_of_garbage_is_refused(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"\0" * 1000)
    assert "not a GGUF file" in refused(tmp_path / "x.gguf")


def test_number_formats_that_cannot_be_loaded_are_named_with_those_that_can(model, tmp_path):
    import gguf

    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tensor("a", np.zeros((2, 36), np.uint8), raw_dtype=gguf.GGMLQuantizationType.IQ4_NL)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "IQ4_NL; these can be loaded: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K" in refused(
        path, UnsupportedModelError
    )


class Hub:
    """Stands in for the hub's client: raises, or yields a directory."""

    def __init__(self, result):
        self.result = result
        self.asked = None

    def __call__(self, repo, **options):
        self.asked = (repo, options)
        if isinstance(self.result, Exception):
            raise self.result
        return str(self.result)


@pytest.fixture
def hub(monkeypatch):
    import huggingface_hub

    def install(result):
        fake = Hub(result)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
        return fake

    return install


def test_a_repo_id_is_fetched_without_python_and_pickles(hub, model):
    fake = hub(model)
    assert resolve("someone/a-model") == ModelSource("directory", model, "someone/a-model")
    patterns = fake.asked[1]["allow_patterns"]
    assert "*.safetensors" in patterns
    assert not any(pattern.endswith((".py", ".bin", "*")) for pattern in patterns)


def test_progress_bars_can_be_silenced(hub, model):
    fake = hub(model)
    resolve("someone/a-model", progress=False)
    assert fake.asked[1]["tqdm_class"](total=3).disable


def test_hub_errors_become_one_line(hub):
    import httpx
    from huggingface_hub import errors

    response = httpx.Response(404, request=httpx.Request("GET", "https://huggingface.co"))
    hub(errors.RepositoryNotFoundError("404\n\nlong text", response=response))
    assert "no such repo on Hugging Face" in refused("someone/nothing")
    hub(errors.GatedRepoError("403", response=response))
    assert "accept its terms" in refused("someone/gated")
    hub(errors.LocalEntryNotFoundError("offline"))
    assert "check the network" in refused("someone/a-model")
    hub(OSError("No space left\non device"))
    assert "No space left on device" in refused("someone/a-model")
