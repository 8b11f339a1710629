"""GGUF files: the same model as from safetensors, dequantisation by rows, and headers that lie are refused."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest

from experiments.bench import export
from kvgraft_jax import errors
from kvgraft_jax.checkpoints import assemble, load
from kvgraft_jax.checkpoints.gguf import config as gguf_config
from kvgraft_jax.checkpoints.gguf import header as gguf_header
from kvgraft_jax.gemma import configurations
from tests import chat_templates, small_checkpoints, tiny_tokenizers

KIND = gguf.GGMLQuantizationType


made, tensors = small_checkpoints.made, small_checkpoints.tensors


@pytest.mark.parametrize("kind", [KIND.F32, KIND.BF16])
def test_same_model_as_from_safetensors(tmp_path, monkeypatch, made, tensors, kind):
    monkeypatch.setattr(assemble, "_CHUNK_ELEMENTS", 500)  # many row blocks for each tensor
    uri = small_checkpoints.write_gguf(tmp_path / "m.gguf", made.config, dict(reversed(tensors.items())), kind)
    loaded = load.load_model(uri)
    assert loaded.digest == made.digest
    assert loaded.config.document() == made.config.document()
    assert loaded.tokenizer is None and loaded.chat is None
    directory = small_checkpoints.write_safetensors(tmp_path / "hf", small_checkpoints.new_config(made.config), tensors)
    assert load.load_model(uri, "float32").digest == load.load_model(directory, "float32").digest != made.digest


@pytest.mark.parametrize("kind", [KIND.Q8_0, KIND.Q4_0, KIND.F16])
def test_quantised_tensors(tmp_path, monkeypatch, made, tensors, kind):
    monkeypatch.setattr(assemble, "_CHUNK_ELEMENTS", 500)
    loaded = load.load_model(small_checkpoints.write_gguf(tmp_path / "m.gguf", made.config, tensors, kind), "float32")
    found = export.tensors(loaded)
    for name, array in tensors.items():
        array = array.astype(np.float32)
        if not name.endswith("norm.weight"):
            array = gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)
        assert np.array_equal(found[name], array), name


def test_norms_are_shifted_in_float32(tmp_path, made, tensors):
    stored = dict(tensors)
    tiny = np.full(64, 2.0**-12, np.float32)
    stored["layers.2.input_layernorm.weight"] = tiny
    loaded = load.load_model(small_checkpoints.write_gguf(tmp_path / "m.gguf", made.config, stored))
    assert np.array_equal(loaded.params["layer_2"]["pre_attention_norm"]["scale"], tiny.astype(small_checkpoints.BF16))


def test_tied_head(tmp_path, made, tensors):
    table = tensors["embed_tokens.weight"]
    uri = small_checkpoints.write_gguf(tmp_path / "a.gguf", made.config, tensors | {"lm_head.weight": table})
    assert load.load_model(uri).digest == made.digest
    uri = small_checkpoints.write_gguf(tmp_path / "b.gguf", made.config, tensors | {"lm_head.weight": table * 2})
    with pytest.raises(errors.WeightsError, match="lm_head.weight differs"):
        load.load_model(uri)


def test_one_error_lists_all_tensors(tmp_path, made, tensors):
    wrong = dict(tensors)
    del wrong["layers.4.mlp.down_proj.weight"]
    wrong["norm.weight"] = np.zeros(65, np.float32)
    with pytest.raises(errors.WeightsError) as caught:
        load.load_model(small_checkpoints.write_gguf(tmp_path / "m.gguf", made.config, wrong))
    assert "missing: layers.4.mlp.down_proj.weight" in str(caught.value)
    assert "wrong shape: norm.weight: got (65,), wanted (64,)" in str(caught.value)


def test_truncated_at_every_boundary(tmp_path, made, tensors):
    path = tmp_path / "m.gguf"
    uri = small_checkpoints.write_gguf(path, made.config, tensors)
    whole = path.read_bytes()
    header = gguf_header.read_header(path)
    first = min(tensor.offset for tensor in header.tensors.values())
    for size in [0, 3, 23, *range(24, first, 97), first, len(whole) // 2, len(whole) - 64]:
        path.write_bytes(whole[:size])
        with pytest.raises(errors.WeightsError, match="m.gguf"):
            load.load_model(uri)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _file(*, version: int = 3, tensors: int = 0, values: int = 0, body: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values) + body


def _tensor(name: str, shape: list[int], kind: int, offset: int = 0) -> bytes:
    return _string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


_ALIGNMENT = _string("general.alignment")
_ARCHITECTURE = _string("general.architecture") + struct.pack("<I", 8) + _string("gemma3")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is not a GGUF file"),
        (b"\x08\x00\x00\x00\x00\x00\x00\x00{}" + bytes(40), "is not a GGUF file"),
        (_file(version=1), "version 1"),
        (_file(version=3 << 24), "little-endian"),
        (_file(tensors=1 << 60), "items declared"),
        (_file(values=1 << 60), "items declared"),
        (_file(values=1, body=_string("k") + struct.pack("<IIQ", 9, 4, 1 << 60)), "items declared"),
        (
            _file(values=1, body=_string("k") + struct.pack("<IIQ", 9, 8, 2) + struct.pack("<QQ", 1 << 62, 0)),
            "string of",
        ),
        (_file(values=1, body=_string("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(20)), "array of type 9"),
        (_file(values=1, body=_string("k") + struct.pack("<I", 77) + bytes(20)), "value type 77"),
        (_file(values=2, body=_ARCHITECTURE * 2), "appears twice"),
        (_file(tensors=1, body=_tensor("t", [1 << 41], 0) + bytes(64)), "ends at byte"),
        (_file(tensors=1, body=_tensor("t", [1 << 40, 1 << 40, 1 << 40], 0) + bytes(64)), "ends at byte"),
        (_file(tensors=1, body=_tensor("t", [33], 8) + bytes(64)), "do not divide"),
        (_file(tensors=1, body=_tensor("t", [8], 250) + bytes(64)), "quantisation 250"),
        (_file(tensors=1, body=_tensor("t", [1] * 5, 0) + bytes(64)), "5 dimensions"),
        (_file(tensors=2, body=_tensor("t", [1], 0) * 2 + bytes(64)), "appears twice"),
        (_file(tensors=1, body=_tensor("t", [1], 0, 32) + bytes(128)), "tensor t begins at byte 96, wanted 64"),
        (_file(values=1, body=_ALIGNMENT + struct.pack("<II", 4, 24)), "general.alignment: got 24"),
        (_file(values=1, body=_ALIGNMENT + struct.pack("<II", 4, 0)), "general.alignment: got 0"),
    ],
)
def test_headers_that_lie_are_refused(tmp_path, content, reason):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(errors.WeightsError, match="m.gguf") as caught:
        load.load_model(f"gguf:{tmp_path / 'm.gguf'}")
    assert reason in str(caught.value)


@pytest.mark.parametrize("alignment", [8, 32, 256])
def test_any_flipped_bit_of_an_offset_is_damage(tmp_path, alignment):
    writer = gguf.GGUFWriter(tmp_path / "whole.gguf", "gemma3")
    writer.add_custom_alignment(alignment)
    names = [f"tensor_{index}" for index in range(3)]
    for index, name in enumerate(names):
        writer.add_tensor(name, np.full(70 + index, index, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    whole = (tmp_path / "whole.gguf").read_bytes()
    assert len(gguf_header.read_header(tmp_path / "whole.gguf").tensors) == 3
    for name in names:
        place = whole.index(name.encode()) + len(name) + 4 + 8 + 4
        for bit in range(64):
            (offset,) = struct.unpack_from("<Q", whole, place)
            changed = whole[:place] + struct.pack("<Q", offset ^ 1 << bit) + whole[place + 8 :]
            (tmp_path / "m.gguf").write_bytes(changed)
            with pytest.raises(errors.WeightsError, match="m.gguf: header is damaged"):
                gguf_header.read_header(tmp_path / "m.gguf")


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(errors.WeightsError, match="does not exist"):
        load.load_model(f"gguf:{tmp_path / 'm.gguf'}")
    with pytest.raises(errors.WeightsError, match="is a directory"):
        load.load_model(f"gguf:{tmp_path}")


def test_quantisations_that_cannot_be_undone(tmp_path):
    body = _ARCHITECTURE + _tensor("token_embd.weight", [64, 2], KIND.I8) + bytes(256)
    (tmp_path / "m.gguf").write_bytes(_file(tensors=1, values=1, body=body))
    header = gguf_header.read_header(tmp_path / "m.gguf")
    assert header.tensors["token_embd.weight"].shape == (2, 64)
    with pytest.raises(errors.ConfigError, match="missing context_length"):
        load.load_model(f"gguf:{tmp_path / 'm.gguf'}")


def test_integer_tensors_are_named(tmp_path, made, tensors):
    path = tmp_path / "m.gguf"
    uri = small_checkpoints.write_gguf(path, made.config, tensors)
    raw = path.read_bytes()
    place = raw.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8
    path.write_bytes(raw[:place] + struct.pack("<I", KIND.I32) + raw[place + 4 :])
    with pytest.raises(errors.WeightsError, match="output_norm.weight: I32 cannot be dequantised"):
        load.load_model(uri)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"gemma3.rope.freq_base": None, "gemma3.block_count": None}, "missing block_count; missing rope.freq_base"),
        ({"gemma3.rope.scaling.type": "yarn"}, "rope.scaling.type: got 'yarn', wanted 'none' or 'linear'"),
        ({"gemma3.rope.scaling.factor": None}, "missing rope.scaling.factor"),
        ({"gemma3.final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"tokenizer.ggml.eos_token_id": "1"}, "eos_token_id: got '1'"),
        ({"gemma3.block_count": 7.0}, "block_count: got 7.0"),
        ({"gemma3.expert_count": 8}, "unknown key expert_count"),
        ({"gemma3.attention.value_length": 64}, "attention.value_length"),
        ({"gemma3.attention.head_count_kv": [1, 2]}, "head_count_kv"),
        ({"gemma3.attention.sliding_window_pattern": [True, False]}, "sliding_window_pattern"),
    ],
)
def test_metadata_that_would_give_other_numbers(tmp_path, made, tensors, metadata, named):
    uri = small_checkpoints.write_gguf(tmp_path / "m.gguf", made.config, tensors, metadata=metadata)
    with pytest.raises(errors.ConfigError, match="m.gguf: ") as caught:
        load.load_model(uri)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "factor", "scale"),
    [(None, 4.0, 4.0), (None, None, 1.0), ("linear", 4.0, 4.0), ("none", None, 1.0), ("none", 4.0, 1.0)],
)
def test_rotary_scaling_is_linear_unless_the_file_says_none(tmp_path, made, tensors, kind, factor, scale):
    metadata = {"gemma3.rope.scaling.type": kind, "gemma3.rope.scaling.factor": factor}
    small_checkpoints.write_gguf(tmp_path / "m.gguf", made.config, tensors, metadata=metadata)
    config = gguf_config.parse_config(gguf_header.read_header(tmp_path / "m.gguf"))
    assert (config.full.rotary.scale, config.sliding.rotary.scale) == (scale, 1.0)


@pytest.mark.parametrize("twin", ["norm.weight", "layers.0.mlp.down_proj.weight"])
def test_two_tensors_of_one_public_name_are_refused(tmp_path, monkeypatch, made, tensors, twin):
    in_file = small_checkpoints.gguf_name
    monkeypatch.setattr(small_checkpoints, "gguf_name", lambda name: twin if name == "extra" else in_file(name))
    uri = small_checkpoints.write_gguf(tmp_path / "m.gguf", made.config, tensors | {"extra": tensors[twin]})
    with pytest.raises(errors.WeightsError, match=f"{in_file(twin)} and {twin} are both {twin}"):
        load.load_model(uri)


def test_other_architectures(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(errors.ConfigError, match="general.architecture: got 'llama', wanted 'gemma3' or 'gemma4'"):
        load.load_model(f"gguf:{tmp_path / 'm.gguf'}")


@pytest.mark.parametrize("name", configurations.CONFIGURATIONS)
def test_metadata_gives_the_released_configurations(name):
    config = configurations.get(name)
    values = {"general.architecture": "gemma3" if config.norm_plus_one else "gemma4"}
    for key, value in small_checkpoints.gguf_metadata(config).items():
        if not key.startswith("gemma3.rope.scaling") or config.full.rotary.scale != 1:
            values[key] = np.asarray(value) if isinstance(value, list) else value
    values[f"{values['general.architecture']}.attention.layer_norm_rms_epsilon"] = float(np.float32(1e-6))
    table = gguf_header.StoredTensor(0, KIND.F32, (config.vocab_size, config.embed_dim))
    tensors = {"token_embd.weight": table}
    if not config.full.values_are_keys:
        tensors["blk.4.attn_v.weight"] = tensors["blk.5.attn_v.weight"] = table
    header = gguf_header.Header(small_checkpoints.pathlib.Path("m.gguf"), values, tensors)
    assert gguf_config.parse_config(header).document() == config.document()


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"attention.key_length_swa": None, "block_count": None}, "missing attention.key_length_swa"),
        ({"attention.sliding_window_pattern": None}, "sliding_window_pattern: got None"),
        ({"attention.sliding_window_pattern": [True] * 9}, "sliding_window_pattern"),
        ({"attention.head_count_kv": [2] * 9 + [1]}, "head_count_kv: got [2, 2"),
        ({"attention.head_count_kv": [2] * 9}, "head_count_kv: got [2, 2"),
        ({"feed_forward_length": [96] * 9 + [192]}, "feed_forward_length"),
        ({"feed_forward_length": 96.0}, "feed_forward_length: got 96.0"),
        ({"rope.dimension_count": 16}, "rope.dimension_count: got 16, wanted 64"),
        ({"attention.value_length_swa": 64}, "value_length_swa: got 64, wanted 32"),
        ({"rope.freq_base_swa": 0.5}, "rope.freq_base_swa: got 0.5"),
        ({"rope.scaling.type": "linear"}, "rope.scaling.type"),
        ({"expert_count": 8}, "missing expert_used_count; missing expert_feed_forward_length"),
        ({"expert_count": 2, "expert_used_count": 3, "expert_feed_forward_length": 8}, "expert_used_count: got 3"),
        ({"rope.partial_rotary_factor": 0.5}, "unknown key rope.partial_rotary_factor = 0.5"),
        ({"attention.shared_kv_layers": 10, "feed_forward_length": 96}, "num_kv_shared_layers: got 10"),
    ],
)
def test_gemma_4_metadata_that_would_give_other_numbers(tmp_path, metadata, named):
    loaded = load.load_model(small_checkpoints.SMALL_URIS["gemma-4-e2b"])
    metadata = {f"gemma4.{key}": value for key, value in metadata.items()}
    stored = small_checkpoints.stored(loaded) | small_checkpoints.rotary_divisors(loaded.config)
    uri = small_checkpoints.write_gguf(tmp_path / "m.gguf", loaded.config, stored, metadata=metadata)
    with pytest.raises(errors.ConfigError, match="m.gguf: ") as caught:
        load.load_model(uri)
    assert named in str(caught.value)


def test_stop_tokens_of_a_model_with_turns(tmp_path, made, tensors):
    tokens = [f"t{i}" for i in range(95)] + ["<eos>", "<end_of_turn>"]
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 96, "tokenizer.chat_template": "x"}
    path = tmp_path / "m.gguf"
    small_checkpoints.write_gguf(path, made.config, tensors, metadata=metadata)
    assert gguf_config.parse_config(gguf_header.read_header(path)).stop_ids == (95, 96)


def test_gemma_4_with_its_tokenizer_and_turns(tmp_path):
    held = tiny_tokenizers.gguf_merges_metadata()
    metadata = {key: value if isinstance(value, str | int) else _plain(value) for key, value in held.items()}
    vocab = f"vocab={len(held['tokenizer.ggml.tokens'])}"
    made = load.load_model(small_checkpoints.SMALL_URIS["gemma-4-12b"].replace("vocab=97", vocab))
    stored = small_checkpoints.stored(made) | small_checkpoints.rotary_divisors(made.config)
    metadata |= {"tokenizer.chat_template": chat_templates.GEMMA4_EMPTY_THOUGHT}
    loaded = load.load_model(small_checkpoints.write_gguf(tmp_path / "m.gguf", made.config, stored, metadata=metadata))
    assert loaded.digest == made.digest
    text = "hello the code"
    assert loaded.tokenizer.decode(loaded.tokenizer.encode(text)) == text
    prefix_ids, suffix_ids = loaded.chat.split("the code", "hello")
    prompt = [*prefix_ids, *suffix_ids]
    assert prompt.count(2) == 1 and prompt[:2] == [2, loaded.tokenizer.controls["<|turn>"]]


def _plain(values) -> list:
    return [value.decode() if isinstance(value, bytes) else int(value) for value in values]
