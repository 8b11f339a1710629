"""The rotary notebook: it holds no outputs, and runs from top to bottom with the figures that its text promises."""

from __future__ import annotations

import re

import pytest

from tests import notebooks

NAME = "rotary_exactness.ipynb"


def test_it_is_stored_without_outputs():
    assert notebooks.is_bare(notebooks.read(NAME))


@pytest.mark.slow
def test_it_runs_and_shows_what_it_says(tmp_path):
    cells = notebooks.code_cells(notebooks.execute(NAME, tmp_path))
    text = "\n".join(map(notebooks.printed, cells))
    assert sum(map(notebooks.num_plots, cells)) == 5
    before, after = map(int, re.search(r"(\d+) keys, (\d+) after rotation", text).groups())
    assert after < before / 1.5
    rows = re.findall(r"shift +(\d+): rerotate ([\d.]+) %, snap ([\d.]+) %", text)
    assert [row for row in rows if row[0] == "0"] == [("0", "0.00", "0.00")]
    assert len(rows) == 10 and all(float(value) > 10 for row in rows[1:] for value in row[1:])
    best = dict(re.findall(r"(\d+ to +\d+): best ([\d.]+) %", text))
    assert best["1 to     0"] == "60.40" and best["0 to  1000"] == best["355 to     0"] == "100.00"
    assert re.search(r"at position 1 .*equal\nat position 2 .*different", text)
    assert "norms of 1 beyond position 0: 0 of 4095" in text and "970 and 964 make 1934: True" in text
    assert re.findall(r"exit code (\d)", text) == ["0", "2", "1"]
    assert re.search(r"shifted by    0: values that change, by layer: \[0, 0, 0\]", text)
    assert notebooks.printed(cells[-1]).splitlines()[-1] == "equal" and "DIFFERENT" not in text
