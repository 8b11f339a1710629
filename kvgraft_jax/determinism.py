"""The XLA configuration on which exactness rests: set before any backend exists, probed later, recorded in the pin.

Importing this module changes nothing and imports no jax. `configure()` adds the required flags to the environment
variable XLA_FLAGS; XLA reads it once, when the first backend starts, so afterwards it can only be checked.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import platform
import sys
from typing import Any

from kvgraft_jax import errors

COMMON_FLAGS = ("--xla_allow_excess_precision=false",)
GPU_FLAGS = ("--xla_gpu_deterministic_ops=true", "--xla_gpu_experimental_force_split_k=1")
PORTABLE_CPU_FLAG = "--xla_cpu_enable_platform_dependent_math=false"

# Flags that move files or logs about, never a bit of a result: they stay out of the pin.
_INERT_PREFIXES = ("--xla_dump", "--xla_force_host_platform_device_count", "--xla_hlo_profile")
# Instruction-set extensions that change which CPU kernels run.
_CPU_FEATURES = ("avx", "amx", "fma", "f16c", "sse4", "neon", "asimd", "sve", "bf16", "i8mm", "fphp", "sme")


def required_flags() -> tuple[str, ...]:
    """The flags that this machine needs: the common ones, and the GPU ones where a CUDA plugin is installed."""
    has_cuda = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
    return COMMON_FLAGS + (GPU_FLAGS if has_cuda else ())


def configure() -> None:
    """Puts the required flags into XLA_FLAGS; call it before jax starts a backend. Idempotent.

    Raises:
      DeterminismError: a flag is set to another value, or a backend already runs without the flags; the message
        holds the exact line to export.
    """
    values = _flags()
    missing = []
    for flag in required_flags():
        name, _, value = flag.partition("=")
        if name not in values:
            missing.append(flag)
        elif values[name].lower() not in _spellings(value):
            raise errors.DeterminismError(
                f"XLA_FLAGS has {name}={values[name]}, but bit-exact K/V grafts need {flag}.\n{_export_line(values)}"
            )
    is_first = _flags_when_configured.cache_info().currsize == 0
    if is_first and _backends_started() and _changed_since_start():
        raise errors.DeterminismError(
            "XLA_FLAGS was changed in this process and a backend of jax runs already, so nobody can tell which flags "
            f"it read. Import kvgraft_jax's engine first, or start Python with\n{_export_line(values)}"
        )
    if missing and _backends_started():
        raise errors.DeterminismError(
            f"jax started its backend before kvgraft_jax could set {' '.join(missing)}.\n"
            f"Import kvgraft_jax's engine first, or start Python with\n{_export_line(values)}"
        )
    if missing:
        os.environ["XLA_FLAGS"] = " ".join([*os.environ.get("XLA_FLAGS", "").split(), *missing])
    _flags_when_configured()


# Options of jax that change what is compiled: name, and the only value under which the pin is true.
_JAX_OPTIONS = (
    ("jax_enable_x64", False),
    ("jax_disable_jit", False),
    ("jax_disable_most_optimizations", False),
)


def check_options() -> None:
    """Raises `DeterminismError` if an option of jax is set that changes compiled programs; microseconds."""
    import jax

    values = jax.config.values
    for name, wanted in _JAX_OPTIONS:
        if values.get(name, wanted) != wanted:
            raise errors.DeterminismError(
                f"{name}: got {values[name]}, wanted {wanted}: it changes the compiled programs and so the bits; "
                f"call jax.config.update({name!r}, {wanted}) before using the engine"
            )


def assert_in_force() -> None:
    """Raises `DeterminismError` unless the running backend keeps every bf16 rounding and jax's options are in order.

    The environment variable only says what was asked for; this compiles a small program whose result tells
    whether XLA elides roundings to bfloat16.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    check_options()

    def rounds_twice(x: jax.Array) -> jax.Array:
        return (jnp.tanh(x.astype(jnp.float32)).astype(x.dtype) * x).astype(jnp.float32)

    found = np.asarray(jax.jit(rounds_twice)(jnp.asarray([0.3, 0.7, 1.1, 1.9], jnp.bfloat16)))
    if (found.view(np.uint32) & 0xFFFF).any():  # more bits than a bfloat16 has
        raise errors.DeterminismError(
            "the running XLA backend skips bfloat16 roundings, so it started before the flags were set.\n"
            f"Start Python with\n{_export_line(_flags())}"
        )


