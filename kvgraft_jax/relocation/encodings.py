"""The rotary encodings that the study is about, as frozen data, and which one a model's layer uses.

Six cover the layers of every released size. The four with heads 256 or 512 wide are those that certificates speak of.
Gemma 3 27B has heads of 128: pair i of such a head turns like pair 2i of a head of 256, to the last bit.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from kvgraft_jax import errors
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma import rotary as rotary_lib


@dataclasses.dataclass(frozen=True)
class Encoding:
    """One rotary encoding.

    Attributes:
      name: as in the names of certificates.
      head_dim: H, even.
      rotary: base, scale, and the share of the pairs that rotate.
    """

    name: str
    head_dim: int
    rotary: config_lib.RotaryConfig

    def __post_init__(self):
        if self.head_dim <= 0 or self.head_dim % 2:
            raise errors.ConfigError(f"head_dim: got {self.head_dim}, wanted an even number above 0")

    @property
    def num_pairs(self) -> int:
        """R, pairs of a head."""
        return self.head_dim // 2

    @property
    def num_rotated_pairs(self) -> int:
        """Pairs that rotate, the first ones."""
        return int(np.count_nonzero(self.frequencies()))

    def frequencies(self, rule: str = rotary_lib.ENGINE_RULE) -> np.ndarray:
        """Returns the radians per position of each pair, float32 [R]; `rule` as for `rotary_frequencies`."""
        return rotary_lib.rotary_frequencies(self.head_dim, self.rotary, rule=rule)


LOCAL256 = Encoding("local256", 256, config_lib.RotaryConfig(1e4))
GLOBAL256 = Encoding("g3global256", 256, config_lib.RotaryConfig(1e6))
GLOBAL256_SCALE8 = Encoding("g3global256s8", 256, config_lib.RotaryConfig(1e6, 8.0))
GLOBAL512_PARTIAL = Encoding("global512p", 512, config_lib.RotaryConfig(1e6, fraction=0.25))
LOCAL128 = Encoding("local128", 128, config_lib.RotaryConfig(1e4))
GLOBAL128_SCALE8 = Encoding("g3global128s8", 128, config_lib.RotaryConfig(1e6, 8.0))

CERTIFIED = (LOCAL256, GLOBAL256, GLOBAL256_SCALE8, GLOBAL512_PARTIAL)
ENCODINGS = (*CERTIFIED, LOCAL128, GLOBAL128_SCALE8)


def get(name: str) -> Encoding:
    """Returns the encoding called `name`; `ConfigError` lists the known names otherwise."""
    for encoding in ENCODINGS:
        if encoding.name == name:
            return encoding
    known = ", ".join(encoding.name for encoding in ENCODINGS)
    raise errors.ConfigError(f"rotary encoding: got {name!r}, wanted one of {known}")
