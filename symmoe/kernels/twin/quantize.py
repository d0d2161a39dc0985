"""Quantisation of rows, of their columns per group, and of weights; scales in tiles. Formats: kernels/formats.py.

    C features of a row, I and W as in twin/gemm.py
    P tokens, at least TILE * max_tiles(N, G): every group begins at the first multiple of TILE after the previous group

out: data and scale to fill, written only for groups; the padding of a group's last tile is zeros. fp32 scales of
columns [C, blocks] must be block-major: strides (1, C), so that one block's scales are adjacent; otherwise
ArgumentError.

* amax: fp32[G] from group_amax or weight_amax, if the format has a global scale.
* seeds: int64[G]; E2M1 is rounded stochastically, by random words from the group's seed and a position.

Block-scaled matrix units read scales in tiles of 128 rows by 4 blocks: M rows of a scale matrix, padded to a multiple
of 128; Q blocks along the reduction, padded to Qp, a multiple of 4; padding is 0. The scale of row m and block q is
byte

    (m // 128) * 128 * Qp + (q // 4) * 512 + (m % 32) * 16 + (m % 128) // 32 * 4 + q % 4
"""

import torch

from symmoe.kernels import formats
from symmoe.kernels.act_quantized import DactOperands
from symmoe.kernels.activation import Activation
from symmoe.kernels.bias_sums import SLOT_ROWS
from symmoe.kernels.operands import (
    Buffers,
    Matrices,
    MaybeTensor,
    ScaleTable,
    check_column_scale,
    require_tensor,
    writes,
)
from symmoe.kernels.quantized_gemm import TILE_BLOCKS
from symmoe.kernels.twin.activation import ActivationKernels, activation_gradients
from symmoe.kernels.twin.gemm import (
    GemmKernels,
    block_sums,
    groups,
    matrix,
    packed,
    sum_in_blocks,
    take_rows,
)


