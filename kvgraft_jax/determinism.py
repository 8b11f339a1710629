"""The XLA configuration on which exactness rests: set before any backend exists, probed later, recorded in the pin.

Importing this module changes nothing and imports no jax. `configure()` adds the required flags to the environment
variable XLA_FLAGS; XLA reads it once, when the first backend starts, so afterwards it can only be checked.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import re
import shlex
import sys
from typing import Any

from kvgraft_jax import digest, errors, remembered, xla_flags

COMMON_FLAGS = ("--xla_allow_excess_precision=false",)
CPU_DEFAULT = "--xla_cpu_enable_platform_dependent_math=false"
"""Set unless the caller has set it: kernels of one order of sums on every x86 processor, for every number of rows."""
GPU_FLAGS = ("--xla_gpu_deterministic_ops=true", "--xla_gpu_experimental_force_split_k=1")
_CUDA = (12, 13)

# Extensions of the instruction set that change which kernels run, by architecture; of other architectures, all.
_X86 = re.compile(r"avx\w*|amx_\w+|fma4?|f16c|sse\w*|ssse3|xop")
_ARM = re.compile(r"asimd\w*|sve\w*|sme\w*|neon|fphp|i8mm|\w*bf16")
_INSTRUCTIONS = {"x86_64": _X86, "AMD64": _X86, "i686": _X86, "aarch64": _ARM, "arm64": _ARM, "armv7l": _ARM}


def required_flags() -> tuple[str, ...]:
    """Returns the flags that this machine needs: the common ones, and with a CUDA plugin those for GPUs."""
    has_cuda = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in _CUDA)
    return COMMON_FLAGS + (GPU_FLAGS if has_cuda else ())


def configure() -> None:
    """Puts the required flags into XLA_FLAGS, and the default one; call it before jax starts a backend. Idempotent.

    Where the variable names a file, the flags in it take the place of its name.

    Raises:
      DeterminismError: a flag is set to another value or makes bits depend on the number of threads, the file of flags
        cannot be read, or a backend already runs without the flags; the message says what to do.
    """
    flags = xla_flags.in_environment()
    xla_flags.check(flags)
    missing = []
    for flag in required_flags():
        name, found = flag.partition("=")[0], xla_flags.value_of(flags, flag.partition("=")[0])
        if found is None:
            missing.append(flag)
        elif f"{name}={found}" != xla_flags.canonical(flag):
            raise errors.DeterminismError(
                f"XLA_FLAGS has {name}={found}, but bit-exact K/V grafts need {flag}.\n{_export_line(flags)}"
            )
    is_first = _flags_when_configured.cache_info().currsize == 0
    if is_first and _backends_started() and _changed_since_start():
        raise errors.DeterminismError(
            "XLA_FLAGS was changed in this process and a backend of jax runs already, so nobody can tell which flags "
            f"it read. Import kvgraft_jax's engine first, or start Python with\n{_export_line(flags)}"
        )
    if missing and _backends_started():
        raise errors.DeterminismError(
            f"jax started its backend before kvgraft_jax could set {' '.join(missing)}.\n"
            f"Import kvgraft_jax's engine first, or start Python with\n{_export_line(flags)}"
        )
    if not _backends_started() and xla_flags.value_of(flags, CPU_DEFAULT.partition("=")[0]) is None:
        missing.append(CPU_DEFAULT)
    named = xla_flags.names_file(os.environ.get(xla_flags.VARIABLE, ""))
    if missing or (named and not _backends_started()):
        # Written anew: a file's name takes no more flags, and XLA passes over what stands behind a word that is none.
        os.environ[xla_flags.VARIABLE] = xla_flags.spell([*flags, *missing])
    _flags_when_configured()


# Options of jax that change what is compiled or prevent it: name, and the only value under which the pin is true.
_JAX_OPTIONS = (
    ("jax_enable_x64", False),
    ("jax_disable_jit", False),
    ("jax_disable_most_optimizations", False),
    ("jax_no_tracing", False),
    ("jax_no_execution", False),
    ("jax_enable_pgle", False),
    ("jax_exec_time_optimization_effort", 0.0),
    ("jax_memory_fitting_effort", 0.0),
    ("jax_optimization_level", "UNKNOWN"),
)
_TRANSFER_GUARDS = tuple(
    f"jax_transfer_guard{direction}" for direction in ("", "_host_to_device", "_device_to_device", "_device_to_host")
)
_TINY = 2.0**-60


def check_options() -> None:
    """Raises `DeterminismError` if an option of jax is set that changes compiled programs; microseconds.

    It also refuses any rounding mode of this thread but rounding to the nearest.
    """
    import jax

    if not (1.0 + _TINY == 1.0 == 1.0 - _TINY and -1.0 - _TINY == -1.0):
        raise errors.DeterminismError(
            "the processor's rounding mode was changed (fesetround), wanted rounding to nearest: in another one tables "
            "and products get other bits; set it back before using the engine"
        )

    values = jax.config.values
    for name, wanted in _JAX_OPTIONS:
        if values.get(name, wanted) != wanted:
            raise errors.DeterminismError(
                f"{name}: got {values[name]}, wanted {wanted}: it changes the compiled programs, and so the bits, or "
                f"keeps them from running; call jax.config.update({name!r}, {wanted}) before using the engine"
            )
    for name in _TRANSFER_GUARDS:
        if values.get(name) == "disallow_explicit":
            raise errors.DeterminismError(
                f"{name}: got 'disallow_explicit', which forbids every transfer, also those that an engine lives by; "
                f"call jax.config.update({name!r}, 'disallow'), which forbids the ones that nobody asked for"
            )


def start_backend() -> None:
    """Starts jax's backend, on which everything else rests.

    Raises:
      DeterminismError: jax finds no device of the kind that was asked for.
    """
    import jax

    try:
        jax.devices()
    except RuntimeError as error:
        asked = os.environ.get("JAX_PLATFORMS") or jax.config.jax_platforms
        raise errors.DeterminismError(
            f"jax cannot start on {asked or 'this machine'} ({errors.shown(str(error), 400)}); unset JAX_PLATFORMS or "
            "set it to cpu, or install the driver and jax's build for that device (extra `gpu` of this package)"
        ) from error


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

    given = jax.device_put(np.asarray([0.3, 0.7, 1.1, 1.9], jnp.bfloat16))
    found = jax.device_get(jax.jit(rounds_twice)(given))
    if (found.view(np.uint32) & 0xFFFF).any():  # more bits than a bfloat16 has
        raise errors.DeterminismError(
            "the running XLA backend skips bfloat16 roundings, so it started before the flags were set.\n"
            f"Start Python with\n{_export_line(xla_flags.in_environment())}"
        )


def flags_in_force() -> list[str]:
    """Returns the flags of XLA_FLAGS that can change a result, as `xla_flags.deciding` gives them.

    Raises:
      DeterminismError: the variable changed after `configure()`, so it may not say what the backend runs with.
    """
    then, now = _flags_when_configured(), _deciding()
    if then != now:
        raise errors.DeterminismError(
            f"XLA_FLAGS changed after kvgraft_jax's engine was imported, from {' '.join(then)!r} to {' '.join(now)!r}; "
            "set flags before the import, since the backend reads them once"
        )
    return list(now)


def environment(device: Any) -> dict[str, Any]:
    """Returns what the pin records of the machine and its software, as plain JSON data.

    Args:
      device: the jax device that computes.

    The processor stands in it on every platform and under every flag. The compiler chooses CPU code by its instruction
    set even where the portable flag turns machine-dependent kernels off: code without fused multiply-add rounds
    otherwise. In front of a GPU it computes the rotary tables.

    Raises:
      DeterminismError: XLA_FLAGS changed, or the compiled library cannot be read.
    """
    import jax

    return {
        "platform": device.platform,
        "device_kind": device.device_kind,
        "cpu": cpu_description(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "library": library_digest(),
        "xla_flags": flags_in_force(),
    }


@functools.cache
def library_digest() -> str:
    """Returns one SHA-256 (hex) over the compiled libraries of jaxlib and of the CUDA plugins that are installed.

    Two builds of one version differ here. The files, some 350 MB, are hashed once and remembered in the cache
    directory: two seconds the first time, a millisecond later.

    Raises:
      DeterminismError: a file cannot be read.
    """
    found = {}
    try:
        for package in ("jaxlib", *(f"jax_cuda{version}_{part}" for version in _CUDA for part in ("plugin", "pjrt"))):
            for path in _compiled_files(package):
                found[f"{package}/{path.name}"] = remembered.file_digest(path)
        for path in _compiled_files("jax_plugins", "*/*.so"):
            found[f"{path.parent.name}/{path.name}"] = remembered.file_digest(path)
    except OSError as error:
        raise errors.DeterminismError(
            f"the compiled library of jax cannot be read ({error}), so no pin can name it; install jax again"
        ) from error
    return digest.json_digest(found)


def _compiled_files(package: str, pattern: str = "*.so") -> list[pathlib.Path]:
    spec = importlib.util.find_spec(package)
    places = (spec.submodule_search_locations if spec else None) or ()
    return sorted(path for place in places for path in pathlib.Path(place).glob(pattern))


@functools.cache
def cpu_description() -> dict[str, Any]:
    """Returns this CPU's architecture, model and the instruction-set extensions that choose kernels."""
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
        "instructions": instructions(platform.machine(), features),
    }


