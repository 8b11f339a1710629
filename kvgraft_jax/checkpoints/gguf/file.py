"""Checkpoints as one GGUF file, as written for llama.cpp, in any quantisation that the gguf package can undo."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import pathlib

from gguf import constants, quants
import numpy as np

from kvgraft_jax import errors
from kvgraft_jax.checkpoints import files
from kvgraft_jax.checkpoints.gguf import config as gguf_config
from kvgraft_jax.checkpoints.gguf import header as gguf_header
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma import parameters as parameters_lib

_TOP = {
    "token_embd.weight": parameters_lib.EMBEDDING_NAME,
    "output_norm.weight": "norm.weight",
    "output.weight": parameters_lib.HEAD_NAME,
    "per_layer_token_embd.weight": "embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "per_layer_projection_norm.weight",
}
_BLOCK = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate.weight": "per_layer_input_gate.weight",
    "proj.weight": "per_layer_projection.weight",
    "post_norm.weight": "post_per_layer_input_norm.weight",
    "ffn_gate_inp.weight": "router.proj.weight",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2.weight": "pre_feedforward_layernorm_2.weight",
    "post_ffw_norm_1.weight": "post_feedforward_layernorm_1.weight",
    "post_ffw_norm_2.weight": "post_feedforward_layernorm_2.weight",
}
_GATE, _UP, _GATE_UP = "ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_gate_up_exps.weight"
_ROTARY_DIVISORS = "rope_freqs.weight"
_NO_ROTATION = np.float32(1e30)


@dataclasses.dataclass(frozen=True)
class Stack:
    """One public tensor: matrix i of the whole is that of all parts, one below the other.

    Attributes:
      parts: one stored tensor, or several of equal shape.
    """

    parts: tuple[gguf_header.StoredTensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the whole."""
        *matrices, columns = self.parts[0].shape
        return (*matrices[:-1], *(len(self.parts) * rows for rows in matrices[-1:]), columns)


@dataclasses.dataclass(frozen=True)
class GGUFSource:
    """An opened GGUF file; see `source.Source`.

    Gemma 3 files store norm weights as 1 + w; `read_rows` gives w, subtracted in float32. Gemma 4 files store w.

    Attributes:
      config: what it describes.
      header: metadata and places of all tensors.
      tensors: public name to what is stored for it.
      shifted: public names of the norm weights that are stored as 1 + w.
    """

    config: config_lib.GemmaConfig
    header: gguf_header.Header
    tensors: Mapping[str, Stack]
    shifted: frozenset[str]

    @property
    def origin(self) -> str:
        """Returns the file."""
        return str(self.header.path)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Stored shape of each tensor by public name."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Reads rows of one tensor; see `source.Source`."""
        parts = self.tensors[name].parts
        rows = parts[0].shape[-2] if len(parts) > 1 else stop
        blocks = []
        while start < stop:
            block, row = divmod(start, rows)
            count = min(stop - start, rows - row)
            matrix, part = divmod(block, len(parts))
            blocks.append(_read_rows(self.header.path, parts[part], matrix * rows + row, count))
            start += count
        values = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
        return values - np.float32(1) if name in self.shifted else values


def open_file(path: str) -> GGUFSource:
    """Reads the header of the GGUF file `path`; no tensor.

    Raises:
      WeightsError: a file that is missing, damaged, of another format, or quantised in a way that cannot be undone.
      ConfigError: a model that this package does not compute.
    """
    header = gguf_header.read_header(path)
    config = gguf_config.parse_config(header)
    for kind in {tensor.kind for tensor in header.tensors.values()}:
        try:
            quants.dequantize(np.zeros((1, constants.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            names = sorted(name for name, tensor in header.tensors.items() if tensor.kind == kind)
            raise errors.WeightsError(
                f"{path}: {', '.join(names[:8])}: {kind.name} cannot be dequantised by the installed gguf package; "
                "use another quantisation, for example Q8_0 or BF16"
            ) from None
    stacks = {name: Stack((tensor,)) for name, tensor in header.tensors.items()}
    for gate in [name for name in stacks if name.endswith("." + _GATE)]:
        up, both = (gate.removesuffix(_GATE) + name for name in (_UP, _GATE_UP))
        if both not in stacks and up in stacks and stacks[up].shape == stacks[gate].shape:
            stacks[both] = Stack((*stacks.pop(gate).parts, *stacks.pop(up).parts))
    if not config.norm_plus_one and config_lib.FULL in config.layer_kinds:
        _check_rotary_divisors(header, config)
        del stacks[_ROTARY_DIVISORS]
    names: dict[str, str] = {}
    for name in stacks:
        twin = names.setdefault(_public_name(name), name)
        if twin != name:
            public = _public_name(name)
            raise errors.WeightsError(
                f"{path}: {twin} and {name} are both {public}; wanted one, convert the model again"
            )
    return GGUFSource(
        config,
        header,
        {public: stacks[name] for public, name in names.items()},
        frozenset(p for p, name in names.items() if name.endswith("norm.weight") and config.norm_plus_one),
    )


def _read_rows(path: pathlib.Path, tensor: gguf_header.StoredTensor, start: int, count: int) -> np.ndarray:
    raw = files.read_bytes(path, tensor.offset + start * tensor.row_bytes, count * tensor.row_bytes)
    # As one long row: the package works through 16 rows at a time, which is slow for short ones.
    return quants.dequantize(raw.reshape(1, -1), tensor.kind).reshape(count, tensor.shape[-1])


def _check_rotary_divisors(header: gguf_header.Header, config: config_lib.GemmaConfig) -> None:
    """Raises unless the file divides the frequencies of full layers by what the configuration says: 1, or infinity."""
    pairs = config.full.head_dim // 2
    rotating = int(config.full.rotary.fraction * pairs)
    wanted = np.where(np.arange(pairs) < rotating, np.float32(1), _NO_ROTATION)
    tensor = header.tensors.get(_ROTARY_DIVISORS)
    found = None if tensor is None else tensor.shape
    if found == (pairs,):
        found = _read_rows(header.path, tensor, 0, 1)[0]
        if np.array_equal(found, wanted):
            return
        found = np.array2string(found, threshold=8)
    raise errors.WeightsError(
        f"{header.path}: {_ROTARY_DIVISORS}: got {found}, wanted {rotating} times 1, then {pairs - rotating} times 1e30"
    )


def _public_name(name: str) -> str:
    """Returns the public name; one that this format does not define stays as it is, and counts as unexpected."""
    block, _, rest = name.partition(".")
    layer, _, tail = rest.partition(".")
    if block == "blk" and tail in _BLOCK:
        return f"layers.{layer}.{_BLOCK[tail]}"
    return _TOP.get(name, name)
