"""Golden Triton kernels: block quantisation and dequantisation by Format and Recipe, byte-equal to ``quantize`` and ``scales``.

One program handles ``tile / block`` consecutive blocks; x is read once, 16 bytes a thread, codes and scales are written once. The usual
recipes take bf16 and f16 in pairs, as 32-bit words, a whole block a thread (``triton_pairs``): fewer instructions than the memory's time
hides, and nothing passes between threads (benchmarks/notes/quantize.md counts them). Every choice of the Recipe is a compile-time
constant. Scale bytes go to any byte layout of the catalogue in the same pass, blocks in the order of rows or of the stored scales. The
kernels hold no index arithmetic per element: strides and divisions are per block, divisions by multiplication.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton

from fp4.errors import FormatMismatch
from fp4.formats import Format
from fp4.layout import Layout
from fp4.recipe import Recipe
from fp4.ref.activation import Activation
from fp4.ref.scales import rcp_approx_table, reciprocal
from fp4.ref.triton_activation import SWIGLU, constants
from fp4.ref.triton_chain import capability, launched, overlaps
from fp4.ref.triton_layout import divider
from fp4.ref.triton_quantize_kernels import dequantize_kernel, quantize_kernel

__all__ = ["dequantize_blocks", "quantize_blocks"]

#: elements a program, compiled and in the interpreter (where a launch costs more than its work)
TILE, TILE_INTERPRETED = 4096, 1 << 17
#: the same of dequantising, two 16-byte stores a thread: 0 to 2% faster than 4096 for every format (benchmarks/notes/quantize.md)
DEQUANTIZE_TILE = 2048
#: (blocks of 16-bit pairs, warps) a program, as measured: 128 blocks, so 128 bytes of scales, and one block a thread; two blocks a thread
#: for e2m1 in the order of stored scales
PAIR_BLOCKS, PAIR_BLOCKS_STORED = (128, 4), (128, 2)
#: registers of a thread behind SwiGLU at most. Left alone the assembler takes 30 to 38, puts the second half of a thread's loads behind the
#: first half's use, and a thread goes to memory three times in a row; with 40 all its loads leave first (benchmarks/notes/quantize.md)
ACT_REGISTERS: int | None = 40
#: blocks go in the order in which a layout stores their scales where that is in runs and there are at most this many stored bytes a block
#: (the work is done for padding too); else in the order of rows
STORED_BYTES = 1.25
#: element offsets from here on need 64 bits
WIDE_FROM = 2**31
_ROUND = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_SCALE = {"e4m3": 0, "ue5m3": 1, "ue8m0": 2}


def interpreted() -> bool:
    """Whether these kernels were decorated for Triton's interpreter."""
    return not hasattr(quantize_kernel, "warmup") or type(quantize_kernel).__name__ == "InterpretedFunction"


