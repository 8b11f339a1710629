"""Looks at what lies beside the weights of a directory: nothing that would change a result is passed over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import re

from kvgraft_jax import errors
from kvgraft_jax.checkpoints import fields as fields_lib

_ADAPTER = re.compile(r"adapter[s_].*|.*lora.*\.(?:safetensors|bin|pt|npz)", re.IGNORECASE)
# What could say something about the model, by its name.
_TELLING = re.compile(r".+\.(?:json|jinja|safetensors|model|npz|bin|pt)", re.IGNORECASE)
_READ = re.compile(
    r"(?:generation_)?config\.json|model(?:-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
    r"|tokenizer\.(?:json|model)|(?:tokenizer_config|special_tokens_map|added_tokens)\.json|chat_template\.(?:json|jinja)"
)
# The same weights in other forms, settings of other modalities, and what training leaves.
_HARMLESS = re.compile(
    r"\..*|(?:pytorch_model|tf_model|flax_model|model|consolidated)[.-].*|(?:image_|video_)?(?:pre)?processor_config\.json"
    r"|training_args\.(?:bin|json)|(?:optimizer|scheduler|rng_state.*)\.(?:pt|bin)|trainer_state\.json"
    r"|(?:all|train|eval|test|predict)_results\.json|runtime.*\.json|.*metadata\.json"
)

# Settings of generation by what leaves greedy decoding as it is.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "bad_words_ids": (None, []),
    "begin_suppress_tokens": (None, []),
    "constraints": (None, []),
    "diversity_penalty": (0.0, None),
    "dola_layers": (None,),
    "encoder_no_repeat_ngram_size": (0, None),
    "encoder_repetition_penalty": (1.0, None),
    "exponential_decay_length_penalty": (None,),
    "force_words_ids": (None, []),
    "forced_bos_token_id": (None,),
    "forced_decoder_ids": (None, []),
    "forced_eos_token_id": (None,),
    "guidance_scale": (1.0, None),
    "min_length": (0, None),
    "min_new_tokens": (0, None),
    "no_repeat_ngram_size": (0, None),
    "num_beam_groups": (1, None),
    "num_beams": (1, None),
    "penalty_alpha": (0.0, None),
    "prefill_chunk_size": (None,),
    "repetition_penalty": (1.0, None),
    "sequence_bias": (None, {}, []),
    "stop_strings": (None, []),
    "token_healing": (False, None),
    "use_custom_generate": (False, None),
    "watermarking_config": (None,),
}
# Read elsewhere, or of sampling, of the form of an answer, of its length, or of how fast it comes.
_WITHOUT_EFFECT = (
    *("eos_token_id", "suppress_tokens", "bos_token_id", "pad_token_id", "decoder_start_token_id"),
    *("do_sample", "temperature", "top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    *("renormalize_logits", "remove_invalid_values", "length_penalty", "early_stopping", "num_return_sequences"),
    *("max_length", "max_new_tokens", "max_time", "low_memory", "use_cache", "cache_implementation", "cache_config"),
    *("return_legacy_cache", "return_dict_in_generate", "output_attentions", "output_hidden_states", "output_scores"),
    *("output_logits", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "compile_config"),
    *("assistant_confidence_threshold", "prompt_lookup_num_tokens", "max_matching_ngram_size", "disable_compile"),
    *("assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "continuous_batching_config"),
    *("_from_model_config", "transformers_version", "_commit_hash"),
)


def check_names(names: Iterable[str], origin: str) -> None:
    """Raises for files that would change what the model computes, or whose kind is unknown.

    Args:
      names: of the files in a directory, without those in directories below it.
      origin: the directory, for messages.

    Raises:
      WeightsError: an adapter, or a file that may say something about the model and that nothing here reads.
    """
    names = sorted(names)
    adapters = [name for name in names if _ADAPTER.fullmatch(name)]
    if adapters:
        raise errors.WeightsError(
            f"{origin}: holds an adapter beside the weights ({', '.join(adapters)[:300]}), which changes them. Merge "
            "it into the weights and save those (with PEFT: model.merge_and_unload()), or move it away to go without"
        )
    known = (_READ, _HARMLESS)
    unknown = [name for name in names if _TELLING.fullmatch(name) and not any(form.fullmatch(name) for form in known)]
    if unknown:
        raise errors.WeightsError(
            f"{origin}: holds {', '.join(unknown)[:300]}, and it is not known whether the model depends on it; "
            "move it to another place to go without it"
        )


def check_generation(generation: Mapping[str, object], whole: Mapping[str, object], origin: str) -> None:
    """Raises for settings of generation that would change greedy decoding.

    Args:
      generation: the document of generation_config.json; an unknown key in it is refused.
      whole: the document of config.json, in which such settings stood formerly.
      origin: the directory, for messages.

    Raises:
      ConfigError: one error that names all of them.
    """
    fields = fields_lib.Fields(generation)
    fields.ignore(_WITHOUT_EFFECT)
    formerly = fields_lib.Fields({key: value for key, value in whole.items() if key in _NEUTRAL})
    for key, accepted in _NEUTRAL.items():
        fields.only(key, *accepted)
        formerly.only(key, *accepted)
    fields.problems += [problem for problem in formerly.problems if problem not in fields.problems]
    try:
        fields.check()
    except errors.ConfigError as error:
        raise errors.ConfigError(
            f"{origin}: {error}. Tokens are chosen greedily and without these: take them out of generation_config.json "
            "(or config.json) to have that"
        ) from None
