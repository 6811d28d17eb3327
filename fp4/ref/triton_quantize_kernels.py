"""The device side of ``triton_quantize``: places, codes, and the two kernels. Launched from there only.

Every choice of the Recipe is a compile-time constant. The kernels hold no index arithmetic per element: strides and divisions are per
block, divisions by multiplication.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp4.ref.triton_activation import activate
from fp4.ref.triton_chain import wait
from fp4.ref.triton_codes import (
    bits_of,
    decode_e2m1,
    decode_e4m3,
    decode_ue5m3,
    decode_ue8m0,
    encode_magnitude,
    fields_of,
    from_bits,
    pack_nibbles,
    round_even,
)
from fp4.ref.triton_layout import layout_index, layout_offset, quotient
from fp4.ref.triton_pair_codes import pack8_e2m1, pack8_e4m3, pack16_e2m1
from fp4.ref.triton_pairs import join4, larger, load_pairs, top_of, top_of_pairs
from fp4.ref.triton_scales import bf16_bits, e4m3_scale, encode_of, scale_value, step_of, ue8m0_byte


@triton.jit
def _load_f32(ptr):
    """Values as f32; the interpreter's bf16 cast is not exact for subnormals, so there bf16 comes as its bits, i16."""
    raw = tl.load(ptr)
    if raw.dtype == tl.int16:
        value = from_bits(raw.to(tl.int32) << 16)
    else:
        value = raw.to(tl.float32)
    return value


@triton.jit
def _sign(code, x, y, RULE: tl.constexpr, TOP_BIT: tl.constexpr, SHIFT: tl.constexpr):
    """``CHOICES["zero_sign"]``: keep, of_value, positive, negative."""
    if RULE == 0:
        code = code | ((bits_of(x) >> SHIFT) & TOP_BIT)
    elif RULE == 1:
        code = code | tl.where(y < 0, TOP_BIT, 0)
    elif RULE == 2:
        code = code | tl.where((y < 0) & (code != 0), TOP_BIT, 0)
    else:
        code = code | tl.where(y <= 0, TOP_BIT, 0)
    return code


@triton.jit
def _scaled(x, factor, DIVIDE: tl.constexpr):
    """x [n, block] by the factor of each row."""
    if DIVIDE:
        y = tl.div_rn(x, tl.broadcast_to(factor[:, None], x.shape))
    else:
        y = x * factor[:, None]
    return y


@triton.jit
def _codes(
    x, y, PACK: tl.constexpr, MAN: tl.constexpr, EMIN: tl.constexpr, TOP: tl.constexpr, TOP_CODE: tl.constexpr, TIE: tl.constexpr,
    ZERO_SIGN: tl.constexpr, NAN_CODE: tl.constexpr,
):  # fmt: skip
    """Codes of the scaled elements y of x, i32, one an element, by any recipe."""
    TOP_BIT: tl.constexpr = 8 if PACK else 128
    SHIFT: tl.constexpr = 28 if PACK else 24
    NAN_MAX: tl.constexpr = 7 if PACK else 127
    code = _sign(encode_magnitude(y, MAN, EMIN, TOP, TOP_CODE, TIE), x, y, ZERO_SIGN, TOP_BIT, SHIFT)
    if NAN_CODE == 0:
        code = tl.where(y != y, NAN_MAX, code)
    elif NAN_CODE == 1:
        code = tl.where(y != y, NAN_MAX | ((bits_of(x) >> SHIFT) & TOP_BIT), code)
    else:
        code = tl.where(y != y, 0, code)
    return code


@triton.jit
def _bounded(a):
    """f32 >= 0 or NaN -> at most the largest finite float32; through the integers."""
    return from_bits(tl.minimum(bits_of(a), 0x7F7FFFFF))


