"""Damaged, incomplete and dishonest model folders are refused with the file's name and a remedy."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvq.errors import ModelError
from kvq.models import load
from kvq.models.describe.checkpoint import content_digest, read_header, weight_files
from tests.helpers_models import build_model, random_tokens, save_model, small_config

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("whole"), "llama")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    build_model(small_config("llama")).save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    """A copy that a test may damage."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


def edit_header(path: Path, change: Callable[[dict[str, Any]], None], *, tail: bytes = b"") -> None:
    """Rewrite a safetensors header, with the tensors' bytes left as they are."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data[8 + length :] + tail)


def tensors_in_order(header: dict[str, Any]) -> list[dict[str, Any]]:
    entries = [info for name, info in header.items() if name != "__metadata__"]
    return sorted(entries, key=lambda info: info["data_offsets"])


def overlap(header: dict[str, Any]) -> None:
    first, second = tensors_in_order(header)[:2]
    size = second["data_offsets"][1] - second["data_offsets"][0]
    second["data_offsets"] = [first["data_offsets"][0], first["data_offsets"][0] + size]


def gap(header: dict[str, Any]) -> None:
    for info in tensors_in_order(header)[1:]:
        info["data_offsets"] = [offset + 64 for offset in info["data_offsets"]]


def wider(header: dict[str, Any]) -> None:
    tensors_in_order(header)[0]["shape"][0] += 1


def negative(header: dict[str, Any]) -> None:
    tensors_in_order(header)[0]["shape"][0] *= -1


def unknown_dtype(header: dict[str, Any]) -> None:
    tensors_in_order(header)[0]["dtype"] = "F31"


def beyond_the_end(header: dict[str, Any]) -> None:
    tensors_in_order(header)[-1]["data_offsets"] = [1 << 40, 1 << 41]


def not_described(header: dict[str, Any]) -> None:
    header["lm_head.weight"] = "see below"


HEADERS = [
    (overlap, "starts at byte"),
    (gap, "starts at byte"),
    (wider, "can't have"),
    (negative, "shape"),
    (unknown_dtype, "F31"),
    (beyond_the_end, "can't have"),
    (not_described, "lm_head.weight has no description"),
]


@pytest.mark.parametrize(("change", "reason"), HEADERS, ids=[c.__name__ for c, _ in HEADERS])
def test_a_header_that_contradicts_itself_is_refused(change, reason, folder):
    edit_header(folder / WEIGHTS, change)
    with pytest.raises(ModelError, match=f"{WEIGHTS} is damaged: .*{reason}.*; download or copy it again"):
        load(folder)


@pytest.mark.parametrize("kept", [0, 5, 8, 200, -1, -4096])
def test_a_truncated_file_is_refused(kept, folder):
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:kept])
    with pytest.raises(ModelError, match=f"{WEIGHTS} is damaged: .*; download or copy it again"):
        load(folder)


def test_bytes_behind_the_last_tensor_are_refused(folder):
    edit_header(folder / WEIGHTS, lambda header: None, tail=b"\0" * 16)
    with pytest.raises(ModelError, match=f"{WEIGHTS} is damaged: its tensors end at byte"):
        load(folder)


@pytest.mark.parametrize(
    ("length", "reason"),
    [
        (1 << 62, "its header claims"),
        ((1 << 64) - 1, "its header claims"),
        (101 << 20, "its header claims"),
        (0, "its header is not JSON"),
        (2, "its header is not JSON"),
        (17, "its header is not JSON"),
    ],
)
def test_a_header_length_that_lies_is_refused(length, reason, folder):
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(length.to_bytes(8, "little") + data[8:])
    with pytest.raises(ModelError, match=f"{WEIGHTS} is damaged: {reason}.*; download or copy it again"):
        load(folder)


@pytest.mark.parametrize("header", [b"[]", b"7", b'"x"', b"\xff\xfe", b"[" * 100_000])
def test_a_header_of_another_kind_is_refused(header, folder):
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match=f"{WEIGHTS} is damaged: its header is not"):
        load(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_key_value_heads", 4), ("intermediate_size", 72), ("vocab_size", 205), ("hidden_size", 32)],
)
def test_a_config_of_other_shapes_than_the_tensors_is_refused(key, value, folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(ModelError, match=f"^{folder}"):
        load(folder)


def test_a_config_of_more_layers_than_the_tensors_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ModelError, match=r"says num_hidden_layers 3, but the weights hold layers 0 to 1"):
        load(folder)


def test_a_missing_tensor_is_refused_by_name(folder):
    tensors = load_file(folder / WEIGHTS)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"lacks 1 tensors, first model\.layers\.1\.self_attn\.k_proj\.weight; download"
    ):
        load(folder)


def test_a_missing_shard_is_refused_by_name(sharded, tmp_path):
    folder = Path(shutil.copytree(sharded, tmp_path / "model"))
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=f"shard {shard.name} of {folder} is missing; download"):
        load(folder)


def test_a_shard_without_a_promised_tensor_is_refused(sharded, tmp_path):
    folder = Path(shutil.copytree(sharded, tmp_path / "model"))
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    tensors = load_file(shard)
    lost, _ = tensors.popitem()
    save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"shard {shard.name} of {folder} lacks tensor {lost}, which"):
        load(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ""])
def test_an_index_that_points_outside_the_folder_is_refused(name, sharded, tmp_path):
    folder = Path(shutil.copytree(sharded, tmp_path / "model"))
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = name
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=f"{INDEX} names '{name}', which is outside|shard .* is missing"):
        load(folder)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": {}}', '{"weight_map": [1]}'])
def test_an_index_without_a_weight_map_is_refused(text, sharded, tmp_path):
    folder = Path(shutil.copytree(sharded, tmp_path / "model"))
    (folder / INDEX).write_text(text)
    with pytest.raises(ModelError, match=f"{INDEX} has no weight_map; download it again"):
        load(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.ckpt"])
def test_pickled_weights_are_never_read(name, folder):
    (folder / WEIGHTS).unlink()
    (folder / name).write_bytes(b"\x80\x04cos\nsystem\n.")
    with pytest.raises(ModelError, match=f"only pickled weights .{name}., which can run code .* convert it"):
        load(folder)


def test_a_folder_without_weights_is_refused(folder):
    (folder / WEIGHTS).unlink()
    with pytest.raises(ModelError, match=f"{folder} has no model.safetensors and no {INDEX}"):
        load(folder)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "has no config.json; is it a Hugging Face model folder"),
        ("", "config.json is not JSON .*; download it again"),
        ("{'model_type': 'llama'}", "config.json is not JSON .*; download it again"),
        ("[" * 100_000, "config.json is not JSON .*; download it again"),
        ("[]", "config.json must hold a JSON object, got list"),
        ("3", "config.json must hold a JSON object, got int"),
        ("{}", "not among the families"),
    ],
)
def test_a_config_that_is_missing_or_not_an_object_is_refused(text, reason, folder):
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=reason):
        load(folder)


def test_a_config_that_is_not_text_is_refused(folder):
    (folder / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ModelError, match=r"config\.json is not JSON .*; download it again"):
        load(folder)


def test_sharded_and_unsharded_weights_give_the_same_model(whole, sharded):
    ids = random_tokens(20, seed=1)
    assert torch.equal(load(whole, kv="fp32").logits(ids), load(sharded, kv="fp32").logits(ids))
    assert content_digest(weight_files(whole)) == content_digest(weight_files(sharded))


def test_tied_embeddings_load(tmp_path):
    folder = save_model(tmp_path, "llama", tie_word_embeddings=True)
    names = {entry.name for path in weight_files(folder) for entry in read_header(path)}
    assert "lm_head.weight" not in names
    model = load(folder).weights.model
    assert model.model.embed_tokens.kernel is model.lm_head.kernel
    assert torch.equal(model.model.embed_tokens.weight, model.lm_head.weight)


@pytest.mark.parametrize("at", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("bit", [0, 7])
def test_one_flipped_bit_changes_the_digest(at, bit, folder):
    before = content_digest([folder / WEIGHTS])
    data = bytearray((folder / WEIGHTS).read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start + int(at * (len(data) - start - 1))] ^= 1 << bit
    (folder / WEIGHTS).write_bytes(data)
    assert content_digest([folder / WEIGHTS]) != before


def test_the_digest_tells_names_shapes_and_types_apart(tmp_path):
    zeros = torch.zeros(4, 6)
    files = {
        "plain": {"a": zeros, "b": zeros + 1},
        "swapped": {"a": zeros + 1, "b": zeros},
        "renamed": {"a": zeros, "c": zeros + 1},
        "reshaped": {"a": zeros.view(6, 4), "b": zeros + 1},
        "retyped": {"a": zeros.int(), "b": zeros + 1},
    }
    for name, tensors in files.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
    digests = {content_digest([tmp_path / f"{name}.safetensors"]) for name in files}
    assert len(digests) == len(files)


def test_a_tokenizer_with_code_is_refused_when_it_is_asked_for(folder):
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["tokenization.Evil", None]}})
    )
    (folder / "tokenization.py").write_text("raise SystemExit('this code must not run')")
    model = load(folder)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json has auto_map, code that would run"):
        model.tokenizer  # noqa: B018


def test_a_folder_without_a_tokenizer_says_so_when_it_is_asked_for(folder):
    model = load(folder)
    with pytest.raises(ModelError, match=f"{folder} has no tokenizer that loads"):
        model.tokenizer  # noqa: B018


UNREAD = {"C64": 8, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F6_E2M3": 0.75, "F6_E3M2": 0.75, "F4": 0.5}  # bytes


def add_tensor(folder: Path, name: str, dtype: str, count: int = 32) -> None:
    path, size = folder / WEIGHTS, int(count * UNREAD[dtype])

    def add(header: dict[str, Any]) -> None:
        end = max(entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__")
        header[name] = {"dtype": dtype, "shape": [count], "data_offsets": [end, end + size]}

    edit_header(path, add, tail=bytes(size))


@pytest.mark.parametrize("dtype", UNREAD)
def test_a_tensor_of_a_type_that_is_not_used_is_left_alone_where_nothing_needs_it(folder, dtype):
    ids = random_tokens(9, seed=1)
    right = load(folder, kv="fp32").logits(ids)
    add_tensor(folder, "model.freqs_cis", dtype)

    assert torch.equal(load(folder, kv="fp32").logits(ids), right)
    assert torch.isfinite(load(folder, kv="bf16", dtype="bf16").logits(ids)).all(), "by transformers' loader"


@pytest.mark.parametrize("dtype", UNREAD)
def test_a_type_that_is_not_used_is_named_where_a_module_needs_the_tensor(folder, dtype):
    tensors = load_file(folder / WEIGHTS)
    count = tensors.pop("model.norm.weight").numel()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    add_tensor(folder, "model.norm.weight", dtype, count)

    with pytest.raises(
        ModelError, match=rf"model\.norm\.weight is stored as {dtype}, which kvq doesn't read"
    ):
        load(folder, kv="fp32")
