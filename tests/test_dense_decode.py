"""The decode instruction strings, run on a model of PTX: every code with every scale byte gives the exact product."""

from __future__ import annotations

import numpy as np
import ptx_model
import pytest
import torch

from fp4.errors import Unsupported
from fp4.gpu.kernels import frag
from fp4.layouts import layouts

pytestmark = pytest.mark.kernel
decode = pytest.importorskip("fp4.gpu.kernels.decode")

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def e4m3(byte: int) -> float:
    e, m = byte >> 3 & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return float("nan")
    v = m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10)
    return -v if byte & 0x80 else v


def words(codes: np.ndarray) -> np.ndarray:
    """codes [lanes, e, h, l] -> stored words, by the word table."""
    flat = codes.reshape(len(codes), 8).astype(np.uint64)
    raw = sum(flat[:, i] << np.uint64(4 * i) for i in range(8))
    out = np.zeros(len(codes), np.uint64)
    for i, j in enumerate(frag.word_table()):
        out |= ((raw >> np.uint64(j)) & np.uint64(1)) << np.uint64(i)
    return out.astype(np.uint32)


def test_word_table_is_the_catalogue_one():
    assert layouts["frag_w"].word == frag.word_table()


@pytest.mark.parametrize("shape", [(16, 64), (48, 320), (33, 112)])
def test_layouts_match_the_formula_and_invert(shape):
    """Stored position by an independent formula: lane 4 g + t of tile (no, ko), 16-byte words, scales by 4-tile blocks."""
    n, k = shape
    rng = np.random.default_rng(0)
    code = rng.integers(0, 16, (n, k), dtype=np.uint8)
    packed = torch.from_numpy(code[:, 0::2] | code[:, 1::2] << 4)
    got = layouts["frag_w"].apply(packed)
    word = got.numpy().view(np.uint32)
    tiles = -(-k // 64)
    for row, col in zip(rng.integers(0, n, 300), rng.integers(0, k, 300), strict=True):
        lane, step = 4 * (row % 8) + col % 64 // 16, col % 16 // 4
        w = word[((row // 16 * tiles + col // 64) * 32 + lane) * 4 + step]
        e, h, pair = row % 16 // 8, col % 4 // 2, col % 2
        sign, low = frag._PLACES[e, h]
        assert (w >> (16 * pair + low) & 7) | (w >> (16 * pair + sign) & 1) << 3 == code[row, col]
    assert torch.equal(layouts["frag_w"].invert(got, shape=packed.shape), packed)
    for block in (16, 32):
        if k % block:
            continue
        scale = torch.from_numpy(rng.integers(0, 256, (n, k // block), dtype=np.uint8))
        layout = layouts[frag.SCALE_LAYOUT[block]]
        stored = layout.apply(scale)
        per = 64 // block
        for row, col in zip(rng.integers(0, n, 300), rng.integers(0, k // block, 300), strict=True):
            tile, t = col // per, col % per
            byte = (
                8 * ((row // 16 * -(-tiles // 4) + tile // 4) * 8 * per + row % 8 * per + t)
                + tile % 4 // 2 * 4
                + row % 16 // 8 * 2
                + tile % 2
            )
            assert stored[byte] == scale[row, col]
        assert torch.equal(layout.invert(stored, shape=scale.shape), scale)


def decoded_scales(block, half, any_byte, bias=0, low=0, high=0x7E):
    """All promised bytes through the scale asm, in every byte position, with promised bytes as neighbours."""
    asm = decode.SCALE_ASM[(block, any_byte, half)]
    got = []
    for place in range(4):
        byte = np.arange(256, dtype=np.uint32)
        if not (block == 16 and any_byte):
            nan = any_byte & (byte == 255)
            byte = np.where(nan | ((byte >= low) & (byte <= high)), byte, low)
        w = byte << np.uint32(8 * place) | np.uint32(high * 0x01010101 & ~(0xFF << (8 * place)))
        oc = np.full(256, frag.Window(1.0, bias, any_byte, half).oc & 0xFFFFFFFF, np.uint32)
        got.append(ptx_model.run(asm, {4: w, 5: oc}, 4)[place])
    assert all(np.array_equal(g, got[0]) for g in got)
    return got[0]


@pytest.mark.parametrize("half", [False, True], ids=["bf16", "fp16"])
@pytest.mark.parametrize("any_byte", [False, True])
def test_e4m3_products_are_exact(half, any_byte):
    bits = decoded_scales(16, half, any_byte)
    count = 256 if any_byte else 0x7F
    left = 2.0 ** -frag.LEFT_E4M3[half]
    for byte in range(count):
        check_products(bits[byte], e4m3(byte) * left, half)


def check_products(scale_bits, scale, half):
    asm = decode.W_FP16 if half else decode.W_BF16
    lanes = np.arange(16)
    codes = (lanes[:, None] + np.arange(8)[None, :] * 5) % 16  # every code in every place
    w = words(codes.reshape(16, 2, 2, 2))
    one = np.full(16, scale_bits, np.uint32)
    other = np.full(16, 0x3C00 if half else 0x3F80, np.uint32)  # 1.0: the two rows must not share a scale
    for e in range(2):
        out = ptx_model.run(asm, {8: w, 9: one if e == 0 else other, 10: one if e == 1 else other}, 8)
        for i in range(8):
            got = ptx_model.to_float(out[i], half)
            want = E2M1[codes[:, i]] * (scale if i // 4 == e else 2.0 ** (-14 if half else -126))
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("half", [False, True], ids=["bf16", "fp16"])
@pytest.mark.parametrize("any_byte", [False, True])
def test_ue8m0_products_are_exact_over_every_window(half, any_byte):
    span = 24 if half else 133
    for high in (255 - 1, 200, 137, 136, 127, 40 if half else 134, 30):
        low = max(0, high - span) if half or high > 136 else 3
        if low > high:
            continue
        win = frag.ue8m0_window(low, high, any_byte, half)
        bits = decoded_scales(32, half, any_byte, win.bias, low, high)
        for byte in sorted({low, low + 1, (low + high) // 2, high - 1, high}):
            # alpha may be large: compare products scaled by it in float64
            asm = decode.W_FP16 if half else decode.W_BF16
            codes = np.arange(16).reshape(2, 2, 2, 2) % 16
            w = words(codes)
            s = np.full(2, bits[byte], np.uint32)
            out = ptx_model.run(asm, {8: w, 9: s, 10: s}, 8)
            got = np.stack([ptx_model.to_float(o, half) for o in out], -1) * win.alpha
            np.testing.assert_array_equal(got, E2M1[codes.reshape(2, 8)] * 2.0 ** (byte - 127))
        if any_byte:
            assert np.isnan(ptx_model.to_float(bits[255:256], half)).all()


def test_bytes_below_an_fp16_window_are_zero():
    """Padding holds byte 0: times a zero code it must be zero, whatever the window (bias -97 once gave the bits of infinity)."""
    for any_byte in (False, True):
        for high in range(1, 255):
            win = frag.ue8m0_window(max(high - 3, 0), high, any_byte, True)
            word = np.array([0 | high << 8 | 0 << 16 | high << 24], np.uint32)
            oc = np.array([win.oc & 0xFFFFFFFF], np.uint32)
            out = ptx_model.run(decode.SCALE_ASM[(32, any_byte, True)], {4: word, 5: oc}, 4)
            got = [ptx_model.to_float(o, True)[0] for o in out]
            below = high >= 30  # field 30 - high
            assert got[1] == got[3] == 2.0**15, (high, got)
            assert got[0] == got[2] == (0 if below else 2.0 ** (15 - high)), (high, got)


def test_window_refuses_what_it_cannot_hold():
    frag.ue8m0_window(100, 124, False, True)
    with pytest.raises(Unsupported, match="span 25 binades"):
        frag.ue8m0_window(100, 125, False, True)
    frag.ue8m0_window(121, 254, False, False)
    with pytest.raises(Unsupported, match="span 134 binades"):
        frag.ue8m0_window(120, 254, False, False)
