"""The environment variable XLA_FLAGS, read as XLA reads it, and what of it a pin holds or refuses.

XLA takes a value whose first character is not a hyphen for the name of a file that holds the flags. Flags are separated
by whitespace; a value in double quotes may hold whitespace and escape characters with a backslash, one in single
quotes holds all but such a quote. XLA passes over everything from the first word on that is not a flag.
"""

from __future__ import annotations

from collections.abc import Sequence
import os
import pathlib
import re

from kvgraft_jax import digest, errors, remembered

VARIABLE = "XLA_FLAGS"

# Flags that print, dump or profile, and change no result: they stay out of the pin.
_INERT_PREFIXES = ("--xla_dump_", "--xla_gpu_dump_")
_INERT = (
    "--xla_detailed_logging",
    "--xla_enable_dumping",
    "--xla_enable_scoped_logging_timers",
    "--xla_gpu_print_compilation_stats",
    "--xla_hlo_profile",
)
# Flags that name a file or directory from which XLA reads what it does: its content counts, not its place.
_READS_FILE = re.compile(r"--xla_\w+_(dir|file|filename|from|path)")
# Switches that give products or sums to a library whose bits depend on the number of threads, or leave out the passes
# that give them to the library on which exactness rests.
_REFUSED_SWITCHES = (
    "--xla_cpu_experimental_onednn_custom_call",
    "--xla_cpu_use_acl",
    "--xla_cpu_use_onednn",
    "--xla_cpu_use_xnnpack",
    "--xla_disable_all_hlo_passes",
)
_REFUSED_LISTS = (
    "--xla_cpu_experimental_onednn_fusion_type",
    "--xla_cpu_experimental_xnn_fusion_type",
    "--xla_disable_hlo_passes",
    "--xla_enable_hlo_passes_only",
)
# Directories and files that runs write to: what they hold changes, and with it what XLA chooses.
_REFUSED_CACHES = (
    "--xla_gpu_experimental_autotuner_cache_dir",
    "--xla_gpu_kernel_cache_file",
    "--xla_gpu_per_fusion_autotune_cache_dir",
)
_XNN_GRAPHS = "--xla_cpu_experimental_xnn_graph_fusion_mode"
_YNN = "--xla_cpu_experimental_ynn_fusion_type"
_YNN_PREFIX = "library_fusion_type_"

_SPACE = " \t\r\n"
_NAME = re.compile(r"[-_A-Za-z0-9]*")


def in_environment() -> tuple[str, ...]:
    """Returns the flags of the variable, or of the file that it names, in the order in which XLA reads them.

    Raises:
      DeterminismError: it names a file that cannot be read, with which XLA would abort the process.
    """
    text = os.environ.get(VARIABLE, "")
    if names_file(text):
        try:
            if not pathlib.Path(text).is_file():  # A pipe would be waited for, a device read without end.
                raise ValueError("there is no plain file of that name")
            text = pathlib.Path(text).read_bytes().decode(errors="surrogateescape")
            if "\0" in text:
                raise ValueError("it contains a NUL character")
        except (OSError, ValueError) as error:
            raise errors.DeterminismError(
                f"{VARIABLE}: got {errors.shown(text)}, which XLA takes for the name of a file with flags, since it "
                f"does not begin with --; the file cannot be read ({error}): give its right path, or flags"
            ) from error
    return parse(text)


def names_file(text: str) -> bool:
    """Returns whether XLA takes a value of the variable for the name of a file."""
    return bool(text) and not text.lstrip(_SPACE).startswith("-")


def parse(text: str) -> tuple[str, ...]:
    """Splits text into flags, `--name=value` or `--name`, with quotes and escapes taken off."""
    flags, start = [], _skip_space(text, 0)
    while text.startswith("-", start):
        end = _NAME.match(text, start).end()
        quote = text[end + 1 : end + 2] if text[end : end + 1] == "=" else ""
        if quote in ("'", '"'):
            name, value, end = text[start : end + 1], "", end + 2
            while end < len(text) and text[end] != quote:
                if quote == '"' and text[end] == "\\" and end + 1 < len(text):
                    end += 1
                value, end = value + text[end], end + 1
            flags.append(name + value)
            end += 1
        else:
            while end < len(text) and text[end] not in _SPACE:
                end += 1
            flags.append(text[start:end])
        start = _skip_space(text, end)
    return tuple(flags)


