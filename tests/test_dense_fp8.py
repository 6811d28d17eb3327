"""W4A8 without a GPU: the e4m3 bytes of every code under every offset, by the instruction string; what prepare refuses."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import ptx_model
import pytest
import torch
from test_dense_decode import E2M1

from fp4.errors import Unsupported
from fp4.gpu.kernels import decode_fp8, dense_fp8, plain_fp8
from fp4.layouts import layouts

pytestmark = pytest.mark.kernel


def e4m3(words: np.ndarray) -> np.ndarray:
    """Words of four e4m3, first byte lowest -> float64 [..., 4]."""
    return np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def decoded(word: np.ndarray, scale: np.ndarray, base: np.ndarray, p: int) -> list[np.ndarray]:
    """Words of tile p of a pair through both instruction strings, alone and as one of four -> rows e = 0, 1, float64 [lanes, 4]."""
    t = ptx_model.run(decode_fp8.TABLES, {8: scale, 9: base}, 8, wide=True)
    t = [t[2 * p], t[2 * p + 1], t[4 + 2 * p], t[5 + 2 * p]]
    one = ptx_model.run(decode_fp8.WORD, {2: word, **{3 + i: t[i] for i in range(4)}}, 2, wide=True)
    for i in range(4):
        spoilt = [word ^ np.uint32(0x5A5A5A5A)] * 4
        spoilt[i] = word
        inputs = {8 + j: spoilt[j] for j in range(4)} | {12 + 4 * j + i: t[j] for j in range(4)}
        inputs |= {12 + 4 * j + c: t[j] ^ np.uint32(0x77777777) for j in range(4) for c in range(4) if c != i}
        four = ptx_model.run(decode_fp8.WORDS, inputs, 8, wide=True)
        assert all(np.array_equal(four[2 * i + e], one[e]) for e in range(2))
    return [e4m3(o) for o in one]


def halves(word: np.ndarray, scale: np.ndarray, base: np.ndarray, p: int) -> list[np.ndarray]:
    """The same as fp16, through the strings of ``small_fp8``: rows e = 0, 1, float64 [lanes, 4] in the order of columns."""
    t = ptx_model.run(decode_fp8.TABLES, {8: scale, 9: base}, 8, wide=True)
    got = ptx_model.run(decode_fp8.WORD_FP16, {8: word, 9: t[2 * p], 10: t[2 * p + 1], 11: t[4 + 2 * p], 12: t[5 + 2 * p]}, 8)
    return [np.stack([ptx_model.to_float(got[4 * e + i], True) for i in range(4)], -1) for e in range(2)]


@pytest.mark.parametrize("base", [11, 120, 254])
def test_weights_become_e4m3_exactly(base):
    """Each code in each place of a word under each distance of both rows' scales, from stored bytes on; -0 stays -0."""
    code = np.stack([(np.arange(16) * m + c) % 16 for m, c in ((1, 0), (1, 8), (3, 1), (5, 2))]).T  # 16 x 4: row g, adjacent columns
    for d0 in range(decode_fp8.SPAN + 1):
        for d1 in range(decode_fp8.SPAN + 1):
            codes = np.zeros((32, 128), np.uint8)
            codes[:16, 4:8], codes[:16, 100:104] = code, code[::-1]  # tile 0: lane t = 0, word 1; tile 1: lane t = 2, word 1
            codes[16:, 4:8] = code
            scale = np.full((32, 8), base - d1, np.uint8)
            scale[np.arange(32) % 16 < 8] = base - d0
            scale[:, 4:] = 0  # tiles that do not exist
            w = (
                layouts["frag_w8"]
                .apply(torch.from_numpy(codes[:, 0::2] | codes[:, 1::2] << 4))
                .numpy()
                .view(np.uint32)
                .reshape(2, 2, 8, 4, 4)
            )
            s = layouts["frag_sf32"].apply(torch.from_numpy(scale)).numpy().view(np.uint32).reshape(2, 8, 2, 2)  # no g t2 v
            for no, tile, t, k in ((0, 0, 0, 4), (0, 1, 2, 100), (1, 0, 0, 4)):
                word, lanes = w[no, tile, :, t, 1], np.full(8, base * 0x01010101, np.uint32)
                args = word.copy(), s[no, :, t // 2, 0].copy(), lanes, tile
                for rows in (decoded(*args), halves(*args)):
                    for e, got in enumerate(rows):
                        want = E2M1[codes[16 * no + 8 * e + np.arange(8), k : k + 4]] * 2.0 ** (6 - (d1 if e else d0))
                        np.testing.assert_array_equal(got, want)
                        np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


def test_one_binade_more_would_not_be_exact():
    """SPAN is what the table reaches: 0.5 * 2^(6 - 12) is a subnormal of e4m3, not in the table. Code 0 is 0 under any byte."""
    half = np.full(1, 0x1111, np.uint32)
    base = np.full(1, 0x78787878, np.uint32)
    for d in (decode_fp8.SPAN, decode_fp8.SPAN + 1):
        got = decoded(half, base - np.uint32(d * 0x01010101), base, 0)[0]
        assert (got == 0.5 * 2.0 ** (6 - d)).all() == (d == decode_fp8.SPAN)
    for byte in range(121):
        args = half * 0, np.full(1, byte * 0x01010101, np.uint32), base, 1
        assert all((o == 0).all() for o in (*decoded(*args), *halves(*args)))


def test_x_becomes_fp16_in_the_order_of_the_weights():
    byte = np.arange(256, dtype=np.uint32)
    nan = (byte & 0x7F) == 0x7F
    byte = byte[~nan]
    columns = [byte, byte[::-1], np.roll(byte, 5), np.roll(byte, 77)]
    word = sum(c << np.uint32(8 * i) for i, c in enumerate(columns))
    got = ptx_model.run(decode_fp8.X_FP16, {4: word}, 4)
    np.testing.assert_array_equal(np.stack([ptx_model.to_float(o, True) for o in got], -1), e4m3(word))


def test_the_layout_is_the_one_of_w4a16_with_other_bits():
    """frag_w8 keeps each 32-bit word of frag_w in its place: the same eight codes, magnitudes as nibbles, signs in the spare bits."""
    rng = np.random.default_rng(0)
    code = rng.integers(0, 16, (48, 320), dtype=np.uint8)
    packed = torch.from_numpy(code[:, 0::2] | code[:, 1::2] << 4)
    got = layouts["frag_w8"].apply(packed)
    word = got.numpy().view(np.uint32)
    for row, col in zip(rng.integers(0, 48, 400), rng.integers(0, 320, 400), strict=True):
        w = word[((row // 16 * 5 + col // 64) * 32 + 4 * (row % 8) + col % 64 // 16) * 4 + col % 16 // 4]
        e, j = row % 16 // 8, col % 4
        assert (w >> (16 * e + 4 * j) & 7) | (w >> (8 * j + (3 if e else 7)) & 1) << 3 == code[row, col]
    assert torch.equal(layouts["frag_w8"].invert(got, shape=packed.shape), packed)


def test_row_base_refuses_wide_rows_and_nan():
    scale = torch.full((4, 8), 120, dtype=torch.uint8)
    scale[2, 3] = 109
    assert plain_fp8.row_base(scale).tolist() == [120, 120, 120, 120]
    scale[2, 3] = 108
    with pytest.raises(Unsupported, match=r"1 of 4 rows span more \(row 2: -19 .. -7\)"):
        plain_fp8.row_base(scale)
    scale[2, 3] = 255
    with pytest.raises(Unsupported, match="NaN"):
        plain_fp8.row_base(scale)


def test_reasons():
    assert "6 significant bits" in str(dense_fp8.reason((9, 0), 16))
    assert "need SM89" in str(dense_fp8.reason((8, 6), 32))
    assert all(dense_fp8.reason(cc, 32) is None for cc in ((8, 9), (9, 0), (10, 0), (12, 0)))


def test_prepare_for_fp8_activations_restores_and_refuses():
    """Through prepare, for a Hopper GPU that is not here: the bytes come back; NVFP4 and wide rows are refused with the reason."""
    import fp4
    from fp4.gpu.device import Device

    g = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (48, 80), dtype=torch.uint8, generator=g)
    scale = torch.randint(115, 122, (48, 5), dtype=torch.uint8, generator=g)
    q = fp4.QuantizedTensor(format="mxfp4", codes=codes, scale=scale)
    sm90 = Device.of("sm90")
    p = fp4.prepare(q, backend="triton", device=sm90, act="fp8")
    assert p.meta["path"] == "dense"
    assert torch.equal(p.arrays["triton.row_base"], scale.amax(-1))
    assert torch.equal(p.restore().codes, codes)
    assert torch.equal(p.restore().scale, scale)
    wide = scale.clone()
    wide[3, 1] = 90
    with pytest.raises(Unsupported, match="span at most 11 binades"):
        fp4.prepare(fp4.QuantizedTensor(format="mxfp4", codes=codes, scale=wide), backend="triton", device=sm90, act="fp8")
    nv = fp4.QuantizedTensor(format="nvfp4", codes=codes, scale=scale.repeat_interleave(2, -1))
    with pytest.raises(ValueError, match=r"6 significant bits|fp8"):
        fp4.prepare(nv, backend="triton", device=sm90, act="fp8")


def mma_sums(products: np.ndarray, step: int, bits: int) -> np.ndarray:
    """products [terms, n] added as an fp8 MMA does: ``step`` terms and the running sum are aligned to the largest exponent among them and
    cut (toward zero) after ``bits`` bits."""
    acc = np.zeros(products.shape[1])
    for k in range(0, len(products), step):
        part = np.concatenate([products[k : k + step], acc[None]])
        top = np.maximum(np.abs(part).max(0), 1e-300)
        unit = 2.0 ** (np.floor(np.log2(top)) - bits + 1)
        acc = (np.trunc(part / unit) * unit).sum(0)
    return acc


@pytest.mark.parametrize("k", [32, 1024, 2880, 8192])
def test_sums_of_14_bits_stay_within_the_bound(k):
    """The bound of tests/gpu/test_dense.py (2e-3) leaves room for sums of 14 bits up to k = 8192 without a second accumulator; sums of
    8 bits break it."""
    g = torch.Generator().manual_seed(k)
    x = torch.randn(64, k, generator=g)
    x8 = (x / (x.abs().amax(-1, keepdim=True) / 448)).to(torch.float8_e4m3fn).double().numpy()
    code = torch.randint(0, 16, (k,), generator=g).numpy()
    span = torch.randint(0, 7, (k // 32,), generator=g).numpy().repeat(32)
    products = (x8 * (E2M1[code] * 2.0 ** (6 - span))).T
    size = np.abs(products).sum(0)
    error = {bits: (np.abs(mma_sums(products, 32, bits) - products.sum(0)) / size).max() for bits in (8, 14)}
    print(k, error)
    assert error[14] < 1e-3
    assert error[8] > 2e-3


@pytest.mark.parametrize(("frag_order", "once"), [(False, False), (True, True)])
def test_the_quantiser_is_the_formula(frag_order, once):
    """quantize_x byte for byte against x / (amax / 448) with IEEE divisions, in Triton's interpreter or on a GPU, counters zeroed.

    A cast that goes through fp16, as Triton's does below SM90, rounds twice: one code in 400 was off by one on SM89's machine code.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    m, k, kt = 5, 4064, 64
    x = (torch.randn(m, k, generator=torch.Generator().manual_seed(1)) * torch.tensor([1e-3, 1, 50, 0, 1])[:, None]).bfloat16()
    x[0, :4] = torch.tensor([3.5, 0.2109375, 1.7578125e-2, -0.0])  # amax / 448 = 2^-7: ties
    grid = torch.arange(128, 256) / 128  # every bf16 mantissa as x and, doubled, as amax: the row with most codes that two roundings change
    ratio = grid / (2 * grid / torch.full_like(grid, 448.0))[:, None]
    changed = (ratio.to(torch.float8_e4m3fn).float() != ratio.half().to(torch.float8_e4m3fn).float()).sum(1)
    x[1] = grid.repeat(32)[:k]
    x[1, 0] = 2 * grid[changed.argmax()]
    x[4, 7] = torch.nan
    x[2, :2048] *= torch.logspace(-8, 0, 2048).bfloat16()  # subnormals of e4m3 and below
    q = torch.full((m, kt * 64), 0x55, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    xs = torch.zeros(m, device=device)
    counts = torch.full((24,), 7, dtype=torch.int32, device=device)
    # the interpreter rounds an fma twice
    how = {"B": kt if once else 32, "ONCE": once, "IEEE": not torch.cuda.is_available()}
    plain_fp8.quantize_x[(m,)](x.to(device), q, xs, counts, k, kt, FRAG=frag_order, PDL=False, ROUND=True, COUNTS=16, **how)
    assert counts.tolist() == [0] * 16 + [7] * 8
    q = q.view(torch.uint8).cpu()
    if frag_order:
        q = q.reshape(m, kt, 4, 4, 4).transpose(2, 3).reshape(m, kt * 64)
    top = x.float().abs().amax(-1, keepdim=True)
    want = torch.where(top == 0, 1.0, top) / torch.full_like(top, 448.0)
    assert torch.equal(xs.cpu()[:4], want[:4, 0])
    assert torch.isnan(xs[4])
    assert torch.equal(q[:4, :k], (x.float() / want)[:4].to(torch.float8_e4m3fn).view(torch.uint8))
    assert (q[:4, k:] == 0).all()
    twice = (x.float() / want)[:4].half().to(torch.float8_e4m3fn).view(torch.uint8)
    assert (q[:4, :k] != twice).sum() > 10


def test_a_product_with_the_reciprocal_and_one_correction_is_the_quotient():
    """What quantize_x does in place of an IEEE division, in numbers of 24 bits with fused steps, against the rounded quotient."""
    rng = np.random.default_rng(0)
    x = rng.integers(-(1 << 24), 1 << 24, 1 << 20).astype(np.float32) * np.exp2(rng.integers(-40, 20, 1 << 20)).astype(np.float32)
    x[: 1 << 19] = torch.from_numpy(x[: 1 << 19]).bfloat16().float().numpy()
    x[:2] = 0.0, -0.0
    scale = (rng.integers(1 << 23, 1 << 24, 1 << 20).astype(np.float32) / np.float32(448)) * np.float32(2.0**-20)
    r = np.float32(1) / scale
    q = x * r
    rest = (q.astype(np.longdouble) * scale.astype(np.longdouble) - x.astype(np.longdouble)).astype(
        np.float32
    )  # 64 bits hold it: one rounding
    got = (rest.astype(np.longdouble) * -r.astype(np.longdouble) + q.astype(np.longdouble)).astype(np.float32)
    want = x / scale
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(want))
    assert (q != want).mean() > 0.05