def _same_device(where: str, to: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Refuse operands that the kernel could not read. A CPU pointer in a launch is an opaque error of Triton, or a fault."""
    for name, t in others.items():
        if t is not None and t.device != to.device:
            raise FormatMismatch(f"{where}: {name} is on {t.device}, the data on {to.device}; move it there")


def strides(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """x [..., k] as [matrices, rows, k] with (s_mat, s_row, s_k); copied only when its leading dimensions do not collapse to two."""
    if x.ndim <= 2:
        rows = x.reshape(1, -1, x.shape[-1])
    elif x.ndim == 3:
        rows = x
    else:
        try:
            rows = x.view(x.shape[0], -1, x.shape[-1])
        except RuntimeError:
            rows = x.contiguous().view(x.shape[0], -1, x.shape[-1])
    return rows, rows.stride(0), rows.stride(1), rows.stride(2)


def quantize_blocks(
    x: torch.Tensor,
    fmt: Format,
    recipe: Recipe,
    global_scale: torch.Tensor | None = None,
    encode_scale: torch.Tensor | None = None,
    scale_layout: Layout | None = None,
    tile: int | None = None,
    num_warps: int | None = None,
    activation: Activation | None = None,
    up: torch.Tensor | None = None,
    chained: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``quantize.quantize_blocks``, by Triton; with ``activation`` of ``activation(x, up)``, rounded to x's dtype, in the same pass.

    Shapes::

        x:            f32, bf16 or f16 [..., k], any strides, on a GPU (or a CPU in the interpreter)
        up:           as x, with the same strides, for a gated activation (x is the gate)
        global_scale: f32 [] or [x.shape[0]], or None = 1; encode_scale likewise, None = 1 / global_scale
        -> codes u8 [..., k / codes_per_byte]; scale u8 [..., k / block], or, with ``scale_layout``, u8 [..., nbytes of one expert]
           in its storage order, padding filled with its fill byte

    chained: global_scale comes from ``triton_amax.global_scale`` just before, of this x: the start may overlap its end (SM90 and later).
    With ``recipe.nan`` or ``inf`` = "error" the check reads x on the host side once (a synchronisation). Layouts with a word table or
    nibble units raise LayoutError: their scales go through ``Layout.apply``.
    """
    _same_device("quantize", x, global_scale=global_scale, encode_scale=encode_scale, up=up)
    rows, s_mat, s_row, s_k = strides(x)
    mats, rows_mat, k = rows.shape
    blocks_row = k // fmt.block
    blocks = mats * rows_mat * blocks_row
    if "error" in (recipe.nan, recipe.inf):
        _refuse(x, recipe)
    codes = torch.empty(*x.shape[:-1], k // fmt.codes_per_byte, dtype=torch.uint8, device=x.device)
    digits, free, bytes_mat, fill, scale = _scale_storage(x, fmt, scale_layout, mats, rows_mat, blocks_row)
    if not blocks:
        return codes, scale.fill_(max(fill, 0))
    stored = _runs(digits) and scale.numel() <= STORED_BYTES * blocks
    dividers = (*divider(blocks_row), *divider(rows_mat), 0, 0)
    if stored:
        blocks = scale.numel()
        dividers = (*divider(free[1]), *divider(bytes_mat), *divider(free[0]))
    elif fill >= 0:
        scale.fill_(fill)
    # one that is not there is no tensor of ones: its kernel would cost 2 us a call
    g = None if global_scale is None else global_scale.to(torch.float32).reshape(-1)
    gs = None if encode_scale is None else encode_scale.to(torch.float32).reshape(-1)
    approx = recipe.reciprocal != "exact"
    flat = s_k == 1 and s_row == k and (mats == 1 or s_mat == rows_mat * k)
    reach = max(codes.numel() * fmt.codes_per_byte, scale.numel(), (mats - 1) * s_mat + (rows_mat - 1) * s_row + (k - 1) * s_k)
    act, params = (-1, (0.0, 0.0, 0.0)) if activation is None else constants(activation)
    other = rows if up is None else strides(up)[0]
    chosen = _constants(fmt, recipe, x.dtype)
    wide = reach >= WIDE_FROM - (tile or TILE_INTERPRETED)
    both = act > 0 and s_k == 2 and up is not None and up.data_ptr() == x.data_ptr() + x.element_size()
    aligned = (s_row | s_mat) % 2 == 0 and (rows.data_ptr() | (0 if both else other.data_ptr())) % 4 == 0
    pairs = chosen["PAIRS"] and (s_k == 1 or both) and aligned
    blocks_program, warps = TILE // fmt.block, 4
    # a block of 32 behind an activation is on two threads: all loads of a thread then leave before it waits for the first
    split = 2 if pairs and act >= 0 and fmt.block == 32 else 1
    if pairs:
        blocks_program, warps = PAIR_BLOCKS_STORED if stored and act < 0 and fmt.codes_per_byte == 2 else PAIR_BLOCKS
    size = tile or (TILE_INTERPRETED if interpreted() else blocks_program // split * fmt.block)
    n = min(size // fmt.block, triton.next_power_of_2(blocks))
    overlap = chained and overlaps(x.device) and rows.data_ptr() == x.data_ptr()  # not beside a copy of x
    view = torch.int32 if pairs else torch.int16 if interpreted() and rows.dtype == torch.bfloat16 else rows.dtype
    if both and pairs:  # gates and ups, one behind the other
        rows = other = rows.as_strided((mats, rows_mat, 2 * k), (s_mat, s_row, 1))
    native = _native(x.device) if pairs else 0
    limit = act == SWIGLU and _exact(params[2], x.dtype)
    options = launched(overlap) | ({"maxnreg": ACT_REGISTERS} if ACT_REGISTERS and native and act == SWIGLU else {})
    quantize_kernel[(triton.cdiv(blocks, n),)](
        rows.view(view), other.view(view), codes.view(torch.int32) if pairs else codes, scale,
        scale if g is None else g, scale if gs is None else gs, rcp_approx_table(x.device) if approx else scale, *params,
        blocks, blocks_row, rows_mat, *dividers, s_mat, s_row, s_k, *free, bytes_mat,
        SPLIT=split, BOTH=both and pairs, NATIVE=native, ONE=mats == 1, HAS_G=g is not None, HAS_GS=gs is not None,
        N=n, FLAT=flat, WIDE=wide, EXPERTS=any(t is not None and t.numel() > 1 for t in (g, gs)),
        DIGITS=digits, STORED=stored, FILL=fill if stored else -1,
        ACT=act, ACT_ROUND=_ROUND[x.dtype], LIMIT=limit, PDL=overlap,
        num_warps=num_warps or warps, **(chosen | {"PAIRS": pairs} | options),
    )  # fmt: skip
    return codes, scale


#: instructions of SM89 and later, first of all its conversion to e4m3, which rounds e2m1 codes too: 17.6 -> 6.3 instructions an element of
#: MXFP8, 13.2 -> 11.1 of NVFP4. benchmarks/quantize.py compares the bytes with the CPU's, every 16-bit value among them.
HARDWARE_E4M3 = True


@lru_cache(maxsize=64)
def _exact(value: float, dtype: torch.dtype) -> bool:
    """Whether a number, as float32, is one of ``dtype``."""
    wide = torch.tensor(value, dtype=torch.float32, device="cpu")
    return bool(wide.to(dtype).to(torch.float32) == wide)


def _native(device: torch.device) -> int:
    """NATIVE of ``triton_pairs``: what instructions may stand for its integers."""
    return 0 if interpreted() else 2 if HARDWARE_E4M3 and capability(device) >= 89 else 1


@lru_cache(maxsize=256)
def _constants(fmt: Format, recipe: Recipe, dtype: torch.dtype) -> dict[str, Any]:
    """The format and the recipe as the kernel's compile-time constants."""
    elem = fmt.elem
    choices = {name.upper(): recipe.code(name) for name in ("tie", "zero_sign", "nan_code", "nan", "inf", "underflow")}
    # recipes whose elements are rounded pairwise: 16 bits, ties to even, one scale, a product
    pairs = dtype != torch.float32 and (recipe.tie, recipe.four_over_six) == ("even", "off") and not recipe.encode_order.startswith("x/")
    pairs = pairs and recipe.zero_sign in (("keep", "of_value") if elem.bits == 4 else ("keep",))
    choices["PAIRS"] = pairs and (elem.bits == 4 or (recipe.nan_code, recipe.flush) == ("signed_max", False))
    return choices | {
        "BLOCK": fmt.block,
        "PACK": fmt.codes_per_byte == 2,
        "MAN": elem.man_bits,
        "EMIN": 1 - elem.bias,
        "TOP": elem.max,
        "TOP_CODE": 7 if elem.bits == 4 else 0x7E,
        "EMAX": 2 if elem.bits == 4 else 8,
        "SCALE": _SCALE[fmt.scale.name],
        "RULE": recipe.code("scale_rule"),
        "UE8M0_FLOOR": recipe.ue8m0_floor,
        "UE8M0_ZERO": recipe.ue8m0_zero,
        "SCALE_ORDER": recipe.code("scale_order"),
        "ENCODE_ORDER": recipe.code("encode_order"),
        "TARGET": recipe.elem_max,
        "RCP_TARGET": float(reciprocal(torch.tensor(recipe.elem_max, dtype=torch.float32, device="cpu"), recipe)),
        "SCALE_FLOOR": recipe.scale_floor,
        "ZERO_BYTE": recipe.zero_byte,
        "UNDERFLOW_BYTE": recipe.underflow_byte,
        "APPROX": recipe.reciprocal != "exact",
        "AMAX_FLOOR": recipe.amax_floor,
        "FLUSH": recipe.flush,
        "FOUR_OVER_SIX": recipe.code("four_over_six") if fmt.elem.bits == 4 and fmt.scale.name != "ue8m0" else 0,
        "ROUND": _ROUND[dtype] if recipe.scale_dtype == "input" else 0,
    }


def _runs(digits: tuple[Any, ...]) -> bool:
    """Whether a layout stores four or more neighbours of a row together: then blocks in that order still make whole sectors of codes."""
    if not digits:
        return False
    last = digits[-1]
    return bool(last.dim == 1 and last.div == 1 and not last.div_free and not last.flip and (last.size == 0 or last.size >= 4))


def _scale_storage(
    x: torch.Tensor, fmt: Format, layout: Layout | None, mats: int, rows_mat: int, blocks_row: int
) -> tuple[tuple[Any, ...], tuple[int, int], int, int, torch.Tensor]:
    """(digits, free extents, bytes a matrix, fill byte or -1, buffer not yet filled) of the scales; plain order has no digits."""
    if layout is None:
        return (), (1, 1), 0, -1, torch.empty(*x.shape[:-1], blocks_row, dtype=torch.uint8, device=x.device)
    from fp4.errors import LayoutError

    if getattr(layout, "word", None) is not None or getattr(layout, "unit", "") != "byte":
        raise LayoutError(f"quantize: layout {layout} permutes bits or nibbles; need a byte layout; quantise plain, then fp4.to_layout")
    shape = (rows_mat, blocks_row)
    bytes_mat = layout.nbytes(shape)
    lead = x.shape[:1] if x.ndim >= 3 else ()
    buffer = torch.empty(*lead, bytes_mat, dtype=torch.uint8, device=x.device)
    fill = -1 if layout.padded(shape) == shape else layout.fill
    return tuple(layout.digits), layout.extents(shape), bytes_mat, fill, buffer


def _refuse(x: torch.Tensor, recipe: Recipe) -> None:
    from fp4.ref.quantize import refuse_nonfinite

    refuse_nonfinite(x, recipe)


def dequantize_blocks(
    codes: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    fmt: Format,
    dtype: torch.dtype = torch.float32,
    tile: int | None = None,
    num_warps: int = 4,
) -> torch.Tensor:
    """As ``quantize.dequantize_blocks``, by Triton: ``elem[code] * (scale * global_scale)``, rounded once to ``dtype``."""
    _same_device("dequantize", codes, scale=scale, global_scale=global_scale)
    codes, scale = codes.contiguous(), scale.contiguous()
    out = torch.empty(*codes.shape[:-1], codes.shape[-1] * fmt.codes_per_byte, dtype=dtype, device=codes.device)
    if not out.numel():
        return out
    group = 16 // dtype.itemsize
    groups = out.numel() // group
    size = tile or (TILE_INTERPRETED if interpreted() else DEQUANTIZE_TILE)
    n = min(size // group, triton.next_power_of_2(groups))
    g = scale if global_scale is None else global_scale.to(torch.float32).reshape(-1)
    dequantize_kernel[(triton.cdiv(groups, n),)](
        # cvt.rn.bf16.f32 is IEEE on SM80 and later; the interpreter's cast is not, there the kernel rounds by integers
        codes, scale, g, out.view(torch.int16) if interpreted() and dtype == torch.bfloat16 else out, groups, groups // max(1, g.numel()),
        N=n, GROUP=group, PER_BLOCK=fmt.block // group, PACK=fmt.codes_per_byte == 2, SCALE=_SCALE[fmt.scale.name],
        TENSOR_SCALE=global_scale is not None, EXPERTS=global_scale is not None and g.numel() > 1, WIDE=out.numel() >= WIDE_FROM - size,
        num_warps=num_warps,
    )  # fmt: skip
    return out
