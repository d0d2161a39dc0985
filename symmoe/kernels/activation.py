"""The activations between the two GEMMs of an expert, as data for kernels and modules.

An activation reads hidden rows h of width W and returns rows of width I (ffn).

Every kernel sums the gradient of a row's scale, dscale = sum over I of da * act(h), in the same order. Products are
rounded to fp32. In a block of SUM_COLUMNS columns (zeros past the last one), neighbours are added, then neighbouring
sums, and so on. The blocks' sums are added from left to right. So all tiles of whole blocks give the same bits, and so
do layouts and schedules that choose different kernels.
"""

import math
from dataclasses import dataclass

from symmoe.errors import ArgumentError

SILU, GELU, GELU_TANH, RELU2 = FUNCTIONS = ("silu", "gelu", "gelu_tanh", "relu2")
GELU_LINEAR = 2 * math.sqrt(
    2 / math.pi
)  # of GELU by tanh, in sigmoid(x * (GELU_LINEAR + GELU_CUBIC * x^2))
GELU_CUBIC = 0.044715 * GELU_LINEAR
SUM_COLUMNS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """The activation between the two GEMMs of an expert: f(h), or gated (u + offset) * f(g) with [g, u] of h.

    Attributes:
        function: f. "silu": x * sigmoid(alpha * x); "gelu": x * Phi(x), with erf; "gelu_tanh": its approximation by
            tanh (both Hendrycks and Gimpel 2016); "relu2": relu(x)^2 (So et al. 2021).
        is_gated: h holds gate features g and up features u (Shazeer 2020): W = 2I, else W = I. With "silu": SwiGLU,
            with "gelu": GEGLU.
        alpha: the factor in "silu"; 1.702 approximates GELU ("quick GELU").
        limit, offset: for gated activations: g = min(gate, limit), u = clamp(up, -limit, limit). gpt-oss uses 7, 1 and
            alpha 1.702.
        interleave: gate and up features of h alternate in blocks of this many columns; None: the first half of h is the
            gate, the second half is up.
    """

    function: str = SILU
    is_gated: bool = True
    alpha: float = 1.0
    limit: float = math.inf
    offset: float = 0.0
    interleave: int | None = None

    def __post_init__(self) -> None:
        if self.function not in FUNCTIONS:
            raise ArgumentError(
                f"function ({self.function!r}) must be one of {', '.join(map(repr, FUNCTIONS))}"
            )
        if not self.limit > 0:
            raise ArgumentError(f"limit ({self.limit}) must be greater than 0")
        if self.interleave is not None and (self.interleave < 1 or not self.is_gated):
            raise ArgumentError(
                f"interleave ({self.interleave}) must be at least 1, and the activation gated"
            )
        if self.alpha != 1 and self.function != SILU:
            raise ArgumentError(
                f"alpha ({self.alpha}) needs function {SILU!r}, not {self.function!r}"
            )
        if not self.is_gated and (self.limit, self.offset) != (math.inf, 0.0):
            raise ArgumentError(
                f"limit ({self.limit}) and offset ({self.offset}) need a gated activation"
            )

    def hidden_width(self, ffn: int) -> int:
        """W: the columns of h for `ffn` columns of the result."""
        return 2 * ffn if self.is_gated else ffn


SWIGLU = Activation()


def num_scale_sums(ffn: int) -> int:
    """Number of column blocks that are summed to a row's dscale."""
    return -(-ffn // SUM_COLUMNS)
