"""Pictures of the docs: one style, and colours that everybody can tell apart (Okabe and Ito, 2008)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

BLACK, ORANGE, SKY, BLUE, PURPLE, GREY = (
    "#000000",
    "#e69f00",
    "#56b4e9",
    "#0072b2",
    "#cc79a7",
    "#999999",
)
SHOWN = "Shown"  # the name of the digest in a file
STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.fontsize": 8,
    "legend.frameon": False,
}


@contextmanager
def picture(path: str, *, height_inches: float) -> Iterator[Figure]:
    """A figure to draw on; the end of the context writes it to `path` (PNG), with the digest of its content. Equal
    figures give equal bytes."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.0, height_inches), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        figure.savefig(
            path, format="png", dpi=110, metadata={"Software": None, SHOWN: digest(figure)}
        )


def digest(figure: Figure) -> str:
    """The digest of a figure's titles, bars and lines; it does not depend on fonts or the version of matplotlib."""
    shown = [
        (
            axis.get_title(loc="left"),
            [float(bar.get_height()) for bar in axis.patches],
            [list(map(float, line.get_ydata())) for line in axis.lines],
        )
        for axis in figure.axes
    ]
    return hashlib.sha256(repr(shown).encode()).hexdigest()