@triton.jit
def _error(code, d, g, x, RULE: tl.constexpr, BLOCK: tl.constexpr):
    """Error of a block's codes, f32 [n]: sum of squares (1), of magnitudes (2), or the largest magnitude (3).

    Neighbours are added pairwise, level by level: the same order of sums everywhere. ``_bounded`` stands between each product and the
    sum that follows, so that no compiler fuses the two (ptxas of Triton 3.6 does for SM120, even when told not to).
    """
    e = tl.abs(_bounded(decode_e2m1(code & 7) * (d * g)[:, None]) - tl.abs(x))
    if RULE == 1:
        e = _bounded(e * e)
    for _ in tl.static_range(4 if BLOCK == 16 else 5):  # unrolled: a loop may not change the shape of what it carries
        a, b = tl.split(tl.reshape(e, [e.shape[0], e.shape[1] // 2, 2]))
        if RULE == 3:
            e = tl.where(a > b, a, b)
        else:
            e = a + b
    return tl.reshape(e, [e.shape[0]])


@triton.jit
def _row_col(b, blocks_row, rows_mat, by_row, row_shift, by_mat, mat_shift, WIDE: tl.constexpr, ONE: tl.constexpr):
    """(matrix, row, column) of block b; ONE matrix needs no division for it."""
    if WIDE:
        row = b // blocks_row
        col = b - row * blocks_row
        mat = row // rows_mat
    else:
        row = quotient(b, by_row, row_shift)
        col = b.to(tl.uint32) - row * blocks_row.to(tl.uint32)
        mat = row * 0 if ONE else quotient(row, by_mat, mat_shift)
    row = row if ONE else row - mat * rows_mat.to(mat.dtype)
    return mat, row, col


@triton.jit
def _stored_block(
    at, RO, CO, bytes_mat, by_ro, ro_shift, by_co, co_shift, by_mat, mat_shift, rows_mat, blocks_row,
    DIGITS: tl.constexpr, WIDE: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """(matrix, row, column, whether that is no padding) of the block whose scale is stored at ``at``; for padding the block next to it."""
    if WIDE:
        mat = at // bytes_mat
        rest = at - mat * bytes_mat
        row, col = layout_index(rest, RO.to(tl.int64), CO.to(tl.int64), by_ro, ro_shift, by_co, co_shift, DIGITS, True)
    else:
        mat = at.to(tl.uint32) * 0 if ONE else quotient(at, by_mat, mat_shift)
        rest = at.to(tl.uint32) if ONE else at.to(tl.uint32) - mat * bytes_mat.to(tl.uint32)
        row, col = layout_index(rest, RO.to(tl.uint32), CO.to(tl.uint32), by_ro, ro_shift, by_co, co_shift, DIGITS, False)
    rows, columns = rows_mat.to(row.dtype), blocks_row.to(col.dtype)
    inside = (row < rows) & (col < columns)
    return mat, tl.minimum(row, rows - 1), tl.minimum(col, columns - 1), inside


@triton.jit
def _find(
    first, blocks, blocks_row, rows_mat, by_row, row_shift, by_mat, mat_shift, by_ro, ro_shift, RO, CO, bytes_mat,
    N: tl.constexpr, SPLIT: tl.constexpr, STORED: tl.constexpr, DIGITS: tl.constexpr, WIDE: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """(place in the order of the program, block in the order of rows, matrix, row, column, not padding) of N parts of N / SPLIT blocks."""
    at = tl.minimum(first + tl.arange(0, N) // SPLIT, blocks - 1)  # those behind the end do the last one again: nothing needs a mask
    if STORED:
        mat, row, col, inside = _stored_block(
            at, RO, CO, bytes_mat, by_ro, ro_shift, by_row, row_shift, by_mat, mat_shift, rows_mat, blocks_row, DIGITS, WIDE, ONE
        )
        line = row if ONE else mat * rows_mat.to(row.dtype) + row
        b = (line * blocks_row.to(row.dtype) + col).to(at.dtype)
    else:
        mat, row, col = _row_col(at, blocks_row, rows_mat, by_row, row_shift, by_mat, mat_shift, WIDE, ONE)
        b, inside = at, at >= 0
    return at, b, mat, row, col, inside


@triton.jit
def _top_of_parts(top, NAN: tl.constexpr, SPLIT: tl.constexpr):
    """Bits of the largest magnitude of each part, i32 [n * SPLIT] -> of each block, [n]; the threads of a block all have it."""
    if SPLIT > 1:
        if NAN == 1:
            top = tl.where(top > 0x7F800000, -1, top)
        top = tl.max(tl.reshape(top, [top.shape[0] // SPLIT, SPLIT]), 1)
    return top


_VARYING = ["blocks", "blocks_row", "rows_mat", "by_row", "row_shift", "by_mat", "mat_shift", "by_ro", "ro_shift", "RO", "CO", "bytes_mat"]


@triton.jit(do_not_specialize=_VARYING)
def quantize_kernel(
    x_ptr, up_ptr, codes_ptr, scale_ptr, g_ptr, gs_ptr, table_ptr, p0, p1, p2,
    blocks, blocks_row, rows_mat, by_row, row_shift, by_mat, mat_shift, by_ro, ro_shift, s_mat, s_row, s_k, RO, CO, bytes_mat,
    PAIRS: tl.constexpr, SPLIT: tl.constexpr, BOTH: tl.constexpr, NATIVE: tl.constexpr, ONE: tl.constexpr,
    HAS_G: tl.constexpr, HAS_GS: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, PACK: tl.constexpr,
    FLAT: tl.constexpr, WIDE: tl.constexpr, EXPERTS: tl.constexpr,
    DIGITS: tl.constexpr, STORED: tl.constexpr, FILL: tl.constexpr,
    MAN: tl.constexpr, EMIN: tl.constexpr, TOP: tl.constexpr, TOP_CODE: tl.constexpr, EMAX: tl.constexpr, SCALE: tl.constexpr,
    TIE: tl.constexpr, ZERO_SIGN: tl.constexpr, NAN_CODE: tl.constexpr, NAN: tl.constexpr, INF: tl.constexpr,
    RULE: tl.constexpr, UE8M0_FLOOR: tl.constexpr, UE8M0_ZERO: tl.constexpr, SCALE_ORDER: tl.constexpr, ENCODE_ORDER: tl.constexpr,
    TARGET: tl.constexpr, RCP_TARGET: tl.constexpr,
    SCALE_FLOOR: tl.constexpr, ZERO_BYTE: tl.constexpr, UNDERFLOW_BYTE: tl.constexpr, UNDERFLOW: tl.constexpr,
    APPROX: tl.constexpr, AMAX_FLOOR: tl.constexpr, ROUND: tl.constexpr, FLUSH: tl.constexpr, FOUR_OVER_SIX: tl.constexpr,
    ACT: tl.constexpr, ACT_ROUND: tl.constexpr, LIMIT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Blocks in the order of rows; with STORED in the order in which the layout stores their scales, so that scales, codes and x all move
    in whole sectors. Then ``blocks`` counts padding too, by_row is the divider of CO, by_mat of bytes_mat, by_ro of RO."""
    first = tl.program_id(0).to(tl.int64) * N if WIDE else tl.program_id(0) * N
    at, b, mat, row, col, inside = _find(
        first, blocks, blocks_row, rows_mat, by_row, row_shift, by_mat, mat_shift, by_ro, ro_shift, RO, CO, bytes_mat,
        N, 1, STORED, DIGITS, WIDE, ONE,
    )  # fmt: skip
    b_mat, b_row, b_col = mat, row, col
    if SPLIT > 1:  # the same of each part; what a reshape made of it would not be known to be a multiple of 16
        _, b, b_mat, b_row, b_col, _ = _find(
            first, blocks, blocks_row, rows_mat, by_row, row_shift, by_mat, mat_shift, by_ro, ro_shift, RO, CO, bytes_mat,
            N * SPLIT, SPLIT, STORED, DIGITS, WIDE, ONE,
        )  # fmt: skip
    if FLAT:
        start = b * BLOCK
    else:
        start = b_mat.to(b.dtype) * s_mat + b_row.to(b.dtype) * s_row + b_col.to(b.dtype) * (s_k * BLOCK)
    F16: tl.constexpr = ACT_ROUND == 2
    FLUSHED: tl.constexpr = FLUSH and ACT_ROUND != 2  # f16 has nothing to flush
    HELD: tl.constexpr = BLOCK // SPLIT  # elements of a thread; at most their maximum and a scale move between threads
    if PAIRS:
        part = tl.arange(0, N * SPLIT) % SPLIT
        if SPLIT > 1:
            start += part * (2 * HELD if BOTH else HELD)
        place = (start // 2)[:, None] + tl.arange(0, 4)[None, :]
        p = x_ptr + place
        u = p + 4 if BOTH else up_ptr + place
        STEP: tl.constexpr = 8 if BOTH else 4
        w0 = load_pairs(p, u, p0, p1, p2, ACT, BOTH, F16, NATIVE, LIMIT)
        w1 = load_pairs(p + STEP, u + STEP, p0, p1, p2, ACT, BOTH, F16, NATIVE, LIMIT)
        top = top_of_pairs(w0, NAN, FLUSHED, F16, NATIVE)
        top = larger(top, top_of_pairs(w1, NAN, FLUSHED, F16, NATIVE), NAN, FLUSHED, F16, NATIVE)
        if HELD == 32:
            w2 = load_pairs(p + 2 * STEP, u + 2 * STEP, p0, p1, p2, ACT, BOTH, F16, NATIVE, LIMIT)
            w3 = load_pairs(p + 3 * STEP, u + 3 * STEP, p0, p1, p2, ACT, BOTH, F16, NATIVE, LIMIT)
            top = larger(top, top_of_pairs(w2, NAN, FLUSHED, F16, NATIVE), NAN, FLUSHED, F16, NATIVE)
            top = larger(top, top_of_pairs(w3, NAN, FLUSHED, F16, NATIVE), NAN, FLUSHED, F16, NATIVE)
        top = _top_of_parts(top_of(top, NAN, FLUSHED, F16, NATIVE), NAN, SPLIT)
    else:
        e = tl.arange(0, BLOCK)
        step = e if FLAT else e * s_k
        x = _load_f32(x_ptr + start[:, None] + step[None, :])
        if ACT >= 0:
            up = _load_f32(up_ptr + start[:, None] + step[None, :]) if ACT > 0 else x
            x = step_of(activate(x, up, p0, p1, p2, ACT), ACT_ROUND)
        if FLUSH:
            x = tl.where(tl.abs(x) < 1.1754943508222875e-38, x * 0.0, x)
        # amax on the bits of |x|: the order of magnitudes is that of their bits, infinity and NaN come last
        magnitude = bits_of(x) & 0x7FFFFFFF
        if NAN == 1:  # ignore: -1 is below every magnitude and stays only if all are NaN
            magnitude = tl.where(magnitude > 0x7F800000, -1, magnitude)
        top = tl.max(magnitude, 1)
    if NAN == 1:
        top = tl.where(top < 0, 0x7FC00000, top)
    amax = from_bits(top)
    bad = amax != amax
    if INF != 1:
        bad = bits_of(amax) >= 0x7F800000
    floored = tl.where(amax < AMAX_FLOOR, AMAX_FLOOR, amax) if AMAX_FLOOR > 0 else amax

    if SCALE == 2:
        TOP_INT: tl.constexpr = 6 if PACK else 448
        byte = ue8m0_byte(floored, RULE, EMAX, MAN, TOP_INT, UE8M0_FLOOR, INF)
        byte = tl.where(bad, 255, byte)
        power = tl.where(byte == 254, 0x00400000, (254 - byte) << 23)
        if UE8M0_ZERO:
            power = tl.where(byte == 0, 0, power)
        factor = from_bits(tl.where(bad, 0x7FC00000, power))
    else:
        wait(PDL)  # for g; before this nothing is read or written that the kernels in front write
        expert = mat if EXPERTS else tl.zeros([1], tl.int32)
        g = tl.load(g_ptr + expert) if HAS_G else tl.full([1], 1.0, tl.float32)
        gs = tl.load(gs_ptr + expert) if HAS_GS else encode_of(g)
        v = scale_value(floored, g, gs, SCALE_ORDER, TARGET, RCP_TARGET, ROUND, FLUSH)
        if SCALE_FLOOR > 0:
            v = tl.where(v < SCALE_FLOOR, SCALE_FLOOR, v)
        FLOORS: tl.constexpr = (SCALE_FLOOR > 0) or (AMAX_FLOOR > 0)
        byte, factor, d = e4m3_scale(
            v, amax, bad, g, gs, table_ptr, SCALE, ENCODE_ORDER, ZERO_BYTE, UNDERFLOW_BYTE, UNDERFLOW, FLOORS, APPROX
        )

    DIVIDE: tl.constexpr = (SCALE != 2) and ((ENCODE_ORDER == 1) or (ENCODE_ORDER == 3))
    if PAIRS:
        f = tl.reshape(tl.broadcast_to(factor[:, None], [N, SPLIT]), [N * SPLIT]) if SPLIT > 1 else factor
        if PACK:
            q = codes_ptr + (b * (BLOCK // 8) + part * (HELD // 8))[:, None]
            LINES: tl.constexpr = NATIVE > 1 and SCALE != 2 and ZERO_SIGN == 0 and NAN_CODE == 1 and NAN != 1 and not FLUSHED
            if LINES:
                m = tl.reshape(tl.broadcast_to(amax[:, None], [N, SPLIT]), [N * SPLIT]) if SPLIT > 1 else amax
                c0, c1 = pack16_e2m1(w0, w1, f, m, F16)
            else:
                c0 = pack8_e2m1(w0, f, SCALE == 2, ZERO_SIGN, NAN_CODE, FLUSHED, F16, NATIVE)
                c1 = pack8_e2m1(w1, f, SCALE == 2, ZERO_SIGN, NAN_CODE, FLUSHED, F16, NATIVE)
            if HELD == 16:
                tl.store(q + tl.arange(0, 2)[None, :], tl.join(c0, c1))
            else:
                if LINES:
                    c2, c3 = pack16_e2m1(w2, w3, f, m, F16)
                else:
                    c2 = pack8_e2m1(w2, f, SCALE == 2, ZERO_SIGN, NAN_CODE, FLUSHED, F16, NATIVE)
                    c3 = pack8_e2m1(w3, f, SCALE == 2, ZERO_SIGN, NAN_CODE, FLUSHED, F16, NATIVE)
                tl.store(q + tl.arange(0, 4)[None, :], join4(c0, c1, c2, c3))
        else:
            q = codes_ptr + (b * (BLOCK // 4) + part * (HELD // 4))[:, None]
            c0, c1 = pack8_e4m3(w0, f, F16, NATIVE)
            c2, c3 = pack8_e4m3(w1, f, F16, NATIVE)
            if HELD == 16:
                tl.store(q + tl.arange(0, 4)[None, :], join4(c0, c1, c2, c3))
            else:  # one store: two of 16 bytes each would reach the memory in halves of its 32-byte sectors
                c4, c5 = pack8_e4m3(w2, f, F16, NATIVE)
                c6, c7 = pack8_e4m3(w3, f, F16, NATIVE)
                words = tl.reshape(tl.join(join4(c0, c2, c4, c6), join4(c1, c3, c5, c7)), [N, 8])
                tl.store(q + tl.arange(0, 8)[None, :], words)
    else:
        y = _scaled(x, factor, DIVIDE)
        if PACK and TIE == 0 and ZERO_SIGN == 0 and NAN_CODE == 1 and FOUR_OVER_SIX == 0:
            # the usual case, with the fewest instructions: NaN has become 7 by itself; signs join while codes still are at bit 22
            fields = fields_of(round_even(y, MAN, EMIN), MAN, EMIN, TOP_CODE) | ((bits_of(x) >> 6) & 0x02000000).to(tl.uint32, bitcast=True)
            even, odd = tl.split(tl.reshape(fields, [N, BLOCK // 2, 2]))
            packed = ((even + (odd << 4)) >> 22).to(tl.uint8)
        else:
            code = _codes(x, y, PACK, MAN, EMIN, TOP, TOP_CODE, TIE, ZERO_SIGN, NAN_CODE)
            if FOUR_OVER_SIX != 0:
                byte4, factor4, d4 = e4m3_scale(
                    v * 1.5, amax, bad, g, gs, table_ptr, SCALE, ENCODE_ORDER, ZERO_BYTE, UNDERFLOW_BYTE, UNDERFLOW, FLOORS, APPROX
                )
                code4 = _codes(x, _scaled(x, factor4, DIVIDE), PACK, MAN, EMIN, TOP, TOP_CODE, TIE, ZERO_SIGN, NAN_CODE)
                four = _error(code4, d4, g, x, FOUR_OVER_SIX, BLOCK) < _error(code, d, g, x, FOUR_OVER_SIX, BLOCK)
                byte = tl.where(four, byte4, byte)
                code = tl.where(four[:, None], code4, code)
            packed = pack_nibbles(code) if PACK else code.to(tl.uint8)
        WIDTH: tl.constexpr = BLOCK // 2 if PACK else BLOCK
        place = (b * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
        tl.store(codes_ptr + place, packed)

    if FILL >= 0:
        byte = tl.where(inside, byte, FILL)
    if not STORED and len(DIGITS) > 0:
        if WIDE:
            at = layout_offset(row, col, RO, CO, DIGITS) + mat * bytes_mat
        else:  # unsigned: divisions by powers of two are single shifts
            place = layout_offset(row, col, RO.to(tl.uint32), CO.to(tl.uint32), DIGITS)
            at = (place if ONE else place + mat * bytes_mat.to(tl.uint32)).to(tl.int32)
    tl.store(scale_ptr + at, byte.to(tl.uint8))


@triton.jit(do_not_specialize=["groups", "groups_mat"])
def dequantize_kernel(
    codes_ptr, scale_ptr, g_ptr, out_ptr, groups, groups_mat,
    N: tl.constexpr, GROUP: tl.constexpr, PER_BLOCK: tl.constexpr, PACK: tl.constexpr, SCALE: tl.constexpr,
    TENSOR_SCALE: tl.constexpr, EXPERTS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A group is 16 bytes of output (a thread's store); PER_BLOCK groups share a scale byte."""
    first = tl.program_id(0).to(tl.int64) * N if WIDE else tl.program_id(0) * N
    r = first + tl.arange(0, N)
    live = r < groups
    byte = tl.load(scale_ptr + r // PER_BLOCK, mask=live, other=0)
    if SCALE == 0:
        s = decode_e4m3(byte)
    elif SCALE == 1:
        s = decode_ue5m3(byte)
    else:
        s = decode_ue8m0(byte)
    if TENSOR_SCALE:
        if EXPERTS:
            s = s * tl.load(g_ptr + r // groups_mat, mask=live, other=1.0)
        else:
            s = s * tl.load(g_ptr + tl.zeros([1], tl.int32))
    if PACK:
        h = tl.arange(0, GROUP // 2)
        packed = tl.load(codes_ptr + (r * (GROUP // 2))[:, None] + h[None, :], mask=live[:, None], other=0).to(tl.int32)
        value = tl.reshape(tl.join(decode_e2m1(packed), decode_e2m1(packed >> 4)), [N, GROUP])
    else:
        h = tl.arange(0, GROUP)
        value = decode_e4m3(tl.load(codes_ptr + (r * GROUP)[:, None] + h[None, :], mask=live[:, None], other=0))
    e = tl.arange(0, GROUP)
    out = value * s[:, None]
    if out_ptr.dtype.element_ty == tl.int16:  # bf16 where the cast cannot be trusted, see dequantize_blocks
        cast = bf16_bits(out).to(tl.int16)
    else:
        cast = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (r * GROUP)[:, None] + e[None, :], cast, mask=live[:, None])
