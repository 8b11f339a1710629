"""The workspace: the one cache in which an engine computes, and which blocks of contexts lie in it.

Contexts are values made of blocks of their own. A call copies the blocks that it needs into the workspace, runs, and
copies out the blocks that it wrote. A block that already lies there is not copied again, and sequences that share a
block share its place. A call that fails drops the workspace; no context is lost with it.
"""

from __future__ import annotations

from collections.abc import Sequence
import weakref

import jax
import numpy as np

from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.gemma import sharding
from kvgraft_jax.runtime import step as step_lib


class Workspace:
    """A cache and the account of its blocks.

    Attributes:
      cache: donated to every step and taken back from it.
      blocks_per_row: length of a row of the table: blocks of the longest sequence.
    """

    def __init__(self, config: step_lib.StepConfig, num_blocks: int, blocks_per_row: int):
        self.cache = config.make_cache(num_blocks)
        self.blocks_per_row = blocks_per_row
        self._config = config
        self._users = [0] * num_blocks
        self._used_at = [0] * num_blocks
        self._held: list[weakref.ref[cache_lib.CacheBlock] | None] = [None] * num_blocks
        self._clock = 0

    def admit(self, blocks: Sequence[cache_lib.CacheBlock], num_shared: int, num_blocks: int) -> list[int] | None:
        """Makes place for a sequence and brings its blocks in.

        Args:
          blocks: of the context that it continues.
          num_shared: how many of them it only reads; it writes to the one behind them, if there is one.
          num_blocks: that it needs in all.

        Returns:
          The place of every block, or None while others leave too little space.
        """
        resident = {id(held): place for place in range(len(self._held)) if (held := self._block(place)) is not None}
        shared = [resident.get(id(block)) for block in blocks[:num_shared]]
        kept = {place for place in shared if place is not None}
        needed = num_blocks - len(kept)
        free = [place for place, users in enumerate(self._users) if users == 0 and place not in kept]
        if needed > len(free):
            return None
        # Empty places first, then those whose block has waited longest.
        free.sort(key=lambda place: (self._block(place) is not None, self._used_at[place]))
        continued = resident.get(id(blocks[num_shared])) if num_shared < len(blocks) else None
        if continued in free:  # It may write where the block lies: nobody else reads there.
            free.remove(continued)
            free.insert(0, continued)
        else:
            continued = None
        self._clock += 1
        table = []
        for index in range(num_blocks):
            place = shared[index] if index < num_shared and shared[index] is not None else None
            if place is None:
                if index == num_shared and continued is not None:
                    place = continued
                    free.remove(place)
                else:
                    place = next(other for other in free if other != continued)
                    free.remove(place)
                    if index < len(blocks):
                        self._put(blocks[index], place)
                self._held[place] = weakref.ref(blocks[index]) if index < num_shared else None
            self._users[place] += 1
            self._used_at[place] = self._clock
            table.append(place)
        return table

    def release(self, table: Sequence[int]) -> None:
        """Gives the places of a sequence back."""
        for place in table:
            self._users[place] -= 1

    def take(self, place: int) -> cache_lib.CacheBlock:
        """Copies a block out, and remembers that it lies here."""
        block = cache_lib.take_block(self.cache, self._index(place), self._config.model, self._config.mesh)
        self._held[place] = weakref.ref(block)
        return block

    def _put(self, block: cache_lib.CacheBlock, place: int) -> None:
        config = self._config
        self.cache = cache_lib.put_block(self.cache, block, self._index(place), config.model, config.mesh)

    def _block(self, place: int) -> cache_lib.CacheBlock | None:
        held = self._held[place]
        return None if held is None else held()

    def _index(self, place: int) -> jax.Array:
        return jax.device_put(np.int32(place), sharding.whole(self._config.mesh))
