"""The suite "gemm": every product of a step by itself, compared with torch._grouped_mm and eager activations. Local.

fc1, dfc2, wgrad2 and wgrad1 are the layer's calls, which gather and fuse; names that end in -plain are only products of
contiguous rows. The stock variant has its rows gathered beforehand. Our kernels write into existing tensors, which
torch's cannot. TFLOP/s count the products of the mean rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from suites.problem import DTYPE, MAX_ERROR, LocalRows, Problem, relative_error
from suites.records import Record, case_record, tflops
from suites.stock_torch import STOCK, grouped_mm, swiglu
from suites.timing import Run, Variant, align_ahead, in_steps, largest, measure
from symmoe import kernels
from symmoe.kernels.activation import Activation

_SAMPLED_EXPERTS = 3
_ACTIVATION = Activation()

PerGroup = Callable[[int], list[torch.Tensor]]


class Product(NamedTuple):
    """Ways to make one product of a step; flops: of one call; stock: the name of the yardstick, if there is one."""

    direction: str
    flops: float
    variants: list[Variant]
    stock: str | None


def bench_gemm(problem: Problem, run: Run) -> list[Record]:
    """Each product and its stock counterpart, in turn."""
    return bench_products("gemm", products(problem), problem, run)


def bench_products(
    suite: str, products: Iterable[Product], problem: Problem, run: Run
) -> list[Record]:
    """Products one after the other, the ways of each in turn. Errors are of ways that are compared."""
    records = []
    for product in products:
        times, errors = measure(run, product.variants, align=align_ahead)
        speeds = {name: tflops(product.flops, times_ms) for name, times_ms in times.items()}
        for variant in product.variants:
            name = variant.name
            figures: Record = {
                "tflops": speeds[name],
                "error": errors[name] if variant.max_error else None,
            }
            if product.stock not in (None, name):
                figures |= {"stock_tflops": speeds[product.stock], "yardstick": "stock_tflops"}
            about = (problem, suite, name, product.direction)
            records.append(case_record(*about, times[name][:, 0], **figures))
    return records


def products(problem: Problem) -> list[Product]:
    """The products of a step on this rank's rows."""
    ops = kernels.for_device(problem.device)
    local = LocalRows.of(problem)
    shape = problem.case.shape
    w1, w2 = (weight.detach() for weight in (problem.w1, problem.w2))
    _, _, index, row_range, scale = local
    ends = row_range[1]
    num_rows, num_groups, width = problem.num_rows, problem.experts_per_rank, 2 * shape.ffn
    generator = torch.Generator(problem.device).manual_seed(problem.rank)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=DTYPE, device=problem.device)

    def blank(*size: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=problem.device)

    rows, d_rows_in = (local.in_order(packed) for packed in (local.packed, local.d_packed))
    h_in, a_in = (normal(num_rows, columns) for columns in (width, shape.ffn))
    h, dh, a, da = (blank(num_rows, columns) for columns in (width, width, shape.ffn, shape.ffn))
    out = blank(num_rows, shape.hidden)
    dscale = blank(num_rows, dtype=torch.float32)
    dw1, dw2 = (torch.empty_like(weight) for weight in (w1, w2))
    workspace = blank(
        ops.dact_workspace_numel(num_rows, num_groups, shape.ffn, _ACTIVATION), dtype=torch.float32
    )
    spans = spans_of(row_range)

    def of(tensor: torch.Tensor, g: int) -> torch.Tensor:
        return tensor[spans[g]].float()

    def fc1_reference(g: int) -> list[torch.Tensor]:
        hidden = of(rows, g) @ w1[g].float().t()
        gate, up = hidden.to(DTYPE).float().chunk(2, dim=1)
        return [hidden, torch.nn.functional.silu(gate) * up * of(scale, g)[:, None]]

    def fc1_stock() -> list[torch.Tensor]:
        hidden = grouped_mm(rows, w1.transpose(1, 2), ends)
        return [hidden, swiglu(hidden, scale)]

    def dfc2_reference(g: int) -> list[torch.Tensor]:
        hidden = of(h_in, g).requires_grad_()
        factor = of(scale, g).clone().requires_grad_()
        gate, up = hidden.chunk(2, dim=1)
        value = torch.nn.functional.silu(gate) * up * factor[:, None]
        gradients = torch.autograd.grad(value, (hidden, factor), of(d_rows_in, g) @ w2[g].float())
        return [gradients[0], value.detach(), gradients[1]]

    def wgrad(
        lhs: torch.Tensor, rhs: torch.Tensor
    ) -> tuple[PerGroup, Callable[[], list[torch.Tensor]]]:
        return lambda g: [of(lhs, g).t() @ of(rhs, g)], lambda: [grouped_wgrad(lhs, rhs, ends)]

    def pair(
        name: str,
        direction: str,
        num_products: int,
        call: Callable[[], object],
        outputs: list[torch.Tensor],
        reference: PerGroup,
        stock: Callable[[], list[torch.Tensor]],
    ) -> Product:
        """num_products: of N rows, H and I that it counts for: fc1 has two. call: writes the outputs, with all groups
        in one tensor. reference: group g's outputs in fp32. stock: the same by stock torch, returned."""

        def verify() -> float:
            for output in outputs:
                output.fill_(torch.nan)
            call()
            return groups_error(reference, outputs, spans)

        yardstick = f"{name} {STOCK}"
        ways = (
            (name, call, verify),
            (yardstick, stock, lambda: groups_error(reference, stock(), spans)),
        )
        variants = [
            Variant(n, ("forward",), in_steps(do), check, MAX_ERROR) for n, do, check in ways
        ]
        flops = 2 * num_products * problem.case.num_slots * shape.hidden * shape.ffn
        return Product(direction, flops, variants, yardstick)

    wgrad2 = wgrad(d_rows_in, a_in)
    wgrad1 = wgrad(h_in, rows)
    return [
        pair(
            "fc1",
            "forward",
            2,
            lambda: ops.grouped_gemm_act(
                (local.packed, index), w1, row_range, scale, (h, a), _ACTIVATION
            ),
            [h, a],
            fc1_reference,
            fc1_stock,
        ),
        pair(
            "fc1-plain",
            "forward",
            2,
            lambda: ops.grouped_gemm(rows, w1, row_range, h),
            [h],
            lambda g: [of(rows, g) @ w1[g].float().t()],
            lambda: [grouped_mm(rows, w1.transpose(1, 2), ends)],
        ),
        pair(
            "fc2",
            "forward",
            1,
            lambda: ops.grouped_gemm(a_in, w2, row_range, out),
            [out],
            lambda g: [of(a_in, g) @ w2[g].float().t()],
            lambda: [grouped_mm(a_in, w2.transpose(1, 2), ends)],
        ),
        pair(
            "dfc2",
            "backward",
            1,
            lambda: ops.grouped_gemm_dact(
                *(
                    (local.d_packed, index),
                    w2,
                    row_range,
                    (h_in, scale),
                    (dh, a, dscale, None),
                    workspace,
                    _ACTIVATION,
                )
            ),
            [dh, a, dscale],
            dfc2_reference,
            lambda: swiglu_grad(grouped_mm(d_rows_in, w2, ends), h_in, scale),
        ),
        pair(
            "dfc2-plain",
            "backward",
            1,
            lambda: ops.grouped_gemm_dgrad(d_rows_in, w2, row_range, da),
            [da],
            lambda g: [of(d_rows_in, g) @ w2[g].float()],
            lambda: [grouped_mm(d_rows_in, w2, ends)],
        ),
        pair(
            "dfc1",
            "backward",
            2,
            lambda: ops.grouped_gemm_dgrad(h_in, w1, row_range, out),
            [out],
            lambda g: [of(h_in, g) @ w1[g].float()],
            lambda: [grouped_mm(h_in, w1, ends)],
        ),
        pair(
            "wgrad2",
            "backward",
            1,
            lambda: ops.grouped_gemm_wgrad((local.d_packed, index), a_in, row_range, dw2),
            [dw2],
            *wgrad2,
        ),
        pair(
            "wgrad2-plain",
            "backward",
            1,
            lambda: ops.grouped_gemm_wgrad(d_rows_in, a_in, row_range, dw2),
            [dw2],
            *wgrad2,
        ),
        pair(
            "wgrad1",
            "backward",
            2,
            lambda: ops.grouped_gemm_wgrad(h_in, (local.packed, index), row_range, dw1),
            [dw1],
            *wgrad1,
        ),
        pair(
            "wgrad1-plain",
            "backward",
            2,
            lambda: ops.grouped_gemm_wgrad(h_in, rows, row_range, dw1),
            [dw1],
            *wgrad1,
        ),
    ]