def flags_in_force() -> list[str]:
    """The flags of XLA_FLAGS that can change a result, sorted; the last of a repeated flag counts, as in XLA.

    Raises:
      DeterminismError: the variable changed after `configure()`, so it may not say what the backend runs with.
    """
    then, now = _flags_when_configured(), _deciding(_flags())
    if then != now:
        raise errors.DeterminismError(
            f"XLA_FLAGS changed after kvgraft_jax's engine was imported, from {' '.join(then)!r} to {' '.join(now)!r}; "
            "set flags before the import, since the backend reads them once"
        )
    return list(now)


def environment(device: Any) -> dict[str, Any]:
    """What the pin records of the machine and its software, as plain JSON data.

    Args:
      device: the jax device that computes.

    The CPU is recorded (model and instruction-set extensions) only where its kernels decide the bits: on the CPU
    backend, unless the portable flag switches machine-dependent kernels off.
    """
    import jax

    flags = flags_in_force()
    cpu = cpu_description() if device.platform == "cpu" and PORTABLE_CPU_FLAG not in flags else None
    return {
        "platform": device.platform,
        "device_kind": device.device_kind,
        "cpu": cpu,
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "xla_flags": flags,
    }


def cpu_description() -> dict[str, Any]:
    """This CPU's architecture, model and the instruction-set extensions that choose kernels."""
    fields: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file.read().split("\n\n")[0].splitlines():
                name, _, value = line.partition(":")
                fields[name.strip()] = value.strip()
    except OSError:
        fields = {"model": platform.processor()}
    features = (fields.get("flags") or fields.get("Features") or "").split()
    model = [fields.get(name, "") for name in ("vendor_id", "cpu family", "model", "CPU part")]
    return {
        "architecture": platform.machine(),
        "model": " ".join(part for part in model if part),
        "instructions": sorted(feature for feature in features if any(part in feature for part in _CPU_FEATURES)),
    }


def _flags() -> dict[str, str]:
    return dict(flag.partition("=")[::2] for flag in os.environ.get("XLA_FLAGS", "").split())


def _deciding(values: dict[str, str]) -> tuple[str, ...]:
    kept = {name: value for name, value in values.items() if not name.startswith(_INERT_PREFIXES)}
    return tuple(sorted(f"{name}={value}" if value else name for name, value in kept.items()))


@functools.cache
def _flags_when_configured() -> tuple[str, ...]:
    """The deciding flags at the first call, which `configure()` makes."""
    return _deciding(_flags())


def _export_line(values: dict[str, str]) -> str:
    wanted = dict(values, **dict(flag.partition("=")[::2] for flag in required_flags()))
    return 'export XLA_FLAGS="' + " ".join(f"{n}={v}" if v else n for n, v in wanted.items() if n) + '"'


def _spellings(value: str) -> tuple[str, ...]:
    return {"true": ("true", "1", ""), "false": ("false", "0")}.get(value, (value,))


def _changed_since_start() -> bool:
    """Whether XLA_FLAGS differs from what this process was started with; False where the system does not tell."""
    try:
        with open("/proc/self/environ", "rb") as file:
            given = dict(entry.partition(b"=")[::2] for entry in file.read().split(b"\0"))
    except OSError:
        return False
    return given.get(b"XLA_FLAGS", b"").decode(errors="replace") != os.environ.get("XLA_FLAGS", "")


def _backends_started() -> bool:
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bridge.backends_are_initialized()
