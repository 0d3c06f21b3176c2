"""One look for all pictures: colours that colour-blind readers can tell apart, names at the lines, a white ground.

The ground is white and opaque. A transparent one leaves dark letters on whatever page there is, and nobody can read
them on a dark one; a picture that follows the page's colours needs two files. White is readable everywhere.

No chart has more than ``MOST_LINES`` lines: there are that many colours that stay apart for every kind of sight.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BLUE, ORANGE, SKY, PURPLE, OCHRE, BLACK = "#0060a8", "#c64600", "#46a5dc", "#8b2262", "#d0a000", "#2b2b2b"
PALETTE = (BLUE, ORANGE, SKY, PURPLE, OCHRE, BLACK)
"""In the order of use. ``tests/test_picture_style.py`` holds them apart for protanopes, deuteranopes and tritanopes."""
MOST_LINES = len(PALETTE)

INK, SOFT, GREY, GRID, EDGE = "#1f2933", "#52606d", "#6b7280", "#e4e7eb", "#9aa5b1"
"""Text; text of less weight; lines to compare with; rules; the frame."""

LOOK: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": EDGE,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.prop_cycle": f"cycler('color', {list(PALETTE)})",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "figure.facecolor": "white",
    "figure.titlesize": 11.5,
    "figure.titleweight": "bold",
    "font.size": 9.5,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "pdf.fonttype": 42,
    "savefig.facecolor": "white",
    "text.color": INK,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
}
"""For ``matplotlib.rc_context``."""


@contextmanager
def pictures() -> Iterator[None]:
    """Everything that is drawn inside has the look; also a decorator, ``@pictures()``.

    >>> import matplotlib
    >>> with pictures():
    ...     matplotlib.rcParams["axes.spines.top"]
    False
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("Drawing needs matplotlib: pip install matplotlib") from error
    with matplotlib.rc_context(LOOK):
        yield


@contextmanager
def figure(path: str | Path, *, rows: int = 1, columns: int = 1, **arguments: Any) -> Iterator[Any]:
    """Axes to draw into, one or an array of them, with the look; the picture is in the file ``path`` afterwards.

    Other arguments are those of ``matplotlib.pyplot.subplots``.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with figure(f"{folder}/line.png", figsize=(4, 3)) as axes:
    ...         _ = axes.plot([0, 1], [0, 1])
    ...     Path(f"{folder}/line.png").stat().st_size < 10_000
    True
    """
    with pictures():
        import matplotlib.pyplot as plt

        drawn, axes = plt.subplots(rows, columns, layout="constrained", **arguments)
        try:
            yield axes
            save(drawn, path)
        finally:
            plt.close(drawn)


def readable(color: str) -> str:
    """The colour for letters on white: darker, where it is too pale (a contrast of 4.5 to 1).

    >>> readable(BLUE) == BLUE, readable(OCHRE)
    (True, '#906e00')
    """
    parts = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    while _contrast_to_white(parts) < 4.5:
        parts = [int(0.97 * part) for part in parts]
    return "#" + "".join(f"{part:02x}" for part in parts)


def name_lines(*panels: Any, size: float = 8.5) -> None:
    """Write the label of each line of these axes at its right end, in its colour and out of the others' way.

    Call it when the axes have their limits. Lines without a label, or with one that begins with ``_``, stay without.

    >>> import matplotlib.pyplot as plt
    >>> axes = plt.subplots(layout="constrained")[1]
    >>> _ = axes.plot([0, 1], [0, 1], label="up", color=BLUE), axes.plot([0, 1], [0, 1.01], label="higher", color=SKY)
    >>> name_lines(axes)
    >>> [text.get_text() for text in axes.texts]
    ['up', 'higher']
    >>> plt.close()
    """
    panels[0].figure.draw_without_rendering()  # the layout decides how large the axes are
    for axes in panels:
        _name_lines(axes, size)