def instructions(architecture: str, features: list[str]) -> list[str]:
    """Sorts those of a CPU's features that are instructions for numbers; all of an unknown architecture."""
    family = _INSTRUCTIONS.get(architecture)
    return sorted({feature for feature in features if family is None or family.fullmatch(feature)})


def _deciding() -> tuple[str, ...]:
    return xla_flags.deciding(xla_flags.in_environment(), required_flags())


@functools.cache
def _flags_when_configured() -> tuple[str, ...]:
    """Returns the deciding flags at the first call, which `configure()` makes."""
    return _deciding()


def _export_line(flags: tuple[str, ...]) -> str:
    names = [flag.partition("=")[0] for flag in required_flags()]
    others = [flag for flag in flags if flag.partition("=")[0] not in names]
    return f"export XLA_FLAGS={shlex.quote(xla_flags.spell([*others, *required_flags()]))}"


def _changed_since_start() -> bool:
    """Returns whether XLA_FLAGS changed since this process started; False where the system does not tell."""
    try:
        with open("/proc/self/environ", "rb") as file:
            given = dict(entry.partition(b"=")[::2] for entry in file.read().split(b"\0"))
    except OSError:
        return False
    return given.get(b"XLA_FLAGS", b"").decode(errors="replace") != os.environ.get("XLA_FLAGS", "")


def _backends_started() -> bool:
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bridge.backends_are_initialized()
