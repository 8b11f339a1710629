"""Where arrays lie: all on one device, or spread over a mesh of several by heads, hidden units and vocabulary.

The mesh has one axis. Of every kernel the first axis that is not the model width is divided over it, of the cache the
key/value heads; what cannot be divided evenly, and everything small, lies whole on every device. XLA adds the
communication. A sum over devices has another order than a sum on one, so exactness holds per mesh.
"""

from __future__ import annotations

import jax
from jax import lax, sharding
import numpy as np

from kvgraft_jax import errors
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma.weights import layout

AXIS = "model"


def make_mesh(num_devices: int) -> sharding.Mesh | None:
    """A mesh of the first `num_devices` devices; None for a single one.

    Raises:
      ConfigError: fewer than one, or more than there are.
    """
    devices = jax.devices()
    if type(num_devices) is not int or not 1 <= num_devices <= len(devices):
        hint = ""
        if devices[0].platform == "cpu":
            hint = f"; several on a CPU: export XLA_FLAGS=--xla_force_host_platform_device_count={num_devices}"
        raise errors.ConfigError(f"mesh: got {num_devices!r}, wanted 1 to {len(devices)}, the devices of jax{hint}")
    return None if num_devices == 1 else sharding.Mesh(np.array(devices[:num_devices]), (AXIS,))


def check_mesh(mesh: sharding.Mesh | None) -> None:
    """Raises `ConfigError` unless `mesh` is None or has the one axis that this package divides over."""
    if mesh is not None and (not isinstance(mesh, sharding.Mesh) or mesh.axis_names != (AXIS,)):
        raise errors.ConfigError(
            f"mesh: got {getattr(mesh, 'axis_names', mesh)!r}, wanted a jax.sharding.Mesh with the one axis {AXIS!r}; "
            "make_mesh(num_devices) gives one"
        )


def devices(mesh: sharding.Mesh | None) -> list[jax.Device]:
    """The devices that hold the arrays."""
    return jax.local_devices()[:1] if mesh is None else list(mesh.devices.flat)


def whole(mesh: sharding.Mesh | None) -> sharding.Sharding | None:
    """A copy on every device. Here and below, None means jax's default device: there is no mesh."""
    return None if mesh is None else sharding.NamedSharding(mesh, sharding.PartitionSpec())


def of_parameter(
    mesh: sharding.Mesh | None, config: config_lib.GemmaConfig, parameter: layout.Parameter
) -> sharding.Sharding | None:
    """The place of one parameter."""
    if mesh is None or parameter.is_scale:
        return whole(mesh)
    others = [axis for axis, size in enumerate(parameter.shape) if size != config.embed_dim]
    return _divided(mesh, parameter.shape, others[0]) if others else whole(mesh)


def of_rows(mesh: sharding.Mesh | None, shape: tuple[int, ...]) -> sharding.Sharding | None:
    """The place of keys or values [S, K, H] of one layer."""
    return None if mesh is None else _divided(mesh, shape, 1)


def kept_whole(mesh: sharding.Mesh | None, array: jax.Array) -> jax.Array:
    """Inside a program: has the compiler leave a result whole on every device."""
    return array if mesh is None else lax.with_sharding_constraint(array, whole(mesh))


def kept_rows(mesh: sharding.Mesh | None, array_SxKxH: jax.Array) -> jax.Array:
    """Inside a program: has the compiler leave keys or values where the cache has them."""
    return array_SxKxH if mesh is None else lax.with_sharding_constraint(array_SxKxH, of_rows(mesh, array_SxKxH.shape))


def _divided(mesh: sharding.Mesh, shape: tuple[int, ...], axis: int) -> sharding.Sharding:
    if shape[axis] % mesh.size:
        return whole(mesh)
    return sharding.NamedSharding(mesh, sharding.PartitionSpec(*[None] * axis, AXIS))