def _name_lines(axes: Any, size: float) -> None:
    from matplotlib.colors import to_hex

    box, points = axes.get_window_extent(), 72 / axes.figure.dpi
    width, height = box.width * points, box.height * points
    lines = [line for line in axes.get_lines() if not line.get_label().startswith("_")]
    found = [(place, line) for line in lines if (place := _end(axes, line)) is not None]
    ends = sorted(found, key=lambda end: end[0][1])
    heights = _apart([y * height for (_, y), _ in ends], 1.2 * size, height)
    moved = [abs(shown - y * height) > 0.35 * size for ((_, y), _), shown in zip(ends, heights, strict=True)]
    gap = (12 if any(moved) else 5) / width
    for ((x, y), line), shown, pointed in zip(ends, heights, moved, strict=True):
        leader = {
            "arrowstyle": "-",
            "color": line.get_color(),
            "lw": 0.6,
            "shrinkA": 1,
            "shrinkB": 1,
            "relpos": (0, 0.5),
        }
        axes.annotate(
            line.get_label(),
            xy=(x, y),
            xycoords="axes fraction",
            xytext=(1 + gap, shown / height),
            textcoords="axes fraction",
            color=readable(to_hex(line.get_color())),
            fontsize=size,
            va="center",
            annotation_clip=False,
            arrowprops=leader if pointed else None,
        )


def save(figure: Any, path: str | Path, *, dpi: int = 130) -> Path:
    """Write it and let go of its memory. A PNG has 256 colours: a third of the bytes, and no eye sees it.

    The same figure gives the same bytes: nothing of the time or the machine is in the file.
    """
    import matplotlib.pyplot as plt
    from PIL import Image

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".png":
        drawn = io.BytesIO()
        figure.savefig(drawn, dpi=dpi, format="png")
        with Image.open(drawn) as picture:
            picture.convert("RGB").quantize(256, method=Image.Quantize.MEDIANCUT).save(path, optimize=True)
    else:
        figure.savefig(path, metadata={"Date" if path.suffix == ".svg" else "CreationDate": None})
    plt.close(figure)
    return path


def _contrast_to_white(parts: list[int]) -> float:
    """By the rules for accessible pages (WCAG)."""
    linear = [p / 255 / 12.92 if p <= 10 else ((p / 255 + 0.055) / 1.055) ** 2.4 for p in parts]
    return 1.05 / (0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05)


def _end(axes: Any, line: Any) -> tuple[float, float] | None:
    """The rightmost point with a value, as a share of the axes; at their edge where it lies outside."""
    import numpy as np

    points: Any = np.ma.filled(np.ma.asarray(line.get_xydata(), dtype=float), np.nan)
    points = points[np.isfinite(points).all(axis=1)]
    if not len(points):
        return None
    shares = axes.transAxes.inverted().transform(axes.transData.transform(points))
    shares = shares[np.isfinite(shares).all(axis=1)]
    x, y = shares[np.argmax(shares[:, 0])]
    return float(min(max(x, 0.0), 1.0)), float(min(max(y, 0.0), 1.0))


def _apart(places: list[float], least: float, height: float) -> list[float]:
    """Sorted places, moved as little as keeps them ``least`` apart and, if there is room, inside of the height.

    >>> _apart([10.0, 12.0, 50.0], 10.0, 100.0)
    [6.0, 16.0, 50.0]
    >>> _apart([99.0, 99.0], 10.0, 100.0)
    [90.0, 100.0]
    """
    blocks: list[list[float]] = []  # the middle of a run that touches, and how many are in it
    for place in places:
        blocks.append([place, 1.0])
        while True:
            middle, count = blocks[-1]
            half = (count - 1) * least / 2
            blocks[-1][0] = max(min(middle, height - half), half)
            if len(blocks) < 2:
                break
            (before, others), (middle, count) = blocks[-2:]
            if middle - before >= (count + others) * least / 2:
                break
            blocks[-2:] = [[(before * others + middle * count) / (others + count), others + count]]
    return [middle + (i - (count - 1) / 2) * least for middle, count in blocks for i in range(int(count))]