def spans_of(row_range: torch.Tensor) -> list[slice]:
    """The rows of each expert."""
    return [slice(*span) for span in row_range.t().tolist()]


def groups_error(reference: PerGroup, outputs: list[torch.Tensor], spans: list[slice]) -> float:
    """The largest relative error of any output of a few experts that have rows, spread over all of them; of one that is
    a number for each row, over all rows of these experts.

    Args:
        reference: group g's outputs in fp32.
        outputs: as in Product.
    """
    busy = [g for g, span in enumerate(spans) if span.stop > span.start]
    sampled = busy[:: max(1, len(busy) // _SAMPLED_EXPERTS)]
    errors = []
    for n, output in enumerate(outputs):
        pairs = [
            (output[g] if output.ndim == 3 else output[spans[g]], reference(g)[n]) for g in sampled
        ]
        if output.ndim == 1 and sampled:
            # One number for each row: a few are small by chance, and off by more than they are.
            pairs = [tuple(map(torch.cat, zip(*pairs, strict=True)))]
        errors += [relative_error(*pair) for pair in pairs]
    return largest(errors)


def grouped_wgrad(d_out: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """[G, O, C]: d_out [N, O] transposed times rows [N, C], by groups."""
    if rows.device.type == "cuda":
        return torch._grouped_mm(d_out.t(), rows, offs=ends)
    cuts = ends.tolist()[:-1]
    return torch.stack(
        [d.t() @ r for d, r in zip(d_out.tensor_split(cuts), rows.tensor_split(cuts), strict=True)]
    )


def swiglu_grad(da: torch.Tensor, h: torch.Tensor, scale: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of :func:`swiglu` by h and, in fp32, by the scale, with its result between them."""
    gate, up = h.chunk(2, dim=1)
    silu = torch.nn.functional.silu(gate)
    value = silu * up
    scale = scale.to(h.dtype)[:, None]
    ds = da * scale
    dh = torch.cat([torch.ops.aten.silu_backward(ds * up, gate), ds * silu], dim=1)
    return [dh, value * scale, (da * value).sum(dim=1, dtype=torch.float32)]
