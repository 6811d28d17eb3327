"""Plan of the ``tiles`` rows of the dense table: how many blocks multiply (``ws_tiles``), how many bring x into order beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fp4.gpu.kernels import dense_plans, launch

if TYPE_CHECKING:
    from fp4.gpu.kernels.dense import Dense

#: bytes of x that a helper brings into order while a block multiplies 256 rows of x by 128 rows of W and 64 columns (0.65 us)
_RATE = 20_000


def shares(tiles_m: int, tiles_n: int, chunks: int, room: int, group: int, help_x: int) -> tuple[int, int, int, int]:
    """(multiplying blocks, helpers, tiles of rows of x that ``permute_x`` brings into order in front, chunks of them that it does).

    help_x: 0 without help; 1 helpers for all of x but what is needed at once; h > 1 helpers for the last 1 / h of the groups of tiles.

    The multiplying blocks are the fewest that need no more waves than ``room`` blocks would. The others help if they keep up: a block
    comes to the next chunk of x after CHUNK steps, and to the next group after all tiles of W of this one.
    """
    from fp4.gpu.kernels.ws_tiles import CHUNK

    tiles = tiles_m * tiles_n
    blocks = -(-tiles // -(-tiles // room))
    helpers = room - blocks
    chunk = group * 256 * CHUNK * 128  # bytes
    waves = max(1.0, group * tiles_n / blocks)  # tiles of a group one after the other in one block
    groups = -(-tiles_m // group)
    front = groups - groups // help_x if help_x else groups
    # while the front groups are multiplied, the helpers gain on the others; with none, they must keep up from the start
    if not help_x or front == groups or helpers * _RATE * waves * CHUNK * groups < chunk * (groups - front):
        return blocks, 0, tiles_m, chunks
    if front:
        return blocks, helpers, front * group, chunks
    late = 1 - min(1.0, helpers * _RATE * CHUNK / chunk)  # of the first group, what they could not bring in time
    return blocks, helpers, group, max(1, -(-int(1000 * late * chunks) // 1000))


def plan(d: Dense, row: dict[str, Any], m: int, half: bool, out: torch.dtype, bias_type: str, bias: bool) -> Any:
    """(x, bias, y, m) -> None for 16-bit y, n % 8 == 0 and the m of a class of 64."""
    from fp4.gpu.kernels.ws_tiles import CHUNK, ws_tiles

    bt, r, nw, group = row["BT"], row["R"], row["NW"], row["GM"]
    bn = r * nw * 16
    tiles_m, tiles_n = -(-m // bt), -(-d.n // bn)
    chunks = -(-d.kt // CHUNK)
    nat = bool(row.get("NAT", 0))
    blocks, helpers, front, ready = shares(tiles_m, tiles_n, chunks, launch.processors(d.device), group, 0 if nat else row["HELP"])
    constants = {
        **dense_plans.common(d, half, bias), "EVEN": d.n % bn == 0 and d.kt % 4 == 0, "HELP": helpers > 0, "BT": bt, "R": r,
        "XS": row["XS"], "GM": group, "NAT": nat, "NW": nw,
    }  # fmt: skip
    element = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    signature = {
        "xd": launch.box_type("fp16" if half else "bf16", bt, 64), "yd": launch.box_type(element[out], bt, bn),
        **dict.fromkeys(("x_ptr", "o_ptr", "flag_ptr", "w_ptr", "s_ptr"), "*i32"), "alpha_ptr": "*fp32", "bias_ptr": bias_type,
        **dict.fromkeys(("M", "N", "KT", "words", "oc", "helpers", "front", "ready"), "i32"),
    }  # fmt: skip
    kernel = launch.build_ring(
        ws_tiles,
        signature,
        constants,
        slot=bt * 128,
        num_warps=nw,
        aligned=dense_plans.aligned(N=d.n, KT=d.kt, words=d.k // 2),
        pdl=bool(row["PDL"]) and not nat,
    )
    head = (d.codes.data_ptr(), d.scale.data_ptr(), d._alpha[half].data_ptr())
    tail = (d.k // 2, d._windows[half].oc, helpers, front, ready, *launch.constants_in_order(ws_tiles, constants))
    n, k, kt, index, device = d.n, d.k, d.kt, d._index, d.device

    def run_natural(x: torch.Tensor, b: torch.Tensor | None, y: torch.Tensor, m: int) -> None:
        xp, yp = x.data_ptr(), y.data_ptr()
        boxes = (*kernel.box(xp, m, k), *kernel.box(yp, m, n, 1))
        kernel(blocks, 1, launch.raw_stream(index), *boxes, xp, xp, xp, *head, yp if b is None else b.data_ptr(), m, n, kt, *tail)

    if nat:
        return run_natural
    counts = max(256, 1 << (-(-tiles_m // group) * group * chunks - 1).bit_length()) if helpers else 0
    px = dense_plans.permute(d, counts, ready * CHUNK if helpers else d.kt)

    def run(x: torch.Tensor, b: torch.Tensor | None, y: torch.Tensor, m: int) -> None:
        stream = launch.raw_stream(index)
        words = m * kt * 32
        space = torch.empty(words + counts, dtype=torch.int32, device=device)
        sp, xp, yp = space.data_ptr(), x.data_ptr(), y.data_ptr()
        count = sp + 4 * words
        px(x, min(m, front * bt), stream, sp, count)
        boxes = (*kernel.box(sp, m, kt * 64), *kernel.box(yp, m, n, 1))
        kernel(blocks + helpers, 1, stream, *boxes, xp, sp, count, *head, yp if b is None else b.data_ptr(), m, n, kt, *tail)

    return run
