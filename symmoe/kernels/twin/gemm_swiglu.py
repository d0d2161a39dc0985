"""Grouped GEMMs fused with SwiGLU: the definition, in PyTorch. See gemm.py and kernels/gpu/gemm_swiglu.py.

    N rows in G groups, C input features, I FFN width, O output features of the second GEMM.
    weight [G,2I,C] of the first GEMM: I gate features, then I up features; h[N,2I] likewise.

    forward   h = round(rows @ weight^T) = [gate, up];  s = silu(gate) * up;  a = round(s * prob)
    backward  da = dout @ weight;  dprob = sum_I(da * s);  ds = da * prob
              dgate = ds * up * silu'(gate);  dup = ds * silu(gate);  a again

Everything between the roundings is fp32; s comes from the rounded h in both directions, so a has the same bits.
"""

import torch

from symmoe.kernels.twin.gemm import groups, multiply, multiply_into, take_rows


def dswiglu_partials_shape(num_rows: int, ffn: int) -> tuple[int, int]:
    """Shape (column tiles, num_rows) of grouped_gemm_dswiglu's workspace: the twin sums whole rows and needs none."""
    return 0, num_rows


def _swiglu(h: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """gate, up, sigmoid(gate), silu(gate), silu(gate) * up in fp32. h [rows, 2I]."""
    gate, up = h.float().chunk(2, dim=1)
    # Not torch.sigmoid: on CPUs its vector code and the code for the last few elements round differently.
    sigmoid = 1 / (1 + torch.exp(-gate))
    silu = gate * sigmoid
    return gate, up, sigmoid, silu, silu * up


def grouped_gemm_swiglu(
    rows: torch.Tensor,
    weight: torch.Tensor,
    row_start: torch.Tensor,
    row_probs: torch.Tensor,
    h: torch.Tensor,
    a: torch.Tensor,
    *,
    row_index: torch.Tensor | None = None,
) -> None:
    """h[r] = rows[row_index[r]] @ weight[g]^T = [gate, up]; a[r] = silu(gate) * up * row_probs[r].

    rows [N, C], or [P, C] with row_index int32[N]; weight [G, 2I, C]; row_probs fp32[N]; h [N, 2I]; a [N, I].
    """
    for g, span in groups(row_start):
        if span.start < span.stop:
            multiply_into(h[span], take_rows(rows, row_index, span), weight[g].t())
            *_, s = _swiglu(h[span])
            a[span] = s * row_probs[span, None]


def grouped_gemm_dswiglu(
    dout: torch.Tensor,
    weight: torch.Tensor,
    row_start: torch.Tensor,
    h: torch.Tensor,
    row_probs: torch.Tensor,
    dh: torch.Tensor,
    a: torch.Tensor,
    dprob: torch.Tensor,
    dprob_partials: torch.Tensor,
    *,
    row_index: torch.Tensor | None = None,
) -> None:
    """Gradient through the second GEMM and SwiGLU: dh, dprob, and the forward's a once more.

    dout [N, O], or [P, O] with row_index int32[N]; weight [G, O, I]; h, dh [N, 2I]; a [N, I]; row_probs, dprob
    fp32[N]. dprob_partials is the kernels' workspace; the twin leaves it alone.
    """
    ffn = a.shape[1]
    for g, span in groups(row_start):
        if span.start < span.stop:
            da = multiply(take_rows(dout, row_index, span), weight[g])
            gate, up, sigmoid, silu, s = _swiglu(h[span])
            prob = row_probs[span, None]
            ds = da * prob
            dh[span, :ffn] = ds * up * (sigmoid * (1 + gate * (1 - sigmoid)))
            dh[span, ffn:] = ds * silu
            a[span] = s * prob
            dprob[span] = (da * s).sum(dim=1)
