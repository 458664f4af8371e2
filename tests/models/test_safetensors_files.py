import json

import mlx.core as mx
import pytest

from mlx_paged_attention.errors import ModelLoadError
from mlx_paged_attention.models.safetensors_files import (
    INDEX,
    check_weight_files,
    read_tensor_names,
    weight_files,
)

NAMES = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.fixture
def shards(tmp_path):
    """Two shards of two tensors each, and their index."""
    weight_map = {}
    for number, name in enumerate(NAMES):
        tensors = {f"{letter}{number}.weight": mx.ones((4, 8)) for letter in "ab"}
        mx.save_safetensors(str(tmp_path / name), tensors, metadata={"format": "mlx"})
        weight_map |= dict.fromkeys(tensors, name)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def index(directory):
    return json.loads((directory / INDEX).read_text())


def refused(directory, index):
    with pytest.raises(ModelLoadError) as caught:
        check_weight_files(directory, index)
    message = str(caught.value)
    assert "\n" not in message, "one line"
    return message


def edit_header(path, change):
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def test_whole_shards_pass_with_and_without_their_index(shards):
    check_weight_files(shards, index(shards))
    check_weight_files(shards, None)
    assert [file.name for file in weight_files(shards)] == NAMES
    assert sorted(read_tensor_names(shards / NAMES[0])) == ["a0.weight", "b0.weight"]


def test_a_missing_shard_is_named_by_the_index(shards):
    (shards / NAMES[1]).rename(shards / f"{NAMES[1]}.incomplete")
    assert f"lacks {NAMES[1]}, which its index names: download it again" in refused(shards, index(shards))


def test_a_missing_shard_is_named_without_an_index(shards):
    (shards / NAMES[0]).unlink()
    assert f"lacks {NAMES[0]}, as the names of its other shards say" in refused(shards, None)


def test_a_tensor_that_the_index_names_and_no_shard_holds_is_named(shards):
    known = index(shards)
    known["weight_map"]["c.weight"] = NAMES[0]
    assert "its index names c.weight, which no shard holds" in refused(shards, known)


def test_an_index_without_a_map_is_refused(shards):
    assert "has no weight_map" in refused(shards, {"weights": {}})


def test_a_tensor_in_two_files_is_refused_since_either_could_count(shards):
    mx.save_safetensors(str(shards / "model.safetensors"), {"a1.weight": mx.zeros((4, 8))})
    message = refused(shards, index(shards))
    assert message.startswith(f"a1.weight is in {NAMES[1]} and in model.safetensors of")
    assert "remove the file that does not belong" in message


def test_a_shape_that_does_not_fit_its_bytes_is_named(shards):
    edit_header(shards / NAMES[1], lambda header: header["b1.weight"].update(shape=[4, 9]))
    assert "b1.weight is F32 of shape [4, 9], which does not fit its 128 bytes" in refused(shards, None)


def test_a_type_of_another_width_is_named(shards):
    edit_header(shards / NAMES[1], lambda header: header["b1.weight"].update(dtype="BF16"))
    assert "b1.weight is BF16 of shape [4, 8], which does not fit" in refused(shards, None)


def test_offsets_of_another_kind_are_a_damaged_header(shards):
    edit_header(shards / NAMES[1], lambda header: header["b1.weight"].update(data_offsets=[0]))
    assert "the header of" in refused(shards, None)


def test_a_truncated_shard_is_refused_with_both_sizes(shards):
    path = shards / NAMES[1]
    path.write_bytes(path.read_bytes()[:-1])
    size = path.stat().st_size
    assert f"has {size} bytes, its header promises {size + 1}" in refused(shards, index(shards))
