"""How each kernel of the dense table is launched: ``BUILD[name](weight, row, ...)`` compiles what a row asks for and binds the weight.

All have one signature: d: the bound weight; row: of the table; m: rows of x, as an example of the class that the plan serves; half: fp16 x,
else bf16; out: dtype of y; bias_type: Triton's type of the bias; bias: whether there is one. They return ``run(x, bias, y, m)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fp4.gpu.kernels import launch

if TYPE_CHECKING:
    from fp4.gpu.kernels.dense import Dense

Row = dict[str, Any]
#: unrolled k steps of small_m at most; longer k goes to the next row of the table
STEPS = 40
#: bytes of bf16 weights that the dequantising route holds at a time
WORKSPACE = 128 << 20
#: shared memory that small_m holds x in at most
X_BYTES = 96 << 10
#: a third faster than torch.empty, which has more ways to say a size
_empty = torch.empty_strided


def common(d: Dense, half: bool, bias: bool) -> dict[str, Any]:
    """Constants of every kernel that multiplies."""
    return {"KIND": d.block, "ANY": d.about["any"], "HALF": half, "HAS_BIAS": bias}


def aligned(**sizes: int) -> tuple[str, ...]:
    """Names of the sizes that are multiples of 16."""
    return tuple(name for name, value in sizes.items() if value % 16 == 0)


def share(tiles: int, steps: int, room: int, cut: int, most: int) -> tuple[int, bool]:
    """(blocks, whether their runs cut tiles) for tiles of so many steps and room for so many blocks at a time.

    cut 0: runs of whole tiles. 1: all blocks get the same number of steps. 2: where a tile can have several blocks it is cut into as many
    equal parts, at most ``most`` (one block reads the sums of all parts, which takes time that grows with the tile), else as 0.
    """
    if cut == 1 and tiles % room:
        return min(room, tiles * steps), True
    parts = min(room // tiles, most, steps) if cut == 2 else 1
    return (parts * tiles, True) if parts > 1 else (min(room, tiles), False)


def parts(d: Dense, row: Row, m: int) -> tuple[int, int, int, bool]:
    """(tiles, blocks that a GPU has room for, blocks, whether they cut tiles) of a row whose blocks have tiles, for m rows of x."""
    tiles = -(-d.n // (row["R"] * row["NW"] * 16)) * -(-m // row["BT"])
    room = row.get("PER", 1) * launch.processors(d.device)
    steps = -(-d.kt // row.get("U", 4))
    return tiles, room, *share(tiles, steps, room, row.get("CUT", 0), row.get("MOST", 8 * d.kt // row["BT"]))


def busy(d: Dense, row: Row, m: int) -> float:
    """Share of the GPU's blocks that have work, over all waves of tiles or parts of them."""
    tiles, room, blocks, cut = parts(d, row, m)
    units = max(1, blocks if cut else tiles)
    return units / (-(-units // room) * room)


#: what a row of the table may say about the calls that it serves; all else is about its kernel
CONDITIONS = ("m_max", "n_min", "n_max", "k_min", "k_max", "block", "busy")


def fits(d: Dense, row: Row, m: int) -> bool:
    """Whether a row serves m rows of x: bounds of m (None: no bound), n and k, the format's block, and the least share of ``busy`` blocks.

    Tiles of equal length are fastest where they fill the GPU; elsewhere a later row cuts them into runs of equal length, or takes another
    kernel.
    """
    if row["m_max"] is not None and m > row["m_max"]:
        return False
    if not row["n_min"] <= d.n <= row.get("n_max", d.n) or not row.get("k_min", 0) <= d.k <= row.get("k_max", d.k):
        return False
    if row.get("block", d.block) != d.block:
        return False
    if row["kernel"] == "small" and -(-d.kt // (row["WK"] * row["U"])) > STEPS:
        return False
    return "busy" not in row or busy(d, row, m) >= row["busy"]


def small(d: Dense, row: Row, m: int, half: bool, out: torch.dtype, bias_type: str, bias: bool) -> Any:
    from fp4.gpu.kernels.small_m import small_m

    wk, wn, r, u = (row[c] for c in ("WK", "WN", "R", "U"))
    steps = -(-d.kt // (wk * u))
    mt = max(8, 1 << (m - 1).bit_length())
    xs = row["XS"]
    held = 1 if m == 1 and xs else mt  # rows of x in a slot of wk * u tiles of 64 columns
    slot = held * wk * u * 128
    if xs == 99:  # all of x in shared memory, where it fits beside two more blocks
        xs = steps if steps * slot <= X_BYTES else 4
    xs = min(xs, steps, max(2, X_BYTES // slot))
    if held == 1 and xs == steps:  # one copy brings all of it, of a power of two
        whole = 1 << (steps - 1).bit_length()
        xs = whole if whole * slot <= X_BYTES else 4
    constants = {
        "K": d.k, **common(d, half, bias), "EVEN_N": d.n % (16 * r * wn) == 0, "WK": wk, "WN": wn, "R": r, "U": u,
        "MT": mt, "MR": held, "D": row["D"], "XS": xs,
    }  # fmt: skip
    signature = {
        "x_ptr": "*i32", "w_ptr": "*i32", "s_ptr": "*i64" if u >= 4 else "*i32", "alpha_ptr": "*fp32", "bias_ptr": bias_type,
        "y_ptr": launch.TYPES[out], "M": "i32", "N": "i32", "oc": "i32",
    }  # fmt: skip
    kernel = launch.build(small_m, signature, constants, num_warps=wk * wn, aligned=aligned(N=d.n))
    head = (d.codes.data_ptr(), d.scale.data_ptr(), d._alpha[half].data_ptr())
    tail = launch.constants_in_order(small_m, constants)
    n, oc, gx, index = d.n, d._windows[half].oc, -(-d.n // (16 * r * wn)), d._index

    def run(x: torch.Tensor, b: torch.Tensor | None, y: torch.Tensor, m: int) -> None:
        yp = y.data_ptr()
        kernel(gx, 1, launch.raw_stream(index), x.data_ptr(), *head, yp if b is None else b.data_ptr(), yp, m, n, oc, *tail)

    return run


def permute(d: Dense, counts: int, tiles: int | None = None) -> Any:
    """``permute_x``: (x, m, stream, address of the output, address of ``counts`` counters to zero) -> None.

    tiles: how many tiles of 64 columns of each row are wanted, rounded up to 32; default all.
    """
    from fp4.gpu.kernels.wide_m import permute_x

    block = min(32, 1 << (d.kt - 1).bit_length())
    signature = {"x_ptr": "*i32", "o_ptr": "*i32", "count_ptr": "*i32", "words": "i32", "tiles": "i32"}
    constants = {"B": block, "COUNTS": counts}
    kernel = launch.build(permute_x, signature, constants, num_warps=4, aligned=aligned(words=d.k // 2))
    columns, k, kt = -(-min(d.kt, tiles or d.kt) // block), d.k, d.kt

    def run(x: torch.Tensor, m: int, stream: int, out: int, count: int) -> None:
        kernel(m, columns, stream, x.data_ptr(), out, count, k // 2, kt, block, counts)

    return run


def _counters(row: Row, m: int, tiles_n: int) -> int:
    """Counters that a cut product of the row's largest m needs, at least 16 bytes: one kernel of ``permute_x`` for all its m."""
    top = -(-max(m, row.get("m_max") or 0) // 64) * 64  # a plan serves the m of a class of 64
    return max(4, 1 << int(tiles_n * -(-top // row["BT"]) - 1).bit_length())


def wide(d: Dense, row: Row, m: int, half: bool, out: torch.dtype, bias_type: str, bias: bool) -> Any:
    from fp4.gpu.kernels.wide_m import wide_m

    bt, r, nw, split = row["BT"], row["R"], row["NW"], row["SPLIT"]
    bn = r * nw * 16
    tiles_n = -(-d.n // bn)
    constants = {
        **common(d, half, bias), "EVEN": d.n % bn == 0 and d.kt % (row["U"] * split) == 0,
        "BT": bt, "R": r, "U": row["U"], "XS": row["XS"], "GM": row["GM"], "SPLIT": split, "NW": nw,
    }  # fmt: skip
    signature = {
        "x_ptr": launch.TYPES[torch.float16 if half else torch.bfloat16], "w_ptr": "*i32", "s_ptr": "*i32", "alpha_ptr": "*fp32",
        "bias_ptr": bias_type, "y_ptr": launch.TYPES[out], "part_ptr": "*fp32", "count_ptr": "*i32", "M": "i32", "N": "i32", "KT": "i32",
        "oc": "i32",
    }  # fmt: skip
    kernel = launch.build_ring(
        wide_m, signature, constants, slot=bt * 128, num_warps=nw, aligned=aligned(N=d.n, KT=d.kt),
        pdl=bool(row.get("PDL")),
    )  # fmt: skip
    counts = 0 if split == 1 else _counters(row, m, tiles_n)
    px = permute(d, counts)
    alpha = d._alpha[half].data_ptr()
    head = (d.codes.data_ptr(), d.scale.data_ptr(), alpha)
    tail = launch.constants_in_order(wide_m, constants)
    n, kt, oc, index, device = d.n, d.kt, d._windows[half].oc, d._index, d.device

    def run(x: torch.Tensor, b: torch.Tensor | None, y: torch.Tensor, m: int) -> None:
        stream = launch.raw_stream(index)
        tiles = tiles_n * -(-m // bt)
        words = m * kt * 32
        sums = 0 if split == 1 else -(-split * m * n // 4) * 4  # counters at a multiple of 16 bytes
        space = _empty((words + sums + counts,), (1,), dtype=torch.int32, device=device)
        sp, yp = space.data_ptr(), y.data_ptr()
        part, count = (alpha, alpha) if split == 1 else (sp + 4 * words, sp + 4 * (words + sums))
        px(x, m, stream, sp, count)
        kernel(tiles, split, stream, sp, *head, yp if b is None else b.data_ptr(), yp, part, count, m, n, kt, oc, *tail)

    return run


def ws(d: Dense, row: Row, m: int, half: bool, out: torch.dtype, bias_type: str, bias: bool) -> Any:
    from fp4.gpu.kernels.ws_m import ws_m

    bt, u, sk, nw, per = row["BT"], row["U"], row["SK"], row["NW"], row["PER"]
    nat = bool(row.get("NAT", 0))
    bn = row["R"] * nw * 16
    tiles_n, steps = -(-d.n // bn), -(-d.kt // u)
    constants = {
        **common(d, half, bias), "EVEN": d.n % bn == 0 and d.kt % u == 0, "BT": bt, "R": row["R"], "U": u, "SK": sk,
        "XS": row["XS"], "NAT": nat, "NW": nw,
    }  # fmt: skip
    signature = {
        "xd": launch.box_type("fp16" if half else "bf16", bt, 64), "w_ptr": "*i32", "s_ptr": "*i32", "alpha_ptr": "*fp32",
        "bias_ptr": bias_type, "y_ptr": launch.TYPES[out], "part_ptr": "*fp32", "count_ptr": "*i32", "M": "i32", "N": "i32", "KT": "i32",
        "oc": "i32", "unit": "i32",
    }  # fmt: skip
    kernel = launch.build_ring(
        ws_m, signature, constants, slot=sk * bt * 128, per=per, num_warps=nw, aligned=aligned(N=d.n, KT=d.kt),
        pdl=bool(row.get("PDL")) and not (nat and not row["CUT"]),
        maxnreg=launch.registers(nw + 4, per),  # the producer's warp takes the room of four
    )  # fmt: skip
    tiles, _, blocks, cut = parts(d, row, m)
    pieces = row.get("PARTS", steps)  # of a tile, that stay together; as many as divide its steps
    unit = steps // next(p for p in range(min(pieces, steps), steps + 1) if steps % p == 0) if cut else steps
    blocks = min(blocks, tiles * (steps // unit))
    counts = _counters(row, m, tiles_n) if row["CUT"] else 0
    px = permute(d, counts, 1 if nat else None)
    alpha = d._alpha[half].data_ptr()
    head = (d.codes.data_ptr(), d.scale.data_ptr(), alpha)
    tail = launch.constants_in_order(ws_m, constants)
    n, k, kt, oc, index, device = d.n, d.k, d.kt, d._windows[half].oc, d._index, d.device
    sums = 2 * blocks * bn * bt if cut else 0

    def run_natural(x: torch.Tensor, b: torch.Tensor | None, y: torch.Tensor, m: int) -> None:
        stream = launch.raw_stream(index)
        xp, yp = x.data_ptr(), y.data_ptr()
        part = count = xp
        if counts:
            space = _empty((sums + counts + 1024,), (1,), dtype=torch.int32, device=device)
            part = space.data_ptr()
            count = part + 4 * sums
            px(x, 1, stream, count + 4 * counts, count)  # zeroes the counters
        box = kernel.box(xp, m, k)
        kernel(blocks, 1, stream, *box, *head, yp if b is None else b.data_ptr(), yp, part, count, m, n, kt, oc, unit, *tail)

    if nat:
        return run_natural

    def run(x: torch.Tensor, b: torch.Tensor | None, y: torch.Tensor, m: int) -> None:
        stream = launch.raw_stream(index)
        words = m * kt * 32
        space = _empty((words + sums + counts,), (1,), dtype=torch.int32, device=device)
        sp, yp = space.data_ptr(), y.data_ptr()
        part, count = sp + 4 * words, sp + 4 * (words + sums)
        px(x, m, stream, sp, count)
        box = kernel.box(sp, m, kt * 64)
        kernel(blocks, 1, stream, *box, *head, yp if b is None else b.data_ptr(), yp, part, count, m, n, kt, oc, unit, *tail)

    return run


def tiles(d: Dense, row: Row, m: int, half: bool, out: torch.dtype, bias_type: str, bias: bool) -> Any:
    from fp4.gpu.kernels import dense_tiles

    if out.itemsize == 2 and d.n % 8 == 0:
        return dense_tiles.plan(d, row, m, half, out, bias_type, bias)
    return ws(d, {**row, "U": 2, "SK": 1, "XS": 6, "CUT": 0, "PER": 1, "NAT": 0}, m, half, out, bias_type, bias)


def plain(d: Dense, row: Row, m: int, half: bool, out: torch.dtype, bias_type: str, bias: bool) -> Any:
    from fp4.gpu.kernels.plain import dense_plain

    bm, r = row["BM"], row["R"]
    constants = {**common(d, half, bias), "BM": bm, "R": r, "U": row["U"]}
    signature = {
        "x_ptr": launch.TYPES[torch.float16 if half else torch.bfloat16], "w_ptr": "*i32", "s_ptr": "*i32", "alpha_ptr": "*fp32",
        "bias_ptr": bias_type, "y_ptr": launch.TYPES[out], **dict.fromkeys(("M", "N", "K", "NT", "KT", "KB", "stride_xm", "oc"), "i32"),
    }  # fmt: skip
    kernel = launch.build(
        dense_plain, signature, constants, num_warps=row["NW"], num_stages=2,
        aligned=aligned(N=d.n, K=d.k, stride_xm=d.k),
    )  # fmt: skip
    head = (d.codes.data_ptr(), d.scale.data_ptr(), d._alpha[half].data_ptr())
    sizes = (d.n, d.k, d.nt, d.kt, d.kb, d.k, d._windows[half].oc, *constants.values())
    gx, index = -(-d.n // (16 * r)), d._index

    def run(x: torch.Tensor, b: torch.Tensor | None, y: torch.Tensor, m: int) -> None:
        yp = y.data_ptr()
        stream = launch.raw_stream(index)
        kernel(gx, -(-m // bm), stream, x.data_ptr(), *head, yp if b is None else b.data_ptr(), yp, m, *sizes)

    return run


def dequantize(d: Dense, row: Row, m: int, half: bool, out: torch.dtype, bias_type: str, bias: bool) -> Any:
    """Chunks of rows of W as 16-bit values in a workspace of at most WORKSPACE bytes, then a library product; alpha joins in fp32.

    The table row's ROWS, if any: a smaller chunk, which stays in L2 between its two uses.

    With a bias the product is kept in fp32 until the bias is in: the library's own bias path rounds twice.
    """
    rows = max(64, min(-(-d.n // 64) * 64, WORKSPACE // (2 * d.k) // 64 * 64, row.get("ROWS", d.n)))
    to_16 = _dequantizer(d, half)
    alpha, dtype = d.alpha[half], torch.float16 if half else torch.bfloat16

    def run(x: torch.Tensor, b: torch.Tensor | None, y: torch.Tensor, m: int) -> None:
        space = torch.empty((min(rows, d.n), d.k), dtype=dtype, device=d.device)
        for first in range(0, d.n, rows):
            count = min(rows, d.n - first)
            w = space[:count]
            to_16(w, first)
            part = y[:, first : first + count]
            bias_part = None if b is None else b[first : first + count]
            if y.dtype is dtype and bias_part is None:
                torch.addmm(part, x, w.t(), beta=0, alpha=alpha, out=part)
            else:
                acc = torch.mm(x, w.t(), out_dtype=torch.float32) * alpha
                part.copy_(acc if bias_part is None else acc + bias_part.float())

    return run


def _dequantizer(d: Dense, half: bool) -> Any:
    """(16-bit [rows, k], first row) -> None."""
    from fp4.gpu.kernels.plain import dequantize_tiles

    r, u = 4, 4
    constants = {"KIND": d.block, "ANY": d.about["any"], "HALF": half, "R": r, "U": u}
    signature = {
        "w_ptr": "*i32", "s_ptr": "*i32", "o_ptr": launch.TYPES[torch.float16 if half else torch.bfloat16],
        **dict.fromkeys(("row0", "N", "K", "NT", "KT", "KB", "oc"), "i32"),
    }  # fmt: skip
    kernel = launch.build(dequantize_tiles, signature, constants, num_warps=4, aligned=aligned(K=d.k))
    head = (d.codes.data_ptr(), d.scale.data_ptr())
    sizes = (d.n, d.k, d.nt, d.kt, d.kb, d._windows[half].oc, *constants.values())

    def to_16(out: torch.Tensor, first: int) -> None:
        stream = launch.raw_stream(d._index)
        kernel(-(-out.shape[0] // (16 * r)), -(-d.kt // u), stream, *head, out.data_ptr(), first, *sizes)

    return to_16


#: kernel of a table row -> its plan
BUILD: dict[str, Callable[..., Any]] = {
    "small": small, "wide": wide, "ws": ws, "tiles": tiles, "plain": plain, "dequantize": dequantize,
}  # fmt: skip