def spell(flags: Sequence[str]) -> str:
    """Returns the text that `parse` splits into these flags."""

    def quoted(flag: str) -> str:
        name, equals, value = flag.partition("=")
        if not any(character in value for character in _SPACE) and value[:1] not in ("'", '"'):
            return flag
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'{name}{equals}"{escaped}"'

    return " ".join(map(quoted, flags))


def value_of(flags: Sequence[str], name: str) -> str | None:
    """Returns the value of the last flag of that name, in one spelling; None where there is none."""
    values = [canonical(flag).partition("=")[2] for flag in flags if flag.partition("=")[0] == name]
    return values[-1] if values else None


def canonical(flag: str) -> str:
    """Returns the one spelling of a flag and its value.

    A switch is `true` or `false`, however it was written: TRUE, 1, 0, or just the name. Only XLA knows which flags are
    numbers, so a number of 1 or 0 is written that way too. Leading zeros of whole numbers go.
    """
    name, equals, value = flag.partition("=")
    lowered = value.lower() if equals else "true"
    if re.fullmatch(r"[+-]?[0-9]{1,18}", lowered):
        lowered = str(int(lowered))
        value = lowered
    if name == "--xla_cpu_max_isa":
        return f"{name}={value.upper()}"
    switch = {"1": "true", "true": "true", "0": "false", "false": "false"}.get(lowered)
    return f"{name}={value if switch is None else switch}"


def deciding(flags: Sequence[str], required: Sequence[str]) -> tuple[str, ...]:
    """Returns what a pin holds of the flags: all that can change a result, each in one spelling.

    The required ones stand first, once each and as `required` spells them: with one value only they are accepted, so
    neither place nor number has a meaning. All others follow in XLA's order with their repeats, since some add to what
    stands before them. In place of a path stands the digest of the file.
    """
    names = [flag.partition("=")[0] for flag in required]
    first = [flag for flag, name in zip(required, names, strict=True) if value_of(flags, name) is not None]
    rest = [flag for flag in flags if flag.partition("=")[0] not in (*names, *_INERT)]
    return (*first, *(_without_path(canonical(flag)) for flag in rest if not flag.startswith(_INERT_PREFIXES)))


def check(flags: Sequence[str]) -> None:
    """Refuses flags under which the bits of a product depend on the number of threads, or flags may change later.

    Raises:
      DeterminismError: names the flag.
    """
    for flag in map(canonical, flags):
        name, _, value = flag.partition("=")
        reason = ""
        if name == "--xla_flags_reset" and value != "false":
            reason = "it has XLA read its flags again after the engine recorded them"
        elif name in _REFUSED_CACHES and value:
            reason = "XLA reads its choice of kernels from there, and other runs change it"
        elif (
            (name in _REFUSED_SWITCHES and value != "false")
            or (name in _REFUSED_LISTS and value)
            or (name == _XNN_GRAPHS and not value.upper().endswith("DISABLED"))
            or (name == _YNN and not _keeps_dots(value))
        ):
            reason = (
                "it moves matrix products to a library, or to code, whose bits depend on the number of threads and on "
                "the cut of a prompt"
            )
        if reason:
            raise errors.DeterminismError(f"{VARIABLE} has {flag}: {reason}; start Python without this flag")


def _keeps_dots(value: str) -> bool:
    """Returns whether a list of fusion types leaves dots to YNNPACK: it names them, or only adds to the default."""
    words = [word.lower() for word in value.split(",")]
    if any(word.startswith("-") for word in words):
        return False
    named = {word.lstrip("+").removeprefix(_YNN_PREFIX) for word in words}
    return bool(named & {"dot", "individual_dot"}) or all(word.startswith("+") for word in words)


def _without_path(flag: str) -> str:
    name, _, value = flag.partition("=")
    if not value or not _READS_FILE.fullmatch(name):
        return flag
    path = pathlib.Path(value)
    if path.is_dir():
        parts = [
            [str(file.relative_to(path)), remembered.file_digest(file)]
            for file in sorted(path.rglob("*"))
            if file.is_file()
        ]
        return f"{name}=(a directory of sha256 {digest.json_digest(parts)})"
    try:
        return f"{name}=sha256:{digest.file_digest(path)}"
    except OSError:
        return f"{name}=(absent)"


def _skip_space(text: str, start: int) -> int:
    while start < len(text) and text[start] in _SPACE:
        start += 1
    return start
