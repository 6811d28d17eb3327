"""Device decode of 4-bit weights stored in tensor-core fragment order (layouts ``frag_w``, ``frag_sf16``, ``frag_sf32``).

One 32-bit word holds the eight codes that one lane feeds into one ``m16n8k16`` step: rows ``g`` and ``g + 8`` (e = 0, 1),
k halves h = 0, 1, and the adjacent pair l = 0, 1. The word table of ``frag_w`` places sign and magnitude bits so that masks,
shifts and one small multiplication drop each pair into the fields of a packed 16-bit float:

    bf16: sign 15, magnitude 8..6  -> e2m1 * 2^-126        fp16: sign 15, magnitude 11..9 -> e2m1 * 2^-14

(subnormal codes come out right because they land in a subnormal). Scales are decoded from their raw bytes:

    e4m3 -> bf16:  (byte << 4) is scale * 2^-120; times 2^127, times 2^111 gives scale * 2^118       (zero and subnormals included)
    e4m3 -> fp16:  (byte << 7) is scale * 2^-8; times 2^15 gives scale * 2^7
    ue8m0 -> bf16: exponent field byte + bias; ue8m0 -> fp16: the same with a five-bit field

so the packed product code * scale is exact (at most 6 significant bits, never below the last subnormal bit while the caller keeps
the window that ``fp4.gpu.kernels.frag.scale_window`` checks) and a power of two is left for the fp32 epilogue.
Every function here works on one word (pack = 1): nothing depends on which elements a compiler puts side by side in registers.
``tests/test_dense_decode.py`` runs these very instruction strings on all scales x codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: codes -> 8 packed products. $0..$7 outputs in the order (e, h, l); $8 word; $9, $10 the scales of rows e = 0, 1
_PAIRS_BF16 = (
    "and.b32 t,$8,0x81C081C0;",
    "shl.b32 t,$8,3; and.b32 t,t,0x81C081C0;",
    "shl.b32 u,$8,2; and.b32 u,u,0x80008000; shr.b32 t,$8,3; and.b32 t,t,0x01C001C0; or.b32 t,t,u;",
    "and.b32 t,$8,0x40074007; mul.lo.u32 t,t,66; and.b32 t,t,0x81C081C0;",
)
_PAIRS_FP16 = (
    "and.b32 u,$8,0x80008000; shl.b32 t,$8,3; and.b32 t,t,0x0E000E00; or.b32 t,t,u;",
    "shl.b32 u,$8,3; and.b32 u,u,0x80008000; shl.b32 t,$8,6; and.b32 t,t,0x0E000E00; or.b32 t,t,u;",
    "shl.b32 u,$8,2; and.b32 u,u,0x80008000; and.b32 t,$8,0x0E000E00; or.b32 t,t,u;",
    "and.b32 t,$8,0x40074007; mul.lo.u32 t,t,514; and.b32 t,t,0x8E008E00;",
)


def _weights(pairs: tuple[str, ...], product: str) -> str:
    body = "".join(f"{p} {product.format(s='s0' if i < 2 else 's1')} mov.b32 {{${2 * i},${2 * i + 1}}},t;" for i, p in enumerate(pairs))
    return "{ .reg .b32 t,u,s0,s1,z; mov.b32 z,0; mov.b32 s0,{$9,$9}; mov.b32 s1,{$10,$10};" + body + "}"


def _scales(step: str, regs: str = "t,u,v", pick: tuple[str, str] = ("0x4140", "0x4342"), setup: str = "") -> str:
    """$0..$3: e0 p0, e0 p1, e1 p0, e1 p1 from the word $4 (bytes in that order)."""
    halves = "".join(f"prmt.b32 t,$4,0,{sel}; {step} mov.b32 {{${2 * i},${2 * i + 1}}},t;" for i, sel in enumerate(pick))
    return f"{{ .reg .b32 {regs}; {setup}" + halves + "}"


#: code asm: fma with a zero addend, since a packed bf16 multiply needs SM90 and the fma runs from SM80 on
W_BF16 = _weights(_PAIRS_BF16, "fma.rn.bf16x2 t,t,{s},z;")
W_FP16 = _weights(_PAIRS_FP16, "mul.rn.f16x2 t,t,{s};")
W_CONSTRAINTS = ",".join(["=&h"] * 8 + ["r", "h", "h"])

_BF16_UP = "fma.rn.bf16x2 t,t,c0,z; fma.rn.bf16x2 t,t,c1,z;"
_BF16_SETUP = "mov.b32 z,0; mov.b32 c0,0x7F007F00; mov.b32 c1,0x77007700;"
#: e4m3 bytes 0x00..0x7E (what NVFP4 allows)
S_E4M3_BF16 = _scales("shl.b32 t,t,4;" + _BF16_UP, "t,c0,c1,z", setup=_BF16_SETUP)
S_E4M3_FP16 = _scales("shl.b32 t,t,7; mul.rn.f16x2 t,t,c0;", "t,c0", setup="mov.b32 c0,0x78007800;")
#: any e4m3 byte: the sign is kept and 0x7F, 0xFF become NaN (the spare bit above the magnitude is set by adding one step)
S_E4M3_BF16_ANY = _scales(
    "and.b32 v,t,0x80008000; shr.b32 t,t,4; and.b32 t,t,0x07F007F0; add.u32 u,t,0x00100010; shr.b32 u,u,11; and.b32 u,u,0x00010001;"
    "mul.lo.u32 u,u,0x7FC0; or.b32 t,t,v;" + _BF16_UP + "or.b32 t,t,u;",
    "t,u,v,c0,c1,z",
    ("0x1404", "0x3424"),
    _BF16_SETUP,
)
S_E4M3_FP16_ANY = _scales(
    "and.b32 v,t,0x80008000; shr.b32 t,t,1; and.b32 t,t,0x3F803F80; add.u32 u,t,0x00800080; shr.b32 u,u,14; and.b32 u,u,0x00010001;"
    "mul.lo.u32 u,u,0x7E00; or.b32 t,t,v; mul.rn.f16x2 t,t,c0; or.b32 t,t,u;",
    "t,u,v,c0",
    ("0x1404", "0x3424"),
    "mov.b32 c0,0x78007800;",
)
#: ue8m0 -> bf16: $5 = bias * 2^7 in both halves; byte + bias is in 0 .. 254 for every byte below the window too.
#: ue8m0 -> fp16: $5 = bias + 256 in both halves; a byte below the window (padding is 0) gives 0, never the bits of an infinity
S_UE8M0_BF16 = _scales("mad.lo.u32 t,t,128,$5;", "t")
_FP16_FIELD = "add.u32 t,t,$5; shr.b32 v,t,8; and.b32 v,v,0x00010001; mul.lo.u32 v,v,255; and.b32 t,t,v; shl.b32 t,t,10;"
S_UE8M0_FP16 = _scales(_FP16_FIELD, "t,v")
#: byte 0xFF becomes NaN
S_UE8M0_BF16_ANY = _scales(
    "add.u32 u,t,0x00010001; shr.b32 u,u,8; and.b32 u,u,0x00010001; mul.lo.u32 u,u,0x7FC0; mad.lo.u32 t,t,128,$5; or.b32 t,t,u;", "t,u"
)
S_UE8M0_FP16_ANY = _scales(
    "add.u32 u,t,0x00010001; shr.b32 u,u,8; and.b32 u,u,0x00010001; mul.lo.u32 u,u,0x7E00;" + _FP16_FIELD + "or.b32 t,t,u;", "t,u,v"
)
S_CONSTRAINTS = ",".join(["=&h"] * 4 + ["r", "r"])

#: (scale kind, any byte allowed, activation is fp16) -> asm. Kinds: 16 = e4m3 (NVFP4), 32 = ue8m0 (MXFP4)
SCALE_ASM = {
    (16, False, False): S_E4M3_BF16,
    (16, False, True): S_E4M3_FP16,
    (16, True, False): S_E4M3_BF16_ANY,
    (16, True, True): S_E4M3_FP16_ANY,
    (32, False, False): S_UE8M0_BF16,
    (32, False, True): S_UE8M0_FP16,
    (32, True, False): S_UE8M0_BF16_ANY,
    (32, True, True): S_UE8M0_FP16_ANY,
}

WB = tl.constexpr(W_BF16)
WH = tl.constexpr(W_FP16)
WC = tl.constexpr(W_CONSTRAINTS)
SC = tl.constexpr(S_CONSTRAINTS)
S16B = tl.constexpr(S_E4M3_BF16)
S16H = tl.constexpr(S_E4M3_FP16)
S16BA = tl.constexpr(S_E4M3_BF16_ANY)
S16HA = tl.constexpr(S_E4M3_FP16_ANY)
S32B = tl.constexpr(S_UE8M0_BF16)
S32H = tl.constexpr(S_UE8M0_FP16)
S32BA = tl.constexpr(S_UE8M0_BF16_ANY)
S32HA = tl.constexpr(S_UE8M0_FP16_ANY)


@triton.jit
def unpack_scales(s, oc, KIND: tl.constexpr, ANY: tl.constexpr, HALF: tl.constexpr):
    """s: i32 [...] words of bytes (e, p) -> four tensors of s's shape: e0 p0, e0 p1, e1 p0, e1 p1 (bf16, or fp16 when HALF)."""
    if KIND == 16:
        ASM: tl.constexpr = (S16HA if HALF else S16BA) if ANY else (S16H if HALF else S16B)
    else:
        ASM: tl.constexpr = (S32HA if HALF else S32BA) if ANY else (S32H if HALF else S32B)  # type: ignore[no-redef]
    if HALF:
        a, b, c, d = tl.inline_asm_elementwise(
            ASM, SC, [s, oc], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=1
        )
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            ASM, SC, [s, oc], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=1
        )
    return a, b, c, d


@triton.jit
def unpack_words(a, s0, s1, HALF: tl.constexpr):
    """a: i32 [...], s0, s1: scales of the same shape -> products [..., e, h, l]."""
    if HALF:
        o0, o1, o2, o3, o4, o5, o6, o7 = tl.inline_asm_elementwise(WH, WC, [a, s0, s1], dtype=(tl.float16,) * 8, is_pure=True, pack=1)
    else:
        o0, o1, o2, o3, o4, o5, o6, o7 = tl.inline_asm_elementwise(WB, WC, [a, s0, s1], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1)
    return tl.join(tl.join(tl.join(o0, o4), tl.join(o2, o6)), tl.join(tl.join(o1, o5), tl.join(o3, o7)))
