"""The colours of pictures can be told apart, and what is written at a line can be read."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.text import Text
from PIL import Image

from vprop.lab.report.style import KNOWN
from vprop.plots import style

SIGHTS = {  # on linear RGB, for people without one kind of cone (Machado, Oliveira and Fernandes, 2009)
    "all cones": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
TO_CONES = [
    [0.4122214708, 0.5363325363, 0.0514459929],
    [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
]
TO_LAB = [
    [0.2104542553, 0.7936177850, -0.0040720468],
    [1.9779984951, -2.4285922050, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.8086757660],
]


def seen(color: str, sight) -> np.ndarray:
    """A colour in Oklab, where equal distances look equally far."""
    parts = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return np.array(TO_LAB) @ np.cbrt(np.array(TO_CONES) @ np.clip(np.array(sight) @ linear, 0, 1))


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize(
    "colors",
    [style.PALETTE, [KNOWN[name] for name in ("rmsprop", "bbvi", "cvi-10", "vprop-0", "vprop-1", "vprop-2")]],
    ids=["palette", "the paper's methods"],
)
def test_colours_stay_apart_for_every_kind_of_sight(colors, sight):
    """Distance 0.1 is that of #0072b2 and #4f8bc0, say; matplotlib's own ten come as near as 0.01 (deutan)."""
    nearest = min(
        np.linalg.norm(seen(one, SIGHTS[sight]) - seen(other, SIGHTS[sight])) for one, other in combinations(colors, 2)
    )
    assert nearest > 0.1


def test_names_stand_at_their_lines_and_not_on_each_other():
    with style.pictures():
        figure, axes = plt.subplots(layout="constrained")
        for number in range(6):
            axes.plot([0, 1], [0, 0.5 + 0.001 * number], label=f"line {number}")
        axes.plot([0, 1], [0, 9], label="outside")
        axes.plot([0, 1], [0, 1], label="_nolegend_")
        axes.set_ylim(0, 1)
        style.name_lines(axes)
        figure.draw_without_rendering()
    assert [text.get_text() for text in axes.texts] == [*(f"line {number}" for number in range(6)), "outside"]
    boxes = [Text.get_window_extent(text) for text in axes.texts]  # of the words, without the line to the end
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    inside = figure.get_window_extent()
    assert all(inside.x0 <= box.x0 and box.x1 <= inside.x1 and box.y1 <= inside.y1 for box in boxes)
    plt.close(figure)


def test_a_file_is_small_opaque_and_the_same_every_time(tmp_path):
    for name in ("one.png", "other.png"):
        with style.pictures():
            figure, axes = plt.subplots()
            axes.plot([0, 1], [0, 1])
            style.save(figure, tmp_path / "new" / name)
    one, other = ((tmp_path / "new" / name).read_bytes() for name in ("one.png", "other.png"))
    assert one == other
    with Image.open(tmp_path / "new" / "one.png") as picture:
        assert picture.mode == "P"
        assert picture.convert("RGBA").getpixel((0, 0)) == (255, 255, 255, 255)
    assert not plt.fignum_exists(figure.number)
