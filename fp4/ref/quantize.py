"""Block quantisation and dequantisation by Format and Recipe in torch: the CPU's workers, and the twin of ``triton_quantize``.

Work goes in chunks of blocks (``fp4.ref.pace``), so temporary memory stays at a few MB whatever the tensor's size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fp4.errors import FormatMismatch, Fp4Error
from fp4.formats import Format
from fp4.recipe import Recipe
from fp4.ref.codes import INT32, decode, encode_magnitude, kept, pack_nibbles, signed_code, value_table
from fp4.ref.pace import GROUP, paced
from fp4.ref.scales import block_factor, default_global_scale, encode_of, scale_bytes

__all__ = ["dequantize_blocks", "quantize_blocks", "tensor_amax"]


def _group(device: torch.device) -> int:
    return GROUP if device.type == "cpu" else 1 << 26


def _rows(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views of x as [rows, k] that need no copy: one when the leading dimensions collapse, else several."""
    if x.ndim <= 2:
        yield x.reshape(-1, x.shape[-1])
        return
    try:
        yield x.view(-1, x.shape[-1])
    except RuntimeError:
        for part in x.unbind(0):
            yield from _rows(part)


def _groups(x: torch.Tensor, block: int, elements: int = 0) -> Iterator[torch.Tensor]:
    """x [..., k], any strides, in row-major order as pieces [n, block]; n * ``elements`` (default: block) is at most a group."""
    limit = max(1, _group(x.device) // (elements or block))
    for rows in _rows(x):
        if rows.is_contiguous():
            yield from torch.split(rows.view(-1, block), limit)
        else:
            for part in torch.split(rows, max(1, limit * block // rows.shape[-1])):
                yield from torch.split(part.reshape(-1, block), limit)


def tensor_amax(x: torch.Tensor) -> torch.Tensor:
    """Largest finite |x|, f32 []; 0 for an empty tensor. x: f32, bf16 or f16 [..., k]."""
    if x.is_cuda:
        from fp4.ref.triton_amax import finite_amax

        return finite_amax(x)
    found = [torch.zeros((), dtype=torch.float32, device=x.device)]

    def largest(chunk: int, group: torch.Tensor) -> None:
        for piece in torch.split(group, max(1, chunk // x.shape[-1])):
            size = piece.abs()
            top = size.amax().to(torch.float32)
            if size.device.type != "cpu" or not bool(torch.isfinite(top)):
                top = size.where(torch.isfinite(size), 0).amax().to(torch.float32)
            found[0] = torch.maximum(found[0], top)

    paced(largest, ((group,) for group in _groups(x, x.shape[-1]) if x.numel()), x)
    return found[0]


def _expert_amax(x: torch.Tensor) -> torch.Tensor:
    """``tensor_amax`` of each x[e], f32 [experts]."""
    if x.is_cuda:
        from fp4.ref.triton_amax import finite_amax

        return finite_amax(x, per_expert=True)
    return torch.stack([tensor_amax(part) for part in x])


def block_amax(x: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """x f32 [n, block] -> f32 [n]: max |x|; NaN for a block with a NaN, or, when NaN is ignored, only for a block of nothing else."""
    if recipe.nan == "ignore":
        amax = torch.where(x != x, -1.0, x.abs()).amax(-1)
        return torch.where(amax < 0, torch.nan, amax)
    return x.abs().amax(-1)


def _f32(x: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    x = x.to(torch.float32).contiguous()
    return torch.where(x.abs() < 2.0**-126, x * 0.0, x) if recipe.flush else x  # the sign of zero stays


def _quantize_group(
    chunk: int, x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, fmt: Format, recipe: Recipe, g: torch.Tensor, gs: torch.Tensor
) -> None:
    """x [n, block] of any float type -> codes u8 [n, block / codes_per_byte], scale u8 [n]; elements go by the chunk, scales at once."""
    rows = max(1, chunk // fmt.block)
    amax = torch.cat([block_amax(_f32(part, recipe), recipe) for part in torch.split(x, rows)])
    byte = scale_bytes(amax, fmt, recipe, g, gs, x.dtype)
    six = Factors(byte, amax, fmt, recipe, g, gs)
    search = recipe.four_over_six != "off" and fmt.elem.bits == 4 and fmt.scale.name != "ue8m0"
    if search:  # the same block scaled so that amax becomes 4: twice the resolution at the top, where e2m1 has no 5
        byte4 = scale_bytes(amax, fmt, recipe, g, gs, x.dtype, boost=1.5)
        four = Factors(byte4, amax, fmt, recipe, g, gs)
    for at in range(0, x.shape[0], rows):
        part = slice(at, at + rows)
        values = _f32(x[part], recipe)
        code = six.codes(values, part, fmt, recipe)
        if search:
            code4 = four.codes(values, part, fmt, recipe)
            better = block_error(values, code4, byte4[part], fmt, recipe, g) < block_error(values, code, byte[part], fmt, recipe, g)
            byte[part] = torch.where(better, byte4[part], byte[part])
            code = torch.where(better[:, None], code4, code)
        codes[part] = pack_nibbles(code) if fmt.codes_per_byte == 2 else code
    scale.copy_(byte)


class Factors:
    """What the elements of each block meet, and whether a NaN can come of it."""

    def __init__(self, byte: torch.Tensor, amax: torch.Tensor, fmt: Format, recipe: Recipe, g: torch.Tensor, gs: torch.Tensor) -> None:
        self.factor, self.divide = block_factor(byte, amax, fmt, recipe, g, gs)
        # a finite x by a finite factor, which is not a zero divisor, is no NaN; on a GPU the question would cost a synchronisation
        self.nan = True
        if byte.device.type == "cpu" and recipe.nan != "ignore":
            finite = bool((torch.isfinite(amax) & torch.isfinite(self.factor)).all())
            self.nan = not finite or (self.divide and bool((self.factor == 0).any()))

    def codes(self, x: torch.Tensor, part: slice, fmt: Format, recipe: Recipe) -> torch.Tensor:
        """One u8 code an element, x f32 [n, block] being the blocks ``part``."""
        factor = self.factor[part, None]
        y = x / factor if self.divide else x * factor
        code = encode_magnitude(y.abs(), fmt.elem, recipe.tie)
        return signed_code(code, x, y, fmt.elem, recipe.zero_sign, recipe.nan_code, self.nan).to(torch.uint8)


def _bounded(a: torch.Tensor) -> torch.Tensor:
    """f32 >= 0 or NaN -> at most the largest finite float32, as in the Triton twin."""
    return a.view(INT32).clamp(max=0x7F7FFFFF).view(torch.float32)


def block_error(x: torch.Tensor, code: torch.Tensor, byte: torch.Tensor, fmt: Format, recipe: Recipe, g: torch.Tensor) -> torch.Tensor:
    """Error of one choice of scale, f32 [n]: sum of squares, sum of magnitudes or largest magnitude of ``|elem[code]| * (d * g) - |x|``.

    Neighbours are added pairwise, level by level: the same order of float32 sums as in the Triton twin.
    """
    s = decode(byte.to(torch.uint8), fmt.scale) * g
    e = (_bounded(decode(code & 7, fmt.elem) * s[:, None]) - x.abs()).abs_()
    if recipe.four_over_six == "mse":
        e = _bounded(e * e)
    while e.shape[1] > 1:
        a, b = e[:, 0::2], e[:, 1::2]
        e = torch.where(a > b, a, b) if recipe.four_over_six == "abs_max" else a + b
    return e[:, 0]


def refuse_nonfinite(x: torch.Tensor, recipe: Recipe) -> None:
    """Raises Fp4Error when x [..., k] holds what the recipe calls an error, with the first place. Nothing was written by then."""
    start = 0
    for piece in _groups(x, x.shape[-1]) if x.numel() else ():
        bad = (piece != piece) if recipe.nan == "error" else torch.zeros_like(piece, dtype=torch.bool)
        if recipe.inf == "error":
            bad = bad | (piece.abs() == torch.inf)
        if bool(bad.any()):
            row, col = (int(i) for i in bad.nonzero()[0])
            raise Fp4Error(
                f"quantize: x holds {piece[row, col].item()} in row {start + row}, column {col} (rows of {x.shape[-1]}); "
                "need finite values; clean x, or use a recipe with nan='propagate' and inf='propagate' or 'saturate'"
            )
        start += piece.shape[0]


def quantize_blocks(
    x: torch.Tensor,
    fmt: Format,
    recipe: Recipe,
    global_scale: torch.Tensor | None = None,
    encode_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale bytes of x, blocks along the last axis.

    Shapes::

        x:            f32, bf16 or f16 [..., k], any strides, k a multiple of fmt.block
        global_scale: f32 [] or [x.shape[0]], the multiplier g; None = 1
        encode_scale: f32, same shape: gs as the caller holds it (FlashInfer, compressed-tensors); None = 1 / g
        -> codes u8 [..., k / codes_per_byte], scale u8 [..., k / block]

    ``byte = scale_rule(amax)``, ``code = round(x * factor(byte))`` with every step as the Recipe says. Raises FormatMismatch for
    a shape or dtype that does not fit and Fp4Error where the recipe refuses NaN or infinity.
    """
    k = x.shape[-1]
    if k % fmt.block:
        up = -(-k // fmt.block) * fmt.block
        raise FormatMismatch(f"quantize: k = {k} is not a multiple of the {fmt} block {fmt.block}; pad k to {up}")
    if "error" in (recipe.nan, recipe.inf):
        refuse_nonfinite(x, recipe)
    codes = torch.empty(*x.shape[:-1], k // fmt.codes_per_byte, dtype=torch.uint8, device=x.device)
    scale = torch.empty(*x.shape[:-1], k // fmt.block, dtype=torch.uint8, device=x.device)
    one = torch.ones((), dtype=torch.float32, device=x.device)
    g = one if global_scale is None else global_scale.to(torch.float32)
    gs = encode_of(g) if encode_scale is None else encode_scale.to(torch.float32)
    if g.ndim:
        for e in range(x.shape[0]):
            _quantize_into(x[e], codes[e], scale[e], fmt, recipe, g[e], gs[e])
    else:
        _quantize_into(x, codes, scale, fmt, recipe, g, gs)
    return codes, scale


def _quantize_into(
    x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, fmt: Format, recipe: Recipe, g: torch.Tensor, gs: torch.Tensor
) -> None:
    if not x.numel():
        return
    codes, scale = codes.view(-1, fmt.block // fmt.codes_per_byte), scale.view(-1)

    def groups() -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        at = 0
        for piece in _groups(x, fmt.block):
            n = piece.shape[0]
            yield piece, codes[at : at + n], scale[at : at + n]
            at += n

    paced(lambda chunk, piece, c, s: _quantize_group(chunk, piece, c, s, fmt, recipe, g, gs), groups(), x)


@kept
def _byte_values(fmt: Format, device: torch.device) -> torch.Tensor:
    """The f32 values of each byte of codes: [256] for 8-bit elements; for e2m1 [256] int64, each the bits of two values.

    One 8-byte gather of a 2 KiB table fetches two values; the even element is the low half (little-endian).
    """
    values = value_table(fmt.elem, device)
    if fmt.codes_per_byte == 1:
        return values
    byte = torch.arange(256, device=device)
    return torch.stack((values[byte & 15], values[byte >> 4]), -1).contiguous().view(torch.int64).flatten()


def dequantize_blocks(
    codes: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor | None, fmt: Format, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """``elem[code] * (scale * global_scale)``, each product rounded to float32, the result rounded once to ``dtype``.

    Shapes::

        codes: u8 [..., k / codes_per_byte], scale: u8 [..., k / block], global_scale: f32 [] or [codes.shape[0]] or None
        -> dtype [..., k]

    A NaN scale byte makes its whole block NaN. Same order as FlashInfer's ``e2m1_and_ufp8sf_scale_to_float`` and ModelOpt.
    """
    out = torch.empty(*codes.shape[:-1], codes.shape[-1] * fmt.codes_per_byte, dtype=dtype, device=codes.device)
    if global_scale is not None and global_scale.ndim:
        for e in range(codes.shape[0]):
            _dequantize_into(codes[e], scale[e], global_scale[e], fmt, out[e])
    else:
        _dequantize_into(codes, scale, global_scale, fmt, out)
    return out


def _dequantize_into(codes: torch.Tensor, scale: torch.Tensor, g: torch.Tensor | None, fmt: Format, out: torch.Tensor) -> None:
    if not out.numel():
        return
    table, scales = _byte_values(fmt, codes.device), value_table(fmt.scale, codes.device)
    width = fmt.block // fmt.codes_per_byte

    def values(chunk: int, codes: torch.Tensor, byte: torch.Tensor, out: torch.Tensor) -> None:
        rows = max(1, chunk // fmt.block)
        for c, b, o in zip(torch.split(codes, rows), torch.split(byte, rows), torch.split(out, rows), strict=True):
            s = scales.index_select(0, b.to(INT32))
            if g is not None:
                s = s * g
            v = table.index_select(0, c.reshape(-1).to(INT32)).view(torch.float32).view(-1, fmt.block)
            torch.mul(v, s[:, None], out=v)
            o.copy_(v)

    def groups() -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        flat, written, at = scale.reshape(-1), out.view(-1, fmt.block), 0
        for piece in _groups(codes, width, fmt.block):
            n = piece.shape[0]
            yield piece, flat[at : at + n], written[at : at + n]
            at += n

    paced(values, groups(), out)


def quantize_tensor(
    x: torch.Tensor, fmt: Format, recipe: Recipe, global_scale: torch.Tensor | None, encode_scale: torch.Tensor | None, per_expert: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """``quantize_blocks`` with the format's default global scale when none is given; returns (codes, scale, global_scale)."""
    global_scale, encode_scale = resolve_global_scale(x, fmt, recipe, global_scale, encode_scale, per_expert)
    codes, scale = quantize_blocks(x, fmt, recipe, global_scale, encode_scale)
    return codes, scale, global_scale


def resolve_global_scale(
    x: torch.Tensor, fmt: Format, recipe: Recipe, global_scale: torch.Tensor | None, encode_scale: torch.Tensor | None, per_expert: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(g, gs) for a format with a tensor scale: as given, one from the other, or both from amax; (None, None) without one."""
    if not fmt.tensor_scale:
        return None, None
    if global_scale is None and encode_scale is not None:
        return torch.reciprocal(encode_scale), encode_scale
    if global_scale is None:
        amax = _expert_amax(x) if per_expert and x.shape[0] else tensor_amax(x)
        if per_expert and not x.shape[0]:
            amax = torch.zeros(0, dtype=torch.float32, device=x.device)
        if x.is_cuda:
            from fp4.ref.triton_amax import global_scale as on_device

            return on_device(amax, recipe, x.dtype)
        return default_global_scale(amax, recipe, x.dtype)
    return global_scale, encode_scale
