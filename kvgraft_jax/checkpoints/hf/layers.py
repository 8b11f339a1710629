"""What the config.json of Gemma 3 and 4 say in the same way: fixed settings, layer kinds, rotary encoding."""

from __future__ import annotations

from kvgraft_jax import errors
from kvgraft_jax.checkpoints import fields as fields_lib
from kvgraft_jax.gemma import config as config_lib

KINDS = {"sliding_attention": config_lib.SLIDING, "full_attention": config_lib.FULL}


def check_fixed(fields: fields_lib.Fields) -> None:
    """Notes settings of which one value alone is computed."""
    for key in ("hidden_activation", "hidden_act"):
        fields.only(key, "gelu_pytorch_tanh", None)
    fields.only("tie_word_embeddings", True)
    fields.only("attention_bias", False)
    fields.only("attn_logit_softcapping", None)
    fields.only("quantization_config", None)


def softcap(fields: fields_lib.Fields) -> float | None:
    """Returns the final soft cap, or None."""
    key = "final_logit_softcapping"
    return None if fields.take(key) is None else fields.real(key)


def layer_kinds(fields: fields_lib.Fields, num_layers: int, period: int) -> tuple[str, ...]:
    """Returns the kind of every layer: as listed, else full every `period` layers."""
    names = fields.take("layer_types")
    if names is None:
        return config_lib.repeating_kinds(num_layers, period)
    if not isinstance(names, list) or any(name not in list(KINDS) for name in names) or len(names) != num_layers:
        fields.wrong("layer_types", names, f"{num_layers} names out of {', '.join(KINDS)}")
        return config_lib.repeating_kinds(num_layers, period)
    return tuple(KINDS[name] for name in names)


def rope_parameters(fields: fields_lib.Fields, kind: str, kinds: tuple[str, ...]) -> dict[str, object] | None:
    """Returns the entry of attention kind `kind` in `rope_parameters`.

    Args:
      fields: the document.
      kind: the public name of the attention kind.
      kinds: the kind of every layer; one that is among them needs an entry.

    Returns:
      A copy, with `rope_type` spelled so; None without `rope_parameters`, or without an entry for a kind not in use.
    """
    entries = fields.take("rope_parameters")
    if entries is None:
        return None
    if not isinstance(entries, dict) or set(entries) - set(KINDS):
        fields.problems.append(f"rope_parameters: got {entries!r}, wanted entries {', '.join(KINDS)}")
        return None
    entry = entries.get(kind)
    if entry is None and KINDS[kind] not in kinds:
        return None
    return rope_entry(fields, f"rope_parameters: {kind}", entry, kind)


def rope_entry(fields: fields_lib.Fields, key: str, entry: object, kind: str) -> dict[str, object] | None:
    """Copies the rotary entry under `key`, with `type` called `rope_type`; None, and noted, if it is not an object."""
    if not isinstance(entry, dict) or not entry:
        fields.wrong(key, entry, "an object with rope_type, rope_theta and what the type needs")
        return None
    entry = dict(entry)
    if "type" in entry:
        old = entry.pop("type")
        if entry.setdefault("rope_type", old) != old:
            fields.problems.append(
                f"rotary encoding of {kind}: type: got {old!r} beside rope_type {entry['rope_type']!r}, wanted one"
            )
    return entry


def rotary(
    fields: fields_lib.Fields, kind: str, rope: dict[str, object], base: object, types: tuple[str, ...]
) -> config_lib.RotaryConfig:
    """Reads the rotary encoding in `rope`; notes a type outside `types` or keys that its type does not read.

    Args:
      fields: the document, for its list of problems.
      kind: the public name of the attention kind.
      rope: rope_type, rope_theta, factor, partial_rotary_factor.
      base: theta where `rope` has none.
      types: those that the architecture has, out of "default", "linear" (frequencies divided by factor) and
        "proportional" (the same, and partial_rotary_factor is the share that rotates).
    """
    rope_type = rope.pop("rope_type", "default")
    values = {"rope_theta": rope.pop("rope_theta", base), "factor": 1.0, "partial_rotary_factor": 1.0}
    if rope_type in ("linear", "proportional"):
        values["factor"] = rope.pop("factor", None if rope_type == "linear" else 1.0)
    if rope_type == "proportional":
        values["partial_rotary_factor"] = rope.pop("partial_rotary_factor", 1.0)
    elif rope.get("partial_rotary_factor") in (None, 1):
        rope.pop("partial_rotary_factor", None)
    where = f"rotary encoding of {kind}"
    if rope_type not in types or rope:
        fields.problems.append(f"{where}: got type {rope_type!r} with {rope}, wanted one of {', '.join(types)}")
    for key, value in values.items():
        if type(value) not in (int, float) or (type(value) is int and abs(value) >= 1 << 63):
            fields.wrong(f"{where}: {key}", value, "a number")
            return config_lib.RotaryConfig(1e4)
    try:
        return config_lib.RotaryConfig(*map(float, values.values()))
    except errors.ConfigError as error:
        fields.problems.append(f"{where}: {error}")
        return config_lib.RotaryConfig(1e4)
