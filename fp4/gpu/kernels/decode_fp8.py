"""Decode of MXFP4 weights to e4m3 by tables of bytes (layouts ``frag_w8``, ``frag_sf32``): what the W4A8 kernels share.

With base the largest scale byte of a row and d = base - s the distance of a block's scale byte s from it, a weight is
``code * 2^(s - 127) = e4m3(code * 2^(6 - d)) * 2^(base - 133)``. The e4m3 bytes of the eight magnitudes under d are those under 0 less
8 d each, but for zero, which stays 0: exact while the smallest, 0.5 * 2^(6 - d), is normal, d <= SPAN. They fill two registers, made
once for a block of 32 columns (two products with a constant); one ``prmt`` then looks four magnitudes up. ``frag_w8`` keeps the
magnitudes of a word in the low three bits of its nibbles, rows g in the low half and g + 8 in the high one, as the selector of ``prmt``
wants them; the spare bits carry the signs: row g at 7, 15, 23, 31, where e4m3 has its own, and row g + 8 four bits further down.
7 instructions for 8 codes.

A register of four e4m3 is one of the A operand of m64nNk32: adjacent codes of one row. Padding (code 0, any scale byte) decodes to 0.
"""

from __future__ import annotations

import triton.language as tl

#: binades below the largest scale of a row that stay exact
SPAN = 11
#: a row's base less this is the exponent of its factor in the fp32 epilogue
BASE = 133

#: bytes of 0, .5, 1, 1.5 and of 2, 3, 4, 6 under d = 0, and what one step of d takes from them
_LOW, _HIGH, _LOW_STEP, _HIGH_STEP = 0x6C686000, 0x7C787470, 0x08080800, 0x08080808


#: $8 word of scale bytes (e, p), $9 bases of rows e = 0, 0, 1, 1 -> tables (low, high) of (e, p) = 00, 01, 10, 11
TABLES = (
    "{ .reg .b32 d,t; sub.u32 d,$9,$8;"
    + "".join(
        f"prmt.b32 t,d,0,0x444{i}; mad.lo.u32 ${2 * i},t,{hex(2**32 - _LOW_STEP)},{hex(_LOW)};"
        f"mad.lo.u32 ${2 * i + 1},t,{hex(2**32 - _HIGH_STEP)},{hex(_HIGH)};"
        for i in range(4)
    )
    + "}"
)
TABLES_CONSTRAINTS = ",".join(["=&r"] * 8 + ["r"] * 2)


def _word(low: str, high: str, word: str, tables: tuple[str, str, str, str]) -> str:
    """Rows e = 0 and 1 of one word of eight codes; tables: low and high of e = 0, of e = 1."""
    a, b, c, d = tables
    return (
        f"and.b32 t,{word},0x77777777; prmt.b32 u,{a},{b},t; and.b32 v,{word},0x80808080; or.b32 {low},u,v;"
        f"shr.b32 t,t,16; prmt.b32 u,{c},{d},t; shl.b32 v,{word},4; and.b32 v,v,0x80808080; or.b32 {high},u,v;"
    )


#: one word $2, tables $3..$6 -> $0, $1: four e4m3 each
WORD = "{ .reg .b32 t,u,v;" + _word("$0", "$1", "$2", ("$3", "$4", "$5", "$6")) + "}"
WORD_CONSTRAINTS = ",".join(["=&r"] * 2 + ["r"] * 5)
#: words $8..$11; $12.., $16.., $20.., $24..: the four tables, once a word -> $0..$7: (word, row e), four e4m3 each
WORDS = (
    "{ .reg .b32 t,u,v;"
    + "".join(_word(f"${2 * i}", f"${2 * i + 1}", f"${8 + i}", (f"${12 + i}", f"${16 + i}", f"${20 + i}", f"${24 + i}")) for i in range(4))
    + "}"
)
WORDS_CONSTRAINTS = ",".join(["=&r"] * 8 + ["r"] * 20)


def _fp16(four: str, out: int) -> str:
    """Four e4m3 of the register -> outputs out .. out + 3, fp16 (exact)."""
    return (
        f"mov.b32 {{x,y}},{four}; cvt.rn.f16x2.e4m3x2 t,x; mov.b32 {{${out},${out + 1}}},t;"
        f"cvt.rn.f16x2.e4m3x2 t,y; mov.b32 {{${out + 2},${out + 3}}},t;"
    )


#: one word $8, tables $9..$12 -> $0..$7: its weights as fp16, rows e = 0, 1, columns in order
WORD_FP16 = (
    "{ .reg .b32 t,u,v,o,p; .reg .b16 x,y;" + _word("o", "p", "$8", ("$9", "$10", "$11", "$12")) + _fp16("o", 0) + _fp16("p", 4) + "}"
)
WORD_FP16_CONSTRAINTS = ",".join(["=&h"] * 8 + ["r"] * 5)
#: four e4m3 $4 -> $0..$3, fp16, in order
X_FP16 = "{ .reg .b32 t; .reg .b16 x,y;" + _fp16("$4", 0) + "}"
X_FP16_CONSTRAINTS = ",".join(["=&h"] * 4 + ["r"])

T8 = tl.constexpr(TABLES)
T8C = tl.constexpr(TABLES_CONSTRAINTS)
W8 = tl.constexpr(WORD)
W8C = tl.constexpr(WORD_CONSTRAINTS)
