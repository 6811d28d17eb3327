"""Published index formulas, written down by hand from the libraries' own index arithmetic and not from the specs in fp4/layouts.py.

``FORMULAS[name](m, k, M, K)``: unit (m, k) of an M x K matrix (padded, in units: bytes or nibbles) -> its storage offset in units, before
a word table. m and k are integer arrays, every division floors.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Index = np.ndarray
FORMULAS: dict[str, Callable[[Index, Index, int, int], Index]] = {}


def formula(*names: str):  # type: ignore[no-untyped-def]
    def add(f: Callable[[Index, Index, int, int], Index]) -> Callable[[Index, Index, int, int], Index]:
        FORMULAS.update(dict.fromkeys(names, f))
        return f

    return add


def rows(old_to_new: Callable[[Index, int], Index]) -> Callable[[Index, Index, int, int], Index]:
    """A row order as an offset: whole rows of K bytes, row m to place old_to_new(m, M)."""
    return lambda m, k, M, K: old_to_new(m, M) * K + k


def gather(new_to_old: Callable[[Index, int], Index]) -> Callable[[Index, Index, int, int], Index]:
    """A row order published as ``out[n] = in[p(n)]``."""

    def f(m: Index, k: Index, M: int, K: int) -> Index:
        place = np.empty(M, dtype=np.int64)
        place[new_to_old(np.arange(M), M)] = np.arange(M)
        return place[m] * K + k

    return f


# rows
FORMULAS["plain"] = rows(lambda m, M: m)
FORMULAS["gate_up_pairs"] = gather(lambda n, M: n // 2 + n % 2 * (M // 2))  # reorder_rows_for_gated_act_gemm
FORMULAS["gate_up_halves"] = gather(lambda n, M: 2 * (n % (M // 2)) + n // (M // 2))  # pairs -> halves
FORMULAS["up_gate_pairs"] = gather(lambda n, M: n // 2 + (1 - n % 2) * (M // 2))
FORMULAS["up_gate_halves"] = gather(lambda n, M: 2 * (n % (M // 2)) + 1 - n // (M // 2))
FORMULAS["swap_pairs"] = gather(lambda n, M: n ^ 1)
FORMULAS["swap_halves"] = gather(lambda n, M: (n + M // 2) % M)
FORMULAS["trtllm_rows_32"] = gather(lambda n, M: n // 32 * 32 + 4 * (n % 8) + n % 32 // 8)
FORMULAS["trtllm_rows_16"] = gather(lambda n, M: n // 16 * 16 + 2 * (n % 8) + n % 16 // 8)
FORMULAS["deepgemm_gate_up"] = gather(lambda r, M: r // 8 // 2 * 8 + r % 8 + r // 8 % 2 * (M // 2))


@formula("deepgemm_gate_up_fp4")
def _(m: Index, k: Index, M: int, K: int) -> Index:
    def source(r: Index, M: int) -> Index:
        o = r % 32
        part, t = o // 8, o % 8
        return r // 32 * 16 + 2 * t + part // 2 + part % 2 * (M // 2)

    return gather(source)(m, k, M, K)


FORMULAS["deepgemm_utccp"] = rows(lambda m, M: m // 128 * 128 + m % 32 * 4 + m % 128 // 32)
FORMULAS["marlin_bias"] = rows(lambda c, M: c // 32 * 32 + c % 8 // 2 * 8 + 2 * (c % 32 // 8) + c % 2)


# scales
@formula("sf_128x4", "blackwell_sf", "blackwell_act_sf")
def _(r: Index, c: Index, R: int, C: int) -> Index:
    return ((r // 128) * (C // 4) + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4


@formula("triton_gfx1250_sf")
def _(n: Index, ks: Index, N: int, Ks: int) -> Index:
    a = 3 if Ks % 4 else 4
    return n // 128 * (128 * Ks) + ks // a * 128 * a + n % 32 * 4 * a + n % 128 // 32 * a + ks % a


FORMULAS["sf_8x4"] = lambda r, c, R, C: ((r // 8) * (C // 4) + c // 4) * 32 + r % 8 * 4 + c % 4
FORMULAS["kv_v_sf"] = lambda t, s, T, S: t // 4 * 4 * S + s * 4 + t % 4
FORMULAS["sm90_mixed_sf_a"] = lambda r, c, N, C: c // 4 * 4 * N + 4 * r + c % 4


@formula("sm90_mixed_sf")
def _(r: Index, c: Index, N: int, C: int) -> Index:
    big, w, f = r // 64, r % 64 // 16, r % 16
    return ((big * (C // 4) + c // 4) * 16 + f) * 16 + 4 * w + c % 4


@formula("cdna4_sf", "aiter_sf")
def _(r: Index, c: Index, R: int, C: int) -> Index:
    a, b, i = r // 32, r % 32 // 16, r % 16
    d, f, g = c // 8, c % 8 // 4, c % 4
    return ((((a * (C // 8) + d) * 4 + g) * 16 + i) * 2 + f) * 2 + b


@formula("aiter_sf_gu")
def _(r: Index, c: Index, R: int, C: int) -> Index:
    b, rest = r // (R // 2), r % (R // 2)
    return ((((rest // 16 * (C // 8) + c // 8) * 4 + c % 4) * 16 + rest % 16) * 2 + c % 8 // 4) * 2 + b


FORMULAS["gfx1250_sf"] = lambda n, k, N, K: (n // 32 * (K // 4) + k // 4) * 128 + n % 32 * 4 + k % 4


def _single(c: Index) -> Index:
    return c // 32 * 32 + c % 8 // 2 * 8 + 2 * (c % 32 // 8) + c % 2


def _grouped(c: Index) -> Index:
    return c // 64 * 64 + c % 8 * 8 + c % 64 // 8


def _middle(p: Index) -> Index:
    """Swap the two middle entries of each four."""
    return p // 4 * 4 + np.array([0, 2, 1, 3])[p % 4]


FORMULAS["marlin_sf"] = lambda n, g, N, G: g * N + _grouped(n)
FORMULAS["marlin_mx_sf"] = lambda n, g, N, G: g * N + _middle(_grouped(n))
FORMULAS["marlin_sf_single"] = lambda n, g, N, G: g * N + _single(n)
FORMULAS["marlin_mx_sf_single"] = lambda n, g, N, G: g * N + _middle(_single(n))
FORMULAS["deepgemm_sf"] = lambda m, g, MN, G: (g // 4 * MN + m) * 4 + g % 4
FORMULAS["cpu_amx_sf"] = lambda n, g, N, G: (n // 32 * G + g) * 32 + n % 32


def hopper_sf(w: int) -> Callable[[Index, Index, int, int], Index]:
    def f(n: Index, ks: Index, N: int, Ks: int) -> Index:
        r = n // (32 * w) * w + n // 16 % w
        c = ks // 2 * 64 + n // (16 * w) % 2 * 32 + n % 8 * 4 + ks % 2 * 2 + n // 8 % 2
        return r * (32 * Ks) + c

    return f


FORMULAS["hopper_sf"] = hopper_sf(8)
FORMULAS["hopper_sf(num_warps=4)"] = hopper_sf(4)


# weights
@formula("hopper_value_v3")
def _(n: Index, k2: Index, N: int, K2: int) -> Index:
    r = n // 16 * 4 + n % 8 // 2
    c = k2 // 32 * 128 + n % 2 * 64 + k2 % 4 * 16 + k2 % 32 // 8 * 4 + k2 // 4 % 2 * 2 + n // 8 % 2
    return r * (4 * K2) + c


@formula("hopper_value_v2")
def _(n: Index, k2: Index, N: int, K2: int) -> Index:
    r = n // 16 * 4 + n % 8 // 2
    c = k2 // 32 * 128 + n % 2 * 64 + k2 % 16 // 4 * 16 + k2 // 16 % 2 * 8 + n // 8 % 2 * 4 + k2 % 4
    return r * (4 * K2) + c


FORMULAS["blackwell_value"] = lambda n, k, N, K: n * K + k


def shuffled(bk: int, bn: int) -> Callable[[Index, Index, int, int], Index]:
    def f(n: Index, k2: Index, N: int, K2: int) -> Index:
        return ((k2 // (bk // 2) * (N // bn) + n // bn) * bn + n % bn) * (bk // 2) + k2 % (bk // 2)

    return f


FORMULAS["blackwell_value_shuffled"] = shuffled(128, 256)


@formula("sm90_mixed_fp4")
def _(row: Index, col: Index, N: int, K2: int) -> Index:
    """Byte before the word table: word at row 16b + 8 (m mod 2) + i, bytes 32p + 16 (m / 2) + 4 l; v = (h, d) -> byte h + 2 d."""
    b, h, i = row // 16, row % 16 // 8, row % 8
    p, m, d, ell = col // 32, col % 32 // 8, col % 8 // 4, col % 4
    return (16 * b + 8 * (m % 2) + i) * K2 + 32 * p + 16 * (m // 2) + 4 * ell + h + 2 * d


@formula("sm90_mixed_fp4_a")
def _(row: Index, nib: Index, N: int, K: int) -> Index:
    b, h, i = row // 16, row % 16 // 8, row % 8
    col, y = nib // 2, nib % 2
    p, a, c, d, ell = col // 32, col % 32 // 16, col % 16 // 8, col % 8 // 4, col % 4
    return ((16 * b + 8 * c + i) * (K // 2) + 32 * p + 16 * a + 4 * ell + 2 * d + y) * 2 + h


@formula("sm90_mixed_int4", "sm90_mixed_fp4_fp8")
def _(row: Index, col: Index, N: int, K2: int) -> Index:
    b, h, i = row // 16, row % 16 // 8, row % 8
    p, g, t, ell, z = col // 32, col % 32 // 16, col % 16 // 8, col % 8 // 2, col % 2
    return (16 * b + 8 * t + i) * K2 + 32 * p + 16 * g + 4 * ell + 2 * h + z


@formula("aiter_w")
def _(n: Index, k: Index, N: int, Kb: int) -> Index:
    return (((n // 16 * (Kb // 32) + k // 32) * 2 + k % 32 // 16) * 16 + n % 16) * 16 + k % 16


@formula("aiter_w_gu")
def _(n: Index, k: Index, N: int, Kb: int) -> Index:
    P = N // 2
    g, rest = n // P, n % P
    return ((((rest // 16 * 2 + g) * (Kb // 64) + k // 64) * 4 + k % 64 // 16) * 16 + rest % 16) * 16 + k % 16


@formula("aiter_w_a16w4")
def _(n: Index, k: Index, N: int, Kb: int) -> Index:
    return (((n // 16 * (Kb // 64) + k // 64) * 4 + k % 64 // 16) * 16 + n % 16) * 16 + k % 16


FORMULAS["gfx1250_w"] = lambda n, k, N, Kb: ((n // 16 * (Kb // 16) + k // 16) * 16 + n % 16) * 16 + k % 16


@formula("marlin_w")
def _(n: Index, k: Index, N: int, K: int) -> Index:
    kt, h, j, b = k // 16, k % 16 // 8, k % 8 // 2, k % 2
    nt, w, g, i = n // 64, n % 64 // 16, n % 16 // 8, n % 8
    return (kt * 2 * N + 128 * nt + 4 * (4 * i + j) + w) * 8 + h + 2 * g + 4 * b


@formula("marlin_w_a8")
def _(n: Index, k: Index, N: int, K: int) -> Index:
    kt, h, j, e = k // 32, k % 32 // 16, k % 16 // 4, k % 4
    nt, w, i = n // 32, n % 32 // 8, n % 8
    return ((kt * (N // 32) + nt) * 128 + 4 * (4 * i + j) + w) * 8 + 2 * e + h


@formula("cpu_amx_w")
def _(n: Index, k: Index, N: int, K: int) -> Index:
    nb, r, kk, d = n // 32, n % 32, k // 2, k % 2
    q = 2 * r + d
    return (nb * 32 * (K // 2) + kk * 32 + q % 32) * 2 + q // 32


# fp4's own fragment order: fp4/gpu/kernels reads lane g * 4 + t of mma m16n8k16, rows g and g + 8; lane t owns 16 columns in four steps
@formula("frag_w")
@formula("frag_w8")
def _(n: Index, k: Index, N: int, K: int) -> Index:
    no, e, g = n // 16, n % 16 // 8, n % 8
    ko, t, s, h, low = k // 64, k % 64 // 16, k % 16 // 4, k % 4 // 2, k % 2
    return (((no * (K // 64) + ko) * 32 + g * 4 + t) * 4 + s) * 8 + 4 * e + 2 * h + low


@formula("frag_sf16")
def _(n: Index, k: Index, N: int, K: int) -> Index:
    no, e, g = n // 16, n % 16 // 8, n % 8
    ko, v, p, t = k // 16, k % 16 // 8, k % 8 // 4, k % 4
    return ((no * (K // 16) + ko) * 32 + g * 4 + t) * 8 + 4 * v + 2 * e + p


@formula("frag_sf32")
def _(n: Index, k: Index, N: int, K: int) -> Index:
    no, e, g = n // 16, n % 16 // 8, n % 8
    ko, v, p, t = k // 8, k % 8 // 4, k % 4 // 2, k % 2
    return ((no * (K // 8) + ko) * 16 + g * 2 + t) * 8 + 4 * v + 2 * e + p


# ---- word tables: where bit b of nibble j (0 = lowest) of a 32-bit word goes ---------------------------------------------------------


def _pair_word(places: tuple[tuple[int, int, int, int], ...]) -> list[int]:
    """(sign, e1, e0, m) positions of the low nibbles of bytes 0..3 in the low half; high nibbles at the same places of the high half."""
    return [places[j // 2][3 - b] + 16 * (j % 2) for j in range(8) for b in range(4)]


_A = _pair_word(((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 11, 10, 13)))
_FRAG = _pair_word(((15, 8, 7, 6), (12, 5, 4, 3), (13, 11, 10, 9), (14, 2, 1, 0)))
#: magnitudes stay, the sign of nibble j moves to nibble (1, 3, 5, 7, 0, 2, 4, 6)[j]
_B = [4 * j + b if b < 3 else 4 * (1, 3, 5, 7, 0, 2, 4, 6)[j] + 3 for j in range(8) for b in range(4)]
WORDS = {
    "hopper_value_v3": _A,
    "hopper_value_v2": _A,
    "sm90_mixed_fp4": _A,
    "sm90_mixed_fp4_fp8": _B,
    "frag_w": _FRAG,
    "frag_w8": _B,
}


def published_bytes(layout, x: np.ndarray) -> np.ndarray:  # type: ignore[no-untyped-def]
    """What the vendor stores for an unpadded byte matrix x, from the formulas and word positions of this file alone."""
    per_byte = layout.units_per_byte
    units = x if per_byte == 1 else np.stack((x & 15, x >> 4), -1).reshape(x.shape[0], -1)
    name, (rows, cols) = layout.name, units.shape
    f = shuffled(256, 128) if name == "blackwell_value_shuffled" and layout.tile[0] == 128 else FORMULAS[name]
    place = f(np.arange(rows)[:, None], np.arange(cols)[None], rows, cols) + np.zeros(units.shape, np.int64)
    out = np.zeros(rows * cols, np.uint8)
    out[place.reshape(-1)] = units.reshape(-1)
    if per_byte == 2:
        out = out[0::2] | out[1::2] << 4
    if name in WORDS:
        words, moved = out.view("<u4"), np.zeros(out.size // 4, np.uint32)
        for src, dst in enumerate(WORDS[name]):
            moved |= (words >> src & 1) << dst
        out = moved.view(np.uint8)
    return out
