"""The seven plots of the rotary study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import pathlib

from matplotlib import axes as axes_lib
from matplotlib import figure as figure_lib
import numpy as np

from experiments.rotary_exactness import parts as rotary_parts

_COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown")


def draw(
    position: int,
    shifts: Sequence[int],
    swept: Mapping[tuple[str, str], np.ndarray],
    num_keys: int,
    parts: rotary_parts.Parts,
    out: pathlib.Path,
) -> None:
    """Draws all of them.

    Args:
      position: where the swept keys are stored.
      shifts: S, by which they are moved.
      swept: encoding and scheme to elements that differ, [S, R], each of 2 `num_keys`.
      num_keys: keys of the sweep.
      parts: everything else.
      out: folder.
    """
    share = {name: counts / (2 * num_keys) for name, counts in swept.items()}
    first = next(iter(share))
    _heat_map(position, shifts, share[first], f"{first[0]}, {first[1]}", _Plot(out / "1_pairs.png"))
    _by_shift(position, shifts, share, _Plot(out / "2_shifts.png", width=9))
    _drift(parts, _Plot(out / "3_drift.png"))
    _decoders(parts, _Plot(out / "4_decoders.png", width=10))
    _flips(parts, _Plot(out / "5_flips.png", width=9))
    _values(parts, _Plot(out / "6_values.png"))
    _programs(parts, _Plot(out / "7_programs.png"))


class _Plot:
    """Axes of a new plot, which is saved at the end of a `with` block."""

    def __init__(self, path: pathlib.Path, width: float = 7):
        self.path = path
        self.figure = figure_lib.Figure(figsize=(width, 4.5), layout="constrained")

    def __enter__(self) -> axes_lib.Axes:
        return self.figure.subplots()

    def __exit__(self, *_: object) -> None:
        self.figure.savefig(self.path, dpi=110)


def _heat_map(position: int, shifts: Sequence[int], share_SxR: np.ndarray, title: str, plot: _Plot) -> None:
    """Share of elements that differ by shift and pair; the row of shift 0 is blank, because nothing differs there."""
    with plot as axes:
        blank = np.where(np.array(shifts)[:, None] == 0, np.nan, 100 * share_SxR)
        image = axes.imshow(blank, aspect="auto", origin="lower", cmap="viridis", vmin=0, interpolation="nearest")
        axes.set_yticks(range(len(shifts)), [f"{shift:+,}" if shift else "0 (own)" for shift in shifts], fontsize=7)
        axes.set(
            xlabel="rotary pair",
            ylabel="shift in positions",
            title=f"Elements that differ at p = {position:,}: {title}",
        )
        axes.axhline(shifts.index(0), color="tab:red", linewidth=1, linestyle=":")
        plot.figure.colorbar(image, ax=axes, label="percent of elements (blank: none)")


def _by_shift(position: int, shifts: Sequence[int], share: Mapping[tuple[str, str], np.ndarray], plot: _Plot) -> None:
    """Share of elements of rotating pairs that differ, by shift; 0 at the own position and nowhere else."""
    with plot as axes:
        names = list(dict.fromkeys(encoding for encoding, _ in share))
        schemes = list(dict.fromkeys(scheme for _, scheme in share))
        styles, markers = ("-", "--", ":", "-."), ("", "", "x", "")  # Where two schemes agree, crosses show both.
        onward = [index for index, shift in enumerate(shifts) if shift > 0]
        for (encoding, scheme), share_SxR in share.items():
            rotates_R = share_SxR.any(axis=0)
            mean_S = 100 * share_SxR[:, rotates_R].mean(axis=1)
            axes.plot(
                [shifts[index] for index in onward],
                mean_S[onward],
                color=_COLOURS[names.index(encoding) % len(_COLOURS)],
                linestyle=styles[schemes.index(scheme) % len(styles)],
                marker=markers[schemes.index(scheme) % len(markers)],
                markersize=4,
                linewidth=1.2,
            )
        for index, encoding in enumerate(names):
            axes.plot([], [], color=_COLOURS[index % len(_COLOURS)], label=encoding)
        for index, scheme in enumerate(schemes):
            style = styles[index % len(styles)], markers[index % len(markers)]
            axes.plot([], [], color="0.3", linestyle=style[0], marker=style[1], markersize=4, label=scheme)
        axes.axhline(0, color="black", linewidth=1)
        axes.plot([0], [0], "o", color="black", markersize=7, label="own position: exactly 0", zorder=5, clip_on=False)
        axes.set_xscale("symlog", linthresh=1)
        axes.set(
            xlabel="shift in positions", ylabel="percent of elements that differ", xlim=(-0.3, None), ylim=(-2, None)
        )
        axes.set_title(f"Keys rotated on from p = {position:,} against fresh ones")
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))


def _drift(parts: rotary_parts.Parts, plot: _Plot) -> None:
    """Plots how the error grows with the position, except on pair 0: rounded angles do not add up."""
    with plot as axes:
        for (pair, (positions, errors)), colour in zip(parts.drift.items(), _COLOURS, strict=False):
            axes.loglog(positions, errors, "o-", markersize=3, color=colour, label=f"pair {pair}")
        axes.set(xlabel="position p (shift p / 2)", ylabel="|moved − fresh| / (2⁻²⁴ |k|), 99th percentile")
        axes.set_title("Float32 keys, local256: error of turning on")
        axes.legend()
        axes.grid(alpha=0.3)


def _decoders(parts: rotary_parts.Parts, plot: _Plot) -> None:
    """Plots how many of the 2^20 ordinary keys of pair 0 come back."""
    with plot as axes:
        places = np.arange(len(rotary_parts.DECODER_MOVES))
        methods = ("best decoder", "un-rotate, round, rotate", "turn on")
        for offset, (scheme, shares) in enumerate(parts.decoders.items()):
            for column, method in enumerate(methods):
                place = places + (column - 1) * 0.26 + (offset - 0.5) * 0.12
                axes.bar(
                    place,
                    100 * shares[:, column],
                    0.12,
                    color=_COLOURS[column],
                    alpha=1.0 if offset == 0 else 0.5,
                    label=f"{method} ({scheme})",
                )
        labels = [f"{position:,} → {target:,}" for position, target in rotary_parts.DECODER_MOVES]
        axes.set_xticks(places, labels)
        axes.axhline(100, color="black", linewidth=0.8)
        axes.set(
            xlabel="stored at → wanted at", ylabel="percent of keys right", ylim=(0, 135), yticks=range(0, 101, 20)
        )
        axes.set_title("All bfloat16 keys of pair 0 with 1/4 ≤ |x| < 4")
        axes.legend(fontsize=7, ncols=2, loc="upper center")


def _flips(parts: rotary_parts.Parts, plot: _Plot) -> None:
    """Plots the gap of two logits, which is constant in the reals, by position."""
    with plot as axes:
        shown = 1500
        for (scheme, gap_T), colour in zip(parts.flip.items(), _COLOURS, strict=False):
            axes.plot(gap_T[:shown], ".", markersize=2.5, color=colour, label=scheme)
        for level in (-rotary_parts.FLIP_GAP, rotary_parts.FLIP_GAP):
            axes.axhline(level, color="0.4", linestyle="--", linewidth=1)
        axes.axhline(-0.0842, color="black", linewidth=1, label="in the reals: −0.0842")
        axes.set_yscale("symlog", linthresh=rotary_parts.FLIP_GAP)
        axes.set(xlabel="position p", ylabel="logit gap of two tokens at p and p + 1", ylim=(-2000, 4000))
        axes.set_yticks([-1000, -100, -25, 0, 25, 100, 1000], ["−1,000", "−100", "−25", "0", "25", "100", "1,000"])
        axes.set_title("Beyond ±25 one token takes all attention: which one depends on p alone")
        axes.legend(fontsize=8, loc="upper right", ncols=3)


def _values(parts: rotary_parts.Parts, plot: _Plot) -> None:
    """Share of the values of each layer that change when all positions are shifted."""
    with plot as axes:
        moved = [index for index, shift in enumerate(parts.value_shifts) if shift]
        shifts = [parts.value_shifts[index] for index in moved]
        for layer, share_S in enumerate(100 * parts.value_share.T):
            colour = _COLOURS[layer % len(_COLOURS)]
            axes.plot(shifts, share_S[moved], "o-", markersize=4, color=colour, label=f"layer {layer}")
        axes.plot([0], [0], "o", color="black", markersize=7, label="no shift: exactly 0", zorder=5, clip_on=False)
        axes.axhline(0, color="black", linewidth=1)
        axes.set_xscale("symlog", linthresh=1)
        axes.set(
            xlabel="shift of all positions", ylabel="percent of values that differ", xlim=(-0.3, None), ylim=(-3, 103)
        )
        axes.set_title("Fresh against fresh: the model's own sensitivity to its positions")
        axes.legend(fontsize=8)


def _programs(parts: rotary_parts.Parts, plot: _Plot) -> None:
    """Elements of equal keys at equal positions that differ from program to program."""
    with plot as axes:
        percent = 100 * parts.program_differences / parts.program_elements
        image = axes.imshow(percent, cmap="magma_r", vmin=0)
        places = range(len(rotary_parts.PROGRAMS))
        axes.set_xticks(places, rotary_parts.PROGRAMS, rotation=30, ha="right", fontsize=7)
        axes.set_yticks(places, rotary_parts.PROGRAMS, fontsize=7)
        for row in places:
            for column in places:
                colour = "white" if percent[row, column] > percent.max() / 2 else "black"
                text = f"{percent[row, column]:.1f}" if parts.program_differences[row, column] else "0"
                axes.text(column, row, text, ha="center", va="center", fontsize=8, color=colour)
        axes.set_title("Float32 keys at equal positions: percent that differ between programs", fontsize=10)
        plot.figure.colorbar(image, ax=axes, label="percent of elements")