class QuantizeKernels:
    @staticmethod
    @writes("out", "sums.0")
    def quantize_rows(
        rows: torch.Tensor,
        row_range: torch.Tensor,
        out: Buffers,
        block_format: formats.BlockFormat,
        *,
        row_index: MaybeTensor = None,
        amax: MaybeTensor = None,
        seeds: MaybeTensor = None,
        sums: tuple[torch.Tensor, MaybeTensor] | None = None,
    ) -> None:
        """Quantises every row of every group, with scales along the features, and sums rows for a bias gradient.

        rows bf16, fp16 or fp32 [N, C], or [., C] with row_index; data [N, C or C / 2]; scale [N, num_blocks(C)].
        Positions of seeds: (feature, row in the group). Seeds need whole groups.

        sums: fp32 [bias_slots(N, G, SLOT_ROWS), C], gets sums of tiles of SLOT_ROWS rows in their slots
        (kernels/bias_sums.py); and bias_scale fp32[N], the rows' factors, or None. With sums, ranges must begin at
        multiples of SLOT_ROWS, counted from the group's first row, and end at such a multiple or at the group's end.
        """
        (data, scale), width = out, rows.shape[1]
        for g, span in groups(row_range):
            lines = take_rows((rows, row_index), span).float()
            codes, scales = _quantize_lines(lines, block_format, g, amax, seeds)
            formats.as_bytes(data)[span] = _pack(codes[:, :width], block_format)
            formats.as_bytes(scale)[span] = scales
            if sums is not None:
                bias_sums, bias_scale = sums
                terms = block_sums(
                    (lines if bias_scale is None else lines * bias_scale[span, None]).t(), SLOT_ROWS
                )
                first = span.start // SLOT_ROWS + g
                bias_sums[first : first + terms.shape[1]] = terms.t()

    @staticmethod
    @writes("dbias")
    def sum_dbias(bias_sums: torch.Tensor, row_range: torch.Tensor, dbias: torch.Tensor) -> None:
        """The bits of grouped_bias_grad of the rows, from the sums of quantize_rows; whole groups.

        dbias [G, C] in any dtype.
        """
        for g, span in groups(row_range):
            first = span.start // SLOT_ROWS + g
            num_slots = -(-(span.stop - span.start) // SLOT_ROWS)
            dbias[g] = sum_in_blocks(
                bias_sums[first : first + num_slots].t(), formats.TILE // SLOT_ROWS
            )

    @staticmethod
    @writes("out")
    def quantize_columns(
        rows: torch.Tensor,
        row_range: torch.Tensor,
        out: Buffers,
        block_format: formats.BlockFormat,
        *,
        row_index: MaybeTensor = None,
        amax: MaybeTensor = None,
        signs: int | None = None,
        seeds: MaybeTensor = None,
    ) -> None:
        """Quantises every feature of every group, with scales along the tokens; data is transposed. Whole groups.

        rows [N, C], or [., C] with row_index; data [C, P or P / 2]; scale [C, P / block]. signs: a Hadamard transform
        of every 16 neighbouring tokens comes first, with these signs (hadamard). Positions of seeds: (token in the
        group, feature).
        """
        (data, scale), first = out, 0
        check_column_scale("scale", scale)
        for g, span in groups(row_range):
            lines = _padded_columns(take_rows((rows, row_index), span), signs)
            codes, scales = _quantize_lines(lines, block_format, g, amax, seeds)
            end = first + lines.shape[1]
            places = slice(block_format.data_width(first), block_format.data_width(end))
            blocks = slice(first // block_format.block, end // block_format.block)
            formats.as_bytes(data)[:, places] = _pack(codes, block_format)
            formats.as_bytes(scale)[:, blocks] = scales
            first = end

    @staticmethod
    @writes("amax")
    def group_amax(
        rows: torch.Tensor,
        row_range: torch.Tensor,
        amax: torch.Tensor,
        *,
        row_index: MaybeTensor = None,
        signs: int | None = None,
    ) -> None:
        """amax[g] = the largest finite |x| of the group's rows, 0 without any; fp32[G]. Whole groups.

        rows and row_index as in quantize_columns; with signs, x is the transformed row.
        """
        for g, span in groups(row_range):
            amax[g] = _largest_finite(_padded_columns(take_rows((rows, row_index), span), signs))

    @staticmethod
    @writes("amax")
    def weight_amax(weight: Matrices, amax: torch.Tensor) -> None:
        """amax[g] = the largest finite |x| of matrix g, 0 without any; fp32[G]. weight [G, M, K], contiguous."""
        for g in range(weight.shape[0]):
            amax[g] = _largest_finite(matrix(weight, g).float())

    @staticmethod
    @writes("out")
    def quantize_weights(
        weight: Matrices,
        out: Buffers,
        block_format: formats.BlockFormat,
        *,
        amax: MaybeTensor = None,
    ) -> None:
        """Quantises G matrices, with scales along the last dimension.

        weight [G, M, K], contiguous or the transpose of contiguous matrices, or a table; data [G, M, K or K / 2]; scale
        [G, M / block_lines, num_blocks(K)], quotients rounded up.
        """
        (data, scale), (num_groups, num_lines, num_columns) = out, weight.shape
        for g in range(num_groups):
            codes, scales = _quantize_lines(matrix(weight, g).float(), block_format, g, amax, None)
            formats.as_bytes(data)[g] = _pack(codes[:num_lines, :num_columns], block_format)
            formats.as_bytes(scale)[g] = scales

    @staticmethod
    @writes("out", "transposed_out")
    def quantize_weight_pairs(
        weight: Matrices,
        out: Buffers,
        transposed_out: Buffers,
        block_format: formats.BlockFormat,
        *,
        amax: MaybeTensor = None,
    ) -> None:
        """Both operands of G contiguous matrices [G, M, K]: the results of quantize_weights for `weight`, and for
        `weight.mT` (transposed_out). M and K are even where E2M1 is packed."""
        QuantizeKernels.quantize_weights(weight, out, block_format, amax=amax)
        QuantizeKernels.quantize_weights(packed(weight).mT, transposed_out, block_format, amax=amax)

    # The next two functions compose separate functions, with the same bits: numbers are first rounded to the dtype of
    # h.

    @staticmethod
    @writes("out")
    def act_quantize(
        h: torch.Tensor,
        row_scale: torch.Tensor,
        row_range: torch.Tensor,
        out: Buffers,
        activation: Activation,
        block_format: formats.BlockFormat,
    ) -> None:
        """scaled_activation of h, rounded to the dtype of h and quantised by quantize_rows: rows of the second GEMM.

        h bf16 or fp16 [N, W]; row_scale fp32[N]; data [N, I]. block_format: takes_act_quantize.
        """
        a = h.new_empty((h.shape[0], h.shape[1] // activation.hidden_width(1)))
        ActivationKernels.scaled_activation(h, row_scale, a, activation)
        QuantizeKernels.quantize_rows(a, row_range, out, block_format)

    @staticmethod
    @writes("out", "workspace")
    def dact_quantize(
        da: torch.Tensor,
        h: torch.Tensor,
        row_scale: torch.Tensor,
        row_range: torch.Tensor,
        out: DactOperands,
        workspace: torch.Tensor,
        activation: Activation,
        block_format: formats.BlockFormat,
    ) -> None:
        """scaled_activation_grad: dh, rounded to the dtype of h and quantised; dscale; columns of the activation again,
        so that forward need not keep them; and the first GEMM's dbias, from the rounded dh. Whole groups.

        da [N, I] of the dtype of h; workspace: fp32, of dact_quantize_workspace_numel(...) elements. Other arguments as
        in act_quantize; block_format: takes_dact_quantize.
        """
        end = int(row_range[1, -1])
        dh, a, scale = torch.empty_like(h), torch.empty_like(da), row_scale[:end]
        value = activation_gradients(
            da[:end], h[:end], scale, dh[:end], out.dscale[:end], activation
        )
        torch.mul(value, scale[:, None], out=a[:end])
        out.dscale[end:] = 0
        QuantizeKernels.quantize_rows(dh, row_range, out.rows, block_format)
        QuantizeKernels.quantize_columns(dh, row_range, out.columns, block_format)
        QuantizeKernels.quantize_columns(a, row_range, out.a_columns, block_format)
        if out.dbias is not None:
            GemmKernels.grouped_bias_grad(dh, row_range, out.dbias)

    @staticmethod
    @writes("swizzled")
    def swizzle_scales(
        scale: torch.Tensor | ScaleTable, row_range: torch.Tensor | None, swizzled: torch.Tensor
    ) -> None:
        """Converts compact scales to tiles: scales of grouped rows, each group padded to whole tiles, or of any
        matrices.

        Args:
            scale: [N, Q], one byte each, of whole groups; or a table, whose matrices are read without their padding.
            row_range: the groups' rows; None for a table.
            swizzled: uint8, 16-byte aligned: [at least max_tiles(N, G), ceil(Q / 4), 512], tiles of no group are not
                written; for a table, the memory that contains all destinations.
        """
        from symmoe.kernels.twin.block_scaled import matrices_of

        for scales, tiles in matrices_of(scale, row_range, swizzled):
            padded = torch.nn.functional.pad(
                scales, (0, -scales.shape[1] % TILE_BLOCKS, 0, -scales.shape[0] % formats.TILE)
            )
            # [tile, row / 32, row % 32, 4 blocks, block] -> [tile, 4 blocks, row % 32, row / 32, block]
            parts = padded.reshape(-1, 4, 32, padded.shape[1] // TILE_BLOCKS, TILE_BLOCKS)
            tiles.copy_(parts.permute(0, 3, 2, 1, 4).reshape(tiles.shape))

    @staticmethod
    @writes("scale")
    def unswizzle_scales(
        swizzled: torch.Tensor, row_range: torch.Tensor, scale: torch.Tensor
    ) -> None:
        """The inverse of swizzle_scales for grouped rows; scales of rows that belong to no group are not written."""
        from symmoe.kernels.twin.block_scaled import matrices_of

        for scales, tiles in matrices_of(scale, row_range, swizzled):
            parts = tiles.view(tiles.shape[0], tiles.shape[1], 32, 4, TILE_BLOCKS).permute(
                0, 3, 2, 1, 4
            )
            compact = parts.reshape(tiles.shape[0] * formats.TILE, tiles.shape[1] * TILE_BLOCKS)
            scales.copy_(compact[: scales.shape[0], : scales.shape[1]])


def _largest_finite(values: torch.Tensor) -> torch.Tensor | float:
    finite = values.abs()[torch.isfinite(values)]
    return finite.max() if finite.numel() else 0.0


def global_scale_of(amax: torch.Tensor) -> torch.Tensor:
    """The global scale of groups whose largest |x| is amax, fp32."""
    # No division by a Python number: on GPUs torch multiplies by its reciprocal, which rounds differently.
    return (amax / torch.full_like(amax, formats.GLOBAL_MAX)).clamp(min=formats.MIN_GLOBAL_SCALE)


def _padded_columns(rows: torch.Tensor, signs: int | None) -> torch.Tensor:
    """The columns of one group as lines [C, tokens], zeros up to a multiple of TILE tokens; transformed with signs."""
    lines = torch.nn.functional.pad(rows.float(), (0, 0, 0, -rows.shape[0] % formats.TILE)).T
    if signs is None:
        return lines
    from symmoe.kernels.twin.block_scaled import hadamard

    return hadamard(lines, signs)


def _quantize_lines(
    lines: torch.Tensor,
    block_format: formats.BlockFormat,
    group: int,
    amax: torch.Tensor | None,
    seeds: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 of a group's lines [L, K] fp32, with both padded to whole blocks, and the blocks' scales: bytes or
    fp32."""
    num_lines, width = lines.shape
    block, block_lines = block_format.block, block_format.block_lines
    padded = torch.nn.functional.pad(lines, (0, -width % block, 0, -num_lines % block_lines))
    x = padded.view(padded.shape[0] // block_lines, block_lines, padded.shape[1] // block, block)
    largest = x.abs().amax(dim=(1, 3))
    is_finite = torch.isfinite(largest)
    global_scale = None if amax is None else global_scale_of(amax[group])
    scale, multiplier = _scales(largest.where(is_finite, 0.0), block_format, global_scale)
    fits = is_finite[:, None, :, None].expand_as(x)
    scaled = (x.where(fits, 0.0) * multiplier[:, None, :, None]).reshape(padded.shape)
    if block_format.element == "e4m3":
        codes = (
            to_e4m3(scaled)
            .view(torch.uint8)
            .masked_fill(~fits.reshape(padded.shape), formats.E4M3_NAN)
        )
    else:
        from symmoe.kernels.twin.block_scaled import random_words, to_e2m1

        words = None if seeds is None else random_words(int(seeds[group]), *padded.shape)
        codes = to_e2m1(scaled, words)
    nan = _NAN_BYTES.get(block_format.scale, torch.nan)
    return codes, formats.as_bytes(scale).masked_fill(~is_finite, nan)


_NAN_BYTES = {"e8m0": formats.E8M0_NAN, "e4m3": formats.E4M3_NAN}


def _scales(
    amax: torch.Tensor, block_format: formats.BlockFormat, global_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The stored scales of blocks, and the multipliers of their elements."""
    if block_format.scale == "e4m3":
        global_scale = require_tensor("amax", global_scale)
        relative = (amax / formats.E2M1_MAX / global_scale).clamp(
            formats.MIN_BLOCK_SCALE, formats.E4M3_MAX
        )
        scale = to_e4m3(relative)
        return scale, 1.0 / (scale.float() * global_scale)
    scale = (amax / formats.E4M3_MAX).clamp(min=formats.MIN_SCALE)
    if block_format.scale == "fp32":
        return scale, 1.0 / scale
    bits = (scale.view(torch.int32) + 0x7FFFFF) & ~0x7FFFFF
    scale = bits.view(torch.float32)
    if block_format.scale == "power_of_two":
        return scale, 1.0 / scale
    return (bits >> 23).to(torch.uint8).view(torch.float8_e8m0fnu), 1.0 / scale


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """The nearest E4M3 number of finite fp32 numbers, ties to even, saturating."""
    return x.clamp(-formats.E4M3_MAX, formats.E4M3_MAX).to(torch.float8_e4m3fn)


def numbers_of(data: torch.Tensor, block_format: formats.BlockFormat) -> torch.Tensor:
    """The unscaled numbers of data, in fp32."""
    if block_format.element == "e4m3":
        return data.float()
    from symmoe.kernels.twin.block_scaled import numbers_of_e2m1

    return numbers_of_e2m1(data)


def _pack(codes: torch.Tensor, block_format: formats.BlockFormat) -> torch.Tensor:
    """Codes in their stored form."""
    return codes if block_format.elements_per_byte == 1 else codes[:, ::2] | codes[:, 1::2] << 4
