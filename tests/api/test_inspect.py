"""``mlx-paged inspect``, on tiny models."""

import json

from cli_run import run

from mlx_paged_attention.api.commands.inspect import lines_of
from mlx_paged_attention.engine.inspection import LayerInspection, ModelInspection


def test_it_prints_what_each_kind_of_layer_keeps(capsys, tiny_model):
    status, out, err = run(capsys, "inspect", str(tiny_model("gemma3")), "--device", "cpu")
    assert status == 0
    assert "runs as   packed rows" in out
    assert "layers    2 x sliding window of 8; 2 heads, keys 16, values 16; 256 B per token each" in out
    assert "cache     1.0 KiB per token (behind windows 512 B)" in out
    assert "per GiB   a context of 2,096,608 tokens" in out
    assert "checking the model against mlx-lm" in err


def test_json_goes_to_stdout_alone(capsys, tiny_model):
    status, out, _ = run(capsys, "inspect", "--json", "--model", str(tiny_model("llama")), "--device", "cpu")
    assert status == 0
    assert json.loads(out)["forward"] == "packed rows"


def test_a_model_that_is_not_there_is_one_line(capsys):
    status, out, err = run(capsys, "inspect", "/nowhere/at/all")
    assert (status, out) == (2, "")
    assert err.count("\n") == 1


def test_two_models_and_flags_of_a_pool_are_refused(capsys, tiny_model):
    llama = str(tiny_model("llama"))
    status, _, err = run(capsys, "inspect", llama, "--model", "other")
    assert status == 2
    assert "inspect one model" in err
    status, _, err = run(capsys, "inspect", llama, "--kv-memory", "1GB")  # there is no pool
    assert status == 2
    assert "--kv-memory" in err


def test_a_refused_model_says_why_and_what_is_known_of_it():
    layers = (
        LayerInspection("recurrent state", "2 x 3, 4", bytes_per_sequence=2048),
        LayerInspection("recurrent state + full attention", "4 + 1 head, keys 8, values 8", 64, 1024),
    )
    inspection = ModelInspection("m", "cpu", "float32", 100, None, "it is odd; use mlx_lm", layers)
    assert list(lines_of(inspection)) == [
        "model     m: float32 on cpu",
        "refused   it is odd; use mlx_lm",
        "layers    1 x recurrent state; 2 x 3, 4; 2.0 KiB per sequence",
        "layers    1 x recurrent state + full attention; 4 + 1 head, keys 8, values 8; "
        "64 B per token and 1.0 KiB per sequence",
        "cache     64 B per token, 3.0 KiB per sequence",
        "per GiB   a context of 16,777,168 tokens; the model was made for 100",
    ]
