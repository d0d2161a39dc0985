"""The activations between the two GEMMs of an expert, as data that kernels and modules share.

W is the width of the hidden rows h that an activation reads, I (ffn) the width of what it returns.

The gradient of a row's scale, dscale = sum over I of da * act(h), is summed in one order by every kernel: products are
rounded to fp32; in blocks of SUM_COLUMNS columns (zeros past the last one) neighbours are added, then neighbouring
sums, and so on; the blocks' sums are added from left to right. So tiles that hold whole blocks give the same bits
whatever their width, and so do layouts and schedules that take different kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from symmoe.errors import ArgumentError

SWIGLU = "swiglu"
SRELU = "srelu"
SUM_COLUMNS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """The activation function between the two GEMMs.

    kind "swiglu": with h = [x1, x2], g = min(x1, limit), u = clamp(x2, -limit, limit): (u + offset) * g *
    sigmoid(alpha * g). The defaults are plain SwiGLU (Shazeer 2020); gpt-oss has alpha 1.702, limit 7, offset 1.
    kind "srelu": relu(h)^2 (So et al. 2021), not gated: W = I; the other fields have no meaning.

    interleave: the gate and the up features of h alternate in blocks of this many columns; None: the first half of h
    is the gate, the second half up.
    """

    kind: str = SWIGLU
    alpha: float = 1.0
    limit: float = math.inf
    offset: float = 0.0
    interleave: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in (SWIGLU, SRELU):
            raise ArgumentError(f"kind ({self.kind!r}) must be {SWIGLU!r} or {SRELU!r}")
        if not self.limit > 0:
            raise ArgumentError(f"limit ({self.limit}) must be greater than 0")
        if self.interleave is not None and (self.interleave < 1 or not self.is_gated):
            raise ArgumentError(f"interleave ({self.interleave}) must be at least 1, and the activation gated")

    @property
    def is_gated(self) -> bool:
        """Whether h holds gate and up features."""
        return self.kind == SWIGLU

    def hidden_width(self, ffn: int) -> int:
        """W, columns of h for `ffn` columns of the result."""
        return 2 * ffn if self.is_gated else ffn


def num_scale_sums(ffn: int) -> int:
    """Blocks of columns whose sums make up a row's dscale."""
    return -(-ffn // SUM_COLUMNS)
