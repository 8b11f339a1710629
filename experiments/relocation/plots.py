"""The plot of the relocation experiment: KL divergence and share of bits against the shift, with the probe beside."""

from __future__ import annotations

from collections.abc import Sequence
import pathlib

from matplotlib import axes as axes_lib
from matplotlib import figure as figure_lib

_STYLES = {
    "rerotate": ("tab:red", "o", "rotated by d"),
    "unrotate": ("tab:orange", "s", "turned back, rotated anew"),
    "prerotary": ("tab:blue", "^", "kept before rotation"),
}


def draw(rows: Sequence[dict], shifts: Sequence[int], path: pathlib.Path) -> None:
    """Plots one column per dtype and document length: mean KL above, share of bits below.

    Args:
      rows: of the experiment's result.
      shifts: d of all rows, in order.
      path: PNG to write.
    """
    columns = list(dict.fromkeys((row["dtype"], row["document_tokens"], row["window"]) for row in rows))
    figure = figure_lib.Figure(figsize=(4.2 * len(columns), 7), layout="constrained")
    panels = figure.subplots(2, len(columns), squeeze=False, sharex=True, sharey="row")
    for column, (dtype, tokens, window) in enumerate(columns):
        chosen = [row for row in rows if (row["dtype"], row["document_tokens"]) == (dtype, tokens)]
        above, below = panels[:, column]
        above.set_title(f"{dtype}, {tokens} tokens, window {window}", fontsize=10)
        _lines(above, chosen, "kl_nats_mean")
        probe = [row["probe_kl_nats_mean"] for row in chosen if row["way"] == "rerotate"]
        above.plot(range(len(shifts)), probe, color="black", linestyle="--", label="probe: fresh at 0")
        above.set_yscale("symlog", linthresh=1e-12)
        _lines(below, chosen, "kv_bits_percent")
        below.set_xticks(range(len(shifts)), [f"{shift:,}" for shift in shifts], rotation=45)
        below.set_xlabel("d, positions moved")
    panels[0][0].set_ylabel("mean KL to fresh at d, nats")
    panels[1][0].set_ylabel("percent of K/V bits that differ")
    panels[0][0].legend(fontsize=7, loc="lower right")
    figure.savefig(path, dpi=100)


def _lines(axes: axes_lib.Axes, rows: Sequence[dict], name: str) -> None:
    """Draws one line per way; its point at the own position is exactly 0."""
    for way, (colour, marker, label) in _STYLES.items():
        heights = [row[name] for row in rows if row["way"] == way]
        axes.plot(range(len(heights)), heights, color=colour, marker=marker, markersize=4, label=label)
    axes.axhline(0, color="0.7", linewidth=0.8)
    axes.axvline(0, color="0.85", linewidth=0.8)
