"""Biases of grouped GEMMs of quantised numbers, and a check of kernels that add them. Sums are exact in fp32."""

import itertools

import torch
from row_ranges import random_ranges


class Biases:
    """bias [G, O] and bias_scale fp32 [N] of a Problem (quantized_problem.py); the tail's scale is NaN."""

    def __init__(self, p, dtype):
        self.p, generator = p, torch.Generator().manual_seed(0)
        device = p.row_range.device
        eighths = torch.randint(-96, 97, (len(p.splits), p.widths[0]), generator=generator)
        self.bias = (eighths / 8).to(dtype).to(device)
        self.scale = torch.exp2(
            torch.randint(-2, 3, (p.capacity,), generator=generator).float()
        ).to(device)
        self.scale[p.num_rows :] = torch.nan

    def added_to(self, product, scaled):
        """Rows of groups with their biases, in float64."""
        result = product.to(torch.float64, copy=True)
        for g, span in enumerate(self.p.spans):
            result[span] += self.bias[g].double() * (
                self.scale[span].double()[:, None] if scaled else 1.0
            )
        return result


def check_biases(run, p, dtypes=(torch.bfloat16, torch.float32)):
    """run(p, out, row_range=..., **options) rounds products with biases once, in the rows that it owns. p: a Problem of
    exact numbers."""
    n, exact = p.num_rows, p.expected()
    for dtype, scaled in itertools.product(dtypes, (False, True)):
        b, where = Biases(p, dtype), (p.splits, p.widths, dtype, scaled)
        bias_scale, once = b.scale if scaled else None, b.added_to(exact, scaled).to(dtype)
        if dtype != torch.float32 and n and p.widths[1] > 128:  # sums have more bits than the dtype
            assert not torch.equal(b.added_to(exact.to(dtype), scaled).to(dtype), once), where
        out, expected = p.blank(dtype), once.clone()
        expected[n:] = 0
        run(p, out, zero_tail=True, bias=(b.bias, bias_scale))
        assert torch.equal(out, expected), where
        out = p.blank(dtype)
        for ranges in random_ranges(p.splits, 2):
            run(p, out, row_range=ranges.to(out.device), bias=(b.bias, bias_scale))
        assert torch.equal(out, once), where
        for g, span in enumerate(p.spans):
            if span.start < span.stop:
                dirty, out = b.bias.clone(), p.blank(dtype)
                dirty[g] = torch.nan
                run(p, out, bias=(dirty, bias_scale))
                assert out[span].isnan().all(), where
                out[span] = once[span]
                assert torch.equal(out, once), where
                break
