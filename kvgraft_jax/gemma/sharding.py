"""Decides where arrays lie: on one device, or sharded over a mesh by heads, hidden units and vocabulary.

The mesh has one axis. Heads, hidden units and vocabulary are divided over it. Small arrays, and arrays that cannot be
divided evenly, are copied to every device. XLA adds the communication. A sum over devices has another order than a sum
on one device, so exactness holds per mesh.
"""

from __future__ import annotations

import math

import jax
from jax import lax, sharding
import numpy as np

from kvgraft_jax import determinism, errors
from kvgraft_jax.gemma import parameters as parameters_lib

AXIS = "model"

# The axis that is divided, by the last two names of a parameter's path. Every device has a copy of what is not listed.
# A stack of experts is divided inside each expert.
_DIVIDED = {
    "embedder/embedding": 0,
    "attention/q_proj": 1,
    "attention/k_proj": 1,
    "attention/v_proj": 1,
    "attention/o_proj": 0,
    "mlp/gate_proj": 1,
    "mlp/up_proj": 1,
    "mlp/down_proj": 0,
    "experts/gate_up": 2,
    "experts/down": 1,
    "per_layer_embedder/embedding": 0,
    "per_layer_input/gate": 1,
    "per_layer_input/proj": 0,
}


def make_mesh(num_devices: int) -> sharding.Mesh | None:
    """Makes a mesh of the first `num_devices` devices; None for a single one.

    Raises:
      ConfigError: fewer than one, or more than there are.
    """
    determinism.start_backend()
    devices = jax.devices()
    if type(num_devices) is not int or not 1 <= num_devices <= len(devices):
        hint = ""
        if devices[0].platform == "cpu":
            hint = "; a CPU is N with XLA_FLAGS=--xla_force_host_platform_device_count=N and threads for them, NPROC=4N"
        raise errors.ConfigError(
            f"mesh: got {errors.shown(num_devices)}, wanted 1 to {len(devices)}, the devices of jax{hint}"
        )
    return None if num_devices == 1 else sharding.Mesh(np.array(devices[:num_devices]), (AXIS,))


def check_mesh(mesh: sharding.Mesh | None) -> sharding.Mesh | None:
    """Checks a mesh; a mesh of one device becomes None.

    Raises:
      ConfigError: a mesh of another kind than `make_mesh` gives.
    """
    if mesh is None:
        return None
    is_row = isinstance(mesh, sharding.Mesh) and mesh.devices.ndim == 1 and mesh.size == len(set(mesh.devices)) > 0
    if not is_row or mesh != sharding.Mesh(mesh.devices, (AXIS,)):
        raise errors.ConfigError(
            f"mesh: got {errors.shown(mesh)}, wanted one with the axis {AXIS!r} alone, for XLA to divide over, and "
            "each device once; make_mesh(num_devices) gives one"
        )
    return mesh if mesh.size > 1 else None


def devices(mesh: sharding.Mesh | None) -> list[jax.Device]:
    """Returns the devices that hold the arrays."""
    return jax.local_devices()[:1] if mesh is None else list(mesh.devices.flat)


def whole(mesh: sharding.Mesh | None) -> sharding.Sharding | None:
    """Returns the sharding of a copy on every device. Here and below, None means no mesh: jax's default device."""
    return None if mesh is None else sharding.NamedSharding(mesh, sharding.PartitionSpec())


def of_parameter(
    mesh: sharding.Mesh | None, parameter: parameters_lib.Parameter, shape: tuple[int, ...]
) -> sharding.Sharding | None:
    """Returns the sharding of one parameter, or of a chunk of it, in the given shape."""
    name = "/".join(parameter.path.removesuffix("/kernel").split("/")[-2:])
    return whole(mesh) if mesh is None or name not in _DIVIDED else _divide(mesh, shape, _DIVIDED[name])


def of_rows(mesh: sharding.Mesh | None, shape: tuple[int, ...]) -> sharding.Sharding | None:
    """Returns the sharding of keys or values [..., K, H]."""
    return None if mesh is None else _divide(mesh, shape, len(shape) - 2)


def keep_whole(mesh: sharding.Mesh | None, array: jax.Array) -> jax.Array:
    """Tells the compiler, inside a program, to leave a result whole on every device."""
    return array if mesh is None else lax.with_sharding_constraint(array, whole(mesh))


def keep_rows(mesh: sharding.Mesh | None, rows: jax.Array) -> jax.Array:
    """Tells the compiler, inside a program, to leave keys or values [..., K, H] as the cache is sharded."""
    return rows if mesh is None else lax.with_sharding_constraint(rows, of_rows(mesh, rows.shape))


def share_bytes(shape: tuple[int, ...], dtype: np.dtype, place: sharding.Sharding | None) -> int:
    """Returns the bytes of an array that lie on one device."""
    return math.prod(shape if place is None else place.shard_shape(shape)) * dtype.itemsize


def _divide(mesh: sharding.Mesh, shape: tuple[int, ...], axis: int) -> sharding.Sharding:
    if shape[axis] % mesh.size:
        return whole(mesh)
    return sharding.NamedSharding(mesh, sharding.PartitionSpec(*[None] * axis, AXIS))
