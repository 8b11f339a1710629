"""Files and settings beside the weights of a directory: what would change a result is refused by name, or read."""

from __future__ import annotations

import json

import pytest

from kvgraft_jax import errors
from kvgraft_jax.checkpoints import load
from kvgraft_jax.checkpoints.hf import beside
from tests import small_checkpoints, tiny_tokenizers


@pytest.fixture(scope="module")
def made():
    return load.load_model(small_checkpoints.URI.replace("vocab=97", "vocab=420"))


@pytest.fixture(params=["new", "old"])
def directory(tmp_path, made, request):
    form = {"new": small_checkpoints.new_config, "old": small_checkpoints.old_config}[request.param]
    small_checkpoints.write_safetensors(tmp_path, form(made.config), small_checkpoints.stored(made))
    (tmp_path / "tokenizer.model").write_bytes(tiny_tokenizers.sentencepiece_model())
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        "adapter_config.json",
        "adapter_model.safetensors",
        "adapter_model.bin",
        "adapters.safetensors",
        "pytorch_lora_weights.safetensors",
    ],
)
def test_an_adapter_is_refused(directory, name):
    (directory / name).write_text("{}")
    with pytest.raises(errors.WeightsError, match=f"holds an adapter beside the weights .{name}.*merge_and_unload"):
        load.load_model(f"hf:{directory}")


@pytest.mark.parametrize("name", ["quantize_config.json", "config_sentence_transformers.json", "steering.safetensors"])
def test_a_file_that_may_say_something_is_refused(directory, name):
    (directory / name).write_text("{}")
    with pytest.raises(errors.WeightsError, match=f"holds {name}, and it is not known whether"):
        load.load_model(f"hf:{directory}")


def test_harmless_files_pass(directory, made):
    for name in (
        *("README.md", "LICENSE", ".gitattributes", ".DS_Store", "picture.png", "notes.txt", "pytorch_model.bin"),
        *("preprocessor_config.json", "processor_config.json", "training_args.bin", "trainer_state.json", "train.log"),
        *(
            "model.onnx",
            "pytorch_model-00001-of-00002.bin",
            "m.gguf",
            "USE_POLICY.md",
            "video_preprocessor_config.json",
        ),
    ):
        (directory / name).write_text("x")
    (directory / "original").mkdir()
    (directory / "original" / "params.json").write_text("x")
    assert load.load_model(f"hf:{directory}").digest == made.digest


def generation(directory, **settings):
    (directory / "generation_config.json").write_text(json.dumps(settings))
    return load.load_model(f"hf:{directory}")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("repetition_penalty", 1.3),
        ("encoder_repetition_penalty", 1.1),
        ("no_repeat_ngram_size", 2),
        ("bad_words_ids", [[5]]),
        ("force_words_ids", [[5]]),
        ("min_length", 4),
        ("min_new_tokens", 4),
        ("forced_bos_token_id", 7),
        ("forced_eos_token_id", 7),
        ("forced_decoder_ids", [[1, 7]]),
        ("begin_suppress_tokens", [7]),
        ("sequence_bias", [[[7], -10.0]]),
        ("exponential_decay_length_penalty", [5, 1.1]),
        ("guidance_scale", 1.5),
        ("num_beams", 4),
        ("penalty_alpha", 0.6),
        ("stop_strings", ["stop"]),
        ("token_healing", True),
        ("watermarking_config", {"bias": 2.0}),
    ],
)
def test_settings_that_change_greedy_decoding_are_refused(directory, key, value):
    with pytest.raises(errors.ConfigError, match=f"{key}: got .*take them out of generation_config.json"):
        generation(directory, **{key: value})
    (directory / "generation_config.json").unlink()
    document = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(document | {key: value}))
    with pytest.raises(errors.ConfigError, match=key):
        load.load_model(f"hf:{directory}")


def test_an_unknown_setting_is_refused(directory):
    with pytest.raises(errors.ConfigError, match="unknown key new_penalty = 2"):
        generation(directory, new_penalty=2)


def test_settings_that_do_nothing_are_no_error(directory, made):
    neutral = {key: accepted[0] for key, accepted in beside._NEUTRAL.items()}
    neutral |= {key: None for key in ("repetition_penalty", "new_penalty")}
    sampling = dict(do_sample=True, temperature=1.0, top_k=64, top_p=0.95, max_length=20, cache_implementation="hybrid")
    loaded = generation(directory, **neutral, **sampling, eos_token_id=[1, 106], suppress_tokens=[5, 7])
    assert loaded.digest == made.digest
    assert (loaded.config.stop_ids, loaded.config.suppress_ids) == ((1, 106), (5, 7))
