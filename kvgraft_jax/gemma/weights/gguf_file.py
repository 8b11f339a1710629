"""Checkpoints as one GGUF file, as written for llama.cpp, in any quantisation that the gguf package can undo."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses

from gguf import constants, quants
import numpy as np

from kvgraft_jax import errors
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma.weights import files, gguf_config, gguf_header, layout

_TOP = {
    "token_embd.weight": layout.EMBEDDING_NAME,
    "output_norm.weight": "norm.weight",
    "output.weight": layout.HEAD_NAME,
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclasses.dataclass(frozen=True)
class GGUFSource:
    """An opened GGUF file; see `source.Source`.

    Norm weights are stored as 1 + w; `read_rows` gives w, subtracted in float32.
    """

    config: config_lib.GemmaConfig
    header: gguf_header.Header
    tensors: Mapping[str, gguf_header.StoredTensor]
    shifted: frozenset[str]

    @property
    def origin(self) -> str:
        """The file."""
        return str(self.header.path)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Stored shape of each tensor by public name."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows of one tensor; see `source.Source`."""
        tensor = self.tensors[name]
        row = tensor.row_bytes
        raw = files.read_bytes(self.header.path, tensor.offset + start * row, (stop - start) * row)
        # As one long row: the package works through 16 rows at a time, which is slow for short ones.
        values = quants.dequantize(raw.reshape(1, -1), tensor.kind).reshape(stop - start, tensor.shape[-1])
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
    names: dict[str, str] = {}
    for name in header.tensors:
        public = _public_name(name)
        twin = next((other for other, taken in names.items() if taken == public), None)
        if twin is not None:
            raise errors.WeightsError(
                f"{path}: {twin} and {name} are both {public}; wanted one, convert the model again"
            )
        names[name] = public
    return GGUFSource(
        config,
        header,
        {names[name]: tensor for name, tensor in header.tensors.items()},
        frozenset(public for name, public in names.items() if name.endswith("norm.weight")),
    )


def _public_name(name: str) -> str:
    """The public name; one that this format does not define stays as it is, and counts as unexpected."""
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _BLOCK and parts[3] == "weight":
        return f"layers.{parts[1]}.{_BLOCK[parts[2]]}.weight"
    return _TOP.get(name, name)
