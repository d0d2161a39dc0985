"""Pictures: one style, and colours that everybody can tell apart. matplotlib is imported here, on first use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from symmoe.errors import ArgumentError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.typing import RcKeyType

# Okabe and Ito (2008), "Color Universal Design".
BLACK, ORANGE, SKY, GREEN = "#000000", "#e69f00", "#56b4e9", "#009e73"
YELLOW, BLUE, VERMILION, PURPLE = "#f0e442", "#0072b2", "#d55e00", "#cc79a7"
GREY = "#999999"

WIDTH_INCHES = 8.0  # about what a page of the docs is wide
_DPI = 110
_STYLE: dict[RcKeyType, Any] = {
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
    """A figure to draw on, written to `path` (PNG) at the end of the context. The same figure gives the same bytes.

    Raises:
        ArgumentError: the path does not end with .png, or matplotlib is not installed.
    """
    if not path.endswith(".png"):
        raise ArgumentError(f"plot ({path}) must end with .png")
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ArgumentError(f"plot ({path}) needs matplotlib: pip install 'symmoe[plots]' ({error})") from error
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        figure.savefig(path, format="png", dpi=_DPI, metadata={"Software": None})
