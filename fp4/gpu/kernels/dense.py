"""W4A16 dense products on one stored weight: which kernel for how many rows of x, and one cheap launch.

The ``triton`` backend uses four things: ``reason`` (can we serve this?), ``LAYOUT`` (how codes and scales are stored), ``facts`` (what
prepare must know about the scale bytes) and ``Dense`` (bound arrays, callable). A weight's bytes are codes and raw scale bytes in
fragment order, so restore is the inverse of the two catalogue layouts.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch

from fp4.errors import Unsupported
from fp4.gpu.kernels import frag, launch

#: block size -> storage layout of "codes" and "scale"
LAYOUT = {16: ("frag_w", "frag_sf16"), 32: ("frag_w", "frag_sf32")}
ACT_DTYPES = (torch.bfloat16, torch.float16)
_TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
#: bytes of bf16 weights that the dequantising route holds at a time
WORKSPACE = 128 << 20
#: shared memory that small_m holds x in at most
_X_BYTES = 96 << 10
#: unrolled k steps of small_m at most; longer k goes to the next row of the table
_STEPS = 40
#: rows of W at most for the Hopper kernels: ``ws_m`` and ``ws_fp8`` have 32-bit offsets inside a tile of y, of 256 rows of x
N_HOPPER = (1 << 31) // 256
#: device index -> cudaStream_t of the current stream; absent in builds of torch without CUDA
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
#: index of the current device, without the check for an initialised CUDA: a bound weight is on a GPU already
_current: Any = getattr(torch._C, "_cuda_getDevice", None) or torch.cuda.current_device
#: a third faster than torch.empty, which has more ways to say a size
_empty = torch.empty_strided


@functools.cache
def table() -> dict[str, list[dict[str, Any]]]:
    """The measured choice of kernels, ``table.json``."""
    return {k: v for k, v in json.loads((Path(__file__).parent / "table.json").read_text()).items() if k != "about"}


def reason(capability: tuple[int, int], block: int, k: int | None, act_dtype: torch.dtype) -> str | None:
    """None when the kernels serve this weight on this device, else why not."""
    if block not in LAYOUT:
        return f"kernels read blocks of 16 (e4m3 scales) and 32 (ue8m0), this format has {block}"
    if capability[0] < 8:
        return "needs tensor cores with bf16, SM80 or newer"
    if act_dtype not in ACT_DTYPES:
        return f"needs bf16 or fp16 activations, got {str(act_dtype).removeprefix('torch.')}"
    if k is not None and k % 16:
        return f"k = {k} is no multiple of 16"
    return None


def facts(scale: torch.Tensor, block: int) -> dict[str, Any]:
    """What the kernels must know about logical scale bytes (u8, any shape), as plain values; reads them once.

    ``low``, ``high``: smallest and largest ue8m0 byte in use; ``any``: some byte is NaN (or negative, for e4m3), which takes the slower
    decode; ``fp16``: fp16 products are exact. Raises Unsupported when bf16 products would not be exact.
    """
    bf16 = frag.scale_window(scale, block, half=False)
    try:
        frag.scale_window(scale, block, half=True)
        half = True
    except Unsupported:
        half = False
    low = high = 127
    if block == 32:
        used = scale[scale != 0xFF]
        if used.numel():
            low, high = int(used.min()), int(used.max())
    return {"low": low, "high": high, "any": bf16.any_byte, "fp16": half}


def window(block: int, about: dict[str, Any], half: bool) -> frag.Window:
    if block == 16:
        return frag.Window(2.0 ** frag.LEFT_E4M3[half], 0, about["any"], half)
    return frag.ue8m0_window(about["low"], about["high"], about["any"], half)


def _which(device: torch.device, n: int) -> str:
    """The part of the table for a device, the installed Triton and n rows of W."""
    if launch.gluon_reason() is not None:
        return "plain"
    return "sm90" if torch.cuda.get_device_capability(device) == (9, 0) and n <= N_HOPPER else "default"


class Dense:
    """One weight, bound: ``Dense(...)(x, bias, out_dtype) -> y``.

    codes: u8 or i32 ``frag_w`` bytes; scale: ``frag_sf16`` / ``frag_sf32`` bytes; global_scale: f32 [] multiplier or None; n, k: logical
    shape; about: ``facts``. x: contiguous bf16 or fp16 [m, k], m >= 0. The result does not depend on earlier calls, and no call
    synchronises: safe in CUDA graphs once ``warmup`` has compiled what a graph needs.
    """

    def __init__(
        self,
        codes: torch.Tensor,
        scale: torch.Tensor,
        global_scale: torch.Tensor | None,
        n: int,
        k: int,
        block: int,
        about: dict[str, Any],
        rows: str | None = None,
    ) -> None:
        self.n, self.k, self.block, self.about = n, k, block, about
        self.codes = codes.contiguous().view(torch.int32).reshape(-1)
        self.scale = scale.contiguous().view(torch.int32).reshape(-1)
        self.device = codes.device
        self.kt = -(-k // 64)
        self.nt = -(-n // 16)
        self.kb = -(-self.kt // 4)
        self._index = self.device.index or 0
        second = 1.0 if global_scale is None else float(global_scale)
        self._windows = {False: window(block, about, False)}
        if about["fp16"]:
            self._windows[True] = window(block, about, True)
        self.alpha = {h: w.alpha * second for h, w in self._windows.items()}
        self._alpha = {h: torch.tensor([a], dtype=torch.float32, device=self.device) for h, a in self.alpha.items()}
        self._rows = table()[rows or _which(self.device, n)]
        self._plans: dict[Any, Any] = {}

    # ---- choice --------------------------------------------------------------------------------------------------------------

    def choose(self, m: int) -> dict[str, Any]:
        """The row of the table for m rows of x."""
        for row in self._rows:
            if row["m_max"] is not None and m > row["m_max"]:
                continue
            if self.n < row["n_min"] or row.get("block", self.block) != self.block:
                continue
            if row["kernel"] == "small" and -(-self.kt // (row["WK"] * row["U"])) > _STEPS:
                continue
            return row
        return self._rows[-1]

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        dtype = x.dtype
        out_dtype = out_dtype or dtype
        m, n = x.shape[0], self.n
        half = dtype is torch.float16
        if _current() != self._index:
            with torch.cuda.device(self._index):
                return self(x, bias, out_dtype)
        y = _empty((m, n), (n, 1), dtype=out_dtype, device=self.device)
        if m == 0 or n == 0:
            return y
        if half and not self.about["fp16"]:
            return self._split_fp16(x, bias, y)
        if x.data_ptr() & 15 or not x.is_contiguous():
            x = x.clone(memory_format=torch.contiguous_format)
        if bias is not None and bias.data_ptr() & 15:
            bias = bias.clone()
        key = (m if m <= 64 else -m // 64, half, out_dtype, None if bias is None else bias.dtype)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._plan(m, half, out_dtype, bias)
        plan(x, bias, y, m)
        return y

    def _split_fp16(self, x: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor) -> torch.Tensor:
        """fp16 x as a sum of two bf16 tensors (11 = 8 + 3 bits, exact), for scales that fp16 products cannot hold."""
        hi = x.to(torch.bfloat16)
        lo = torch.where(torch.isfinite(x), x.float() - hi.float(), 0.0).to(torch.bfloat16)
        both = self(torch.cat((hi, lo)), None, torch.float32)
        total = both[: x.shape[0]] + both[x.shape[0] :]
        return y.copy_(total if bias is None else total + bias.float())

    # ---- plans ---------------------------------------------------------------------------------------------------------------

    def _plan(self, m: int, half: bool, out: torch.dtype, bias: torch.Tensor | None, row: dict[str, Any] | None = None) -> Any:
        row = row or self.choose(m)
        build = {
            "small": self._small, "wide": self._wide, "ws": self._ws, "tiles": self._tiles,
            "plain": self._plain, "dequantize": self._dequantize,
        }[row["kernel"]]  # fmt: skip
        return build(row, m, half, out, "*fp32" if bias is None else _TYPES[bias.dtype], bias is not None)

    def _common(self, half: bool, bias: bool) -> dict[str, Any]:
        return {"KIND": self.block, "ANY": self.about["any"], "HALF": half, "HAS_BIAS": bias}

    def _aligned(self, **sizes: int) -> tuple[str, ...]:
        return tuple(name for name, value in sizes.items() if value % 16 == 0)

    def _small(self, row: dict[str, Any], m: int, half: bool, out: torch.dtype, bias_type: str, bias: bool) -> Any:
        from fp4.gpu.kernels.small_m import small_m

        wk, wn, r, u = (row[c] for c in ("WK", "WN", "R", "U"))
        steps = -(-self.kt // (wk * u))
        mt = max(8, 1 << (m - 1).bit_length())
        xs = row["XS"]
        held = 1 if m == 1 and xs else mt  # rows of x in a slot of wk * u tiles of 64 columns
        slot = held * wk * u * 128
        if xs == 99:  # all of x in shared memory, where it fits beside two more blocks
            xs = steps if steps * slot <= _X_BYTES else 4
        xs = min(xs, steps, max(2, _X_BYTES // slot))
        if held == 1 and xs == steps:  # one copy brings all of it, of a power of two
            whole = 1 << (steps - 1).bit_length()
            xs = whole if whole * slot <= _X_BYTES else 4
        constants = {
            "K": self.k, **self._common(half, bias), "EVEN_N": self.n % (16 * r * wn) == 0, "WK": wk, "WN": wn, "R": r, "U": u,
            "MT": mt, "MR": held, "D": row["D"], "XS": xs,
        }  # fmt: skip
        signature = {
            "x_ptr": "*i32", "w_ptr": "*i32", "s_ptr": "*i64" if u >= 4 else "*i32", "alpha_ptr": "*fp32", "bias_ptr": bias_type,
            "y_ptr": _TYPES[out], "M": "i32", "N": "i32", "oc": "i32",
        }  # fmt: skip
        kernel = launch.build(small_m, signature, constants, num_warps=wk * wn, aligned=self._aligned(N=self.n))
        head = (self.codes.data_ptr(), self.scale.data_ptr(), self._alpha[half].data_ptr())
        tail = launch.constants_in_order(small_m, constants)
        n, oc, gx, index = self.n, self._windows[half].oc, -(-self.n // (16 * r * wn)), self._index
        raw_stream = _raw_stream

        def run(x: torch.Tensor, b: torch.Tensor | None, y: torch.Tensor, m: int) -> None:
            yp = y.data_ptr()
            kernel(gx, 1, raw_stream(index), x.data_ptr(), *head, yp if b is None else b.data_ptr(), yp, m, n, oc, *tail)

        return run

    def _permute(self, counts: int, tiles: int | None = None) -> Any:
        """``permute_x``: (x, m, stream, address of the output, address of ``counts`` counters to zero) -> None.

        tiles: how many tiles of 64 columns of each row are wanted, rounded up to 32; default all.
        """
        from fp4.gpu.kernels.wide_m import permute_x

        block = min(32, 1 << (self.kt - 1).bit_length())
        signature = {"x_ptr": "*i32", "o_ptr": "*i32", "count_ptr": "*i32", "words": "i32", "tiles": "i32"}
        constants = {"B": block, "COUNTS": counts}
        kernel = launch.build(permute_x, signature, constants, num_warps=4, aligned=self._aligned(words=self.k // 2))
        columns, k, kt = -(-min(self.kt, tiles or self.kt) // block), self.k, self.kt

        def run(x: torch.Tensor, m: int, stream: int, out: int, count: int) -> None:
            kernel(m, columns, stream, x.data_ptr(), out, count, k // 2, kt, block, counts)

        return run

    def _counters(self, row: dict[str, Any], m: int, tiles_n: int) -> int:
        """Counters that a cut product of the row's largest m needs: one kernel of ``permute_x`` for all its m."""
        top = -(-max(m, row.get("m_max") or 0) // 64) * 64  # a plan serves the m of a class of 64
        return 1 << int(tiles_n * -(-top // row["BT"]) - 1).bit_length()

    def _wide(self, row: dict[str, Any], m: int, half: bool, out: torch.dtype, bias_type: str, bias: bool) -> Any:
        from fp4.gpu.kernels.wide_m import wide_m

        bt, r, nw, split = row["BT"], row["R"], row["NW"], row["SPLIT"]
        bn = r * nw * 16
        tiles_n = -(-self.n // bn)
        constants = {
            **self._common(half, bias), "EVEN": self.n % bn == 0 and self.kt % (row["U"] * split) == 0,
            "BT": bt, "R": r, "U": row["U"], "XS": row["XS"], "GM": row["GM"], "SPLIT": split, "NW": nw,
        }  # fmt: skip
        signature = {
            "x_ptr": _TYPES[torch.float16 if half else torch.bfloat16], "w_ptr": "*i32", "s_ptr": "*i32", "alpha_ptr": "*fp32",
            "bias_ptr": bias_type, "y_ptr": _TYPES[out], "part_ptr": "*fp32", "count_ptr": "*i32", "M": "i32", "N": "i32", "KT": "i32",
            "oc": "i32",
        }  # fmt: skip
        kernel = launch.build_ring(
            wide_m, signature, constants, slot=bt * 128, num_warps=nw, aligned=self._aligned(N=self.n, KT=self.kt),
            pdl=bool(row.get("PDL")),
        )  # fmt: skip
        counts = 0 if split == 1 else self._counters(row, m, tiles_n)
        px = self._permute(counts)
        alpha = self._alpha[half].data_ptr()
        head = (self.codes.data_ptr(), self.scale.data_ptr(), alpha)
        tail = launch.constants_in_order(wide_m, constants)
        n, kt, oc, index, device = self.n, self.kt, self._windows[half].oc, self._index, self.device
        raw_stream = _raw_stream

        def run(x: torch.Tensor, b: torch.Tensor | None, y: torch.Tensor, m: int) -> None:
            stream = raw_stream(index)
            tiles = tiles_n * -(-m // bt)
            words = m * kt * 32
            space = _empty((words + (0 if split == 1 else split * m * n + counts),), (1,), dtype=torch.int32, device=device)
            sp, yp = space.data_ptr(), y.data_ptr()
            part, count = (alpha, alpha) if split == 1 else (sp + 4 * words, sp + 4 * (words + split * m * n))
            px(x, m, stream, sp, count)
            kernel(tiles, split, stream, sp, *head, yp if b is None else b.data_ptr(), yp, part, count, m, n, kt, oc, *tail)

        return run

    def _ws(self, row: dict[str, Any], m: int, half: bool, out: torch.dtype, bias_type: str, bias: bool) -> Any:
        from fp4.gpu.kernels.ws_m import share, ws_m

        bt, u, sk, nw, per = row["BT"], row["U"], row["SK"], row["NW"], row["PER"]
        nat = bool(row.get("NAT", 0))
        bn = row["R"] * nw * 16
        tiles_n, steps = -(-self.n // bn), -(-self.kt // u)
        constants = {
            **self._common(half, bias), "EVEN": self.n % bn == 0 and self.kt % u == 0, "BT": bt, "R": row["R"], "U": u, "SK": sk,
            "XS": row["XS"], "NAT": nat, "NW": nw,
        }  # fmt: skip
        signature = {
            "xd": launch.box_type("fp16" if half else "bf16", bt, 64), "w_ptr": "*i32", "s_ptr": "*i32", "alpha_ptr": "*fp32",
            "bias_ptr": bias_type, "y_ptr": _TYPES[out], "part_ptr": "*fp32", "count_ptr": "*i32", "M": "i32", "N": "i32", "KT": "i32",
            "oc": "i32", "unit": "i32",
        }  # fmt: skip
        kernel = launch.build_ring(
            ws_m, signature, constants, slot=sk * bt * 128, per=per, num_warps=nw, aligned=self._aligned(N=self.n, KT=self.kt),
            pdl=bool(row.get("PDL")) and not (nat and not row["CUT"]),
            maxnreg=launch.registers(nw + 4, per),  # the producer's warp takes the room of four
        )  # fmt: skip
        tiles = tiles_n * -(-m // bt)
        most = min(8 * self.kt // bt, row.get("MOST", steps))
        blocks, cut = share(tiles, steps, per * launch.processors(self.device), row["CUT"], most)
        parts = row.get("PARTS", steps)  # of a tile, that stay together; as many as divide its steps
        unit = steps // next(p for p in range(min(parts, steps), steps + 1) if steps % p == 0) if cut else steps
        blocks = min(blocks, tiles * (steps // unit))
        counts = self._counters(row, m, tiles_n) if row["CUT"] else 0
        px = self._permute(counts, 1 if nat else None)
        alpha = self._alpha[half].data_ptr()
        head = (self.codes.data_ptr(), self.scale.data_ptr(), alpha)
        tail = launch.constants_in_order(ws_m, constants)
        n, k, kt, oc, index, device = self.n, self.k, self.kt, self._windows[half].oc, self._index, self.device
        sums = 2 * blocks * bn * bt if cut else 0

        def run_natural(x: torch.Tensor, b: torch.Tensor | None, y: torch.Tensor, m: int) -> None:
            stream = _raw_stream(index)
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
            stream = _raw_stream(index)
            words = m * kt * 32
            space = _empty((words + sums + counts,), (1,), dtype=torch.int32, device=device)
            sp, yp = space.data_ptr(), y.data_ptr()
            part, count = sp + 4 * words, sp + 4 * (words + sums)
            px(x, m, stream, sp, count)
            box = kernel.box(sp, m, kt * 64)
            kernel(blocks, 1, stream, *box, *head, yp if b is None else b.data_ptr(), yp, part, count, m, n, kt, oc, unit, *tail)

        return run

    def _tiles(self, row: dict[str, Any], m: int, half: bool, out: torch.dtype, bias_type: str, bias: bool) -> Any:
        from fp4.gpu.kernels import dense_tiles

        if out.itemsize == 2 and self.n % 8 == 0:
            return dense_tiles.plan(self, row, m, half, out, bias_type, bias)
        return self._ws({**row, "U": 2, "SK": 1, "XS": 6, "CUT": 0, "PER": 1, "NAT": 0}, m, half, out, bias_type, bias)

    def _plain(self, row: dict[str, Any], m: int, half: bool, out: torch.dtype, bias_type: str, bias: bool) -> Any:
        from fp4.gpu.kernels.plain import dense_plain

        bm, r = row["BM"], row["R"]
        constants = {**self._common(half, bias), "BM": bm, "R": r, "U": row["U"]}
        signature = {
            "x_ptr": _TYPES[torch.float16 if half else torch.bfloat16], "w_ptr": "*i32", "s_ptr": "*i32", "alpha_ptr": "*fp32",
            "bias_ptr": bias_type, "y_ptr": _TYPES[out], **dict.fromkeys(("M", "N", "K", "NT", "KT", "KB", "stride_xm", "oc"), "i32"),
        }  # fmt: skip
        kernel = launch.build(
            dense_plain, signature, constants, num_warps=row["NW"], num_stages=2,
            aligned=self._aligned(N=self.n, K=self.k, stride_xm=self.k),
        )  # fmt: skip
        head = (self.codes.data_ptr(), self.scale.data_ptr(), self._alpha[half].data_ptr())
        sizes = (self.n, self.k, self.nt, self.kt, self.kb, self.k, self._windows[half].oc, *constants.values())
        gx, index = -(-self.n // (16 * r)), self._index

        def run(x: torch.Tensor, b: torch.Tensor | None, y: torch.Tensor, m: int) -> None:
            yp = y.data_ptr()
            stream = _raw_stream(index)
            kernel(gx, -(-m // bm), stream, x.data_ptr(), *head, yp if b is None else b.data_ptr(), yp, m, *sizes)

        return run

    def _dequantize(self, row: dict[str, Any], m: int, half: bool, out: torch.dtype, bias_type: str, bias: bool) -> Any:
        """Chunks of rows of W as 16-bit values in a workspace of at most WORKSPACE bytes, then a library product; alpha joins in fp32.

        The table row's ROWS, if any: a smaller chunk, which stays in L2 between its two uses.

        With a bias the product is kept in fp32 until the bias is in: the library's own bias path rounds twice.
        """
        rows = max(64, min(-(-self.n // 64) * 64, WORKSPACE // (2 * self.k) // 64 * 64, row.get("ROWS", self.n)))
        to_16 = self._dequantizer(half)
        alpha, dtype = self.alpha[half], torch.float16 if half else torch.bfloat16

        def run(x: torch.Tensor, b: torch.Tensor | None, y: torch.Tensor, m: int) -> None:
            space = torch.empty((min(rows, self.n), self.k), dtype=dtype, device=self.device)
            for first in range(0, self.n, rows):
                count = min(rows, self.n - first)
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

    def _dequantizer(self, half: bool) -> Any:
        from fp4.gpu.kernels.plain import dequantize_tiles

        r, u = 4, 4
        constants = {"KIND": self.block, "ANY": self.about["any"], "HALF": half, "R": r, "U": u}
        signature = {
            "w_ptr": "*i32", "s_ptr": "*i32", "o_ptr": _TYPES[torch.float16 if half else torch.bfloat16],
            **dict.fromkeys(("row0", "N", "K", "NT", "KT", "KB", "oc"), "i32"),
        }  # fmt: skip
        kernel = launch.build(dequantize_tiles, signature, constants, num_warps=4, aligned=self._aligned(K=self.k))
        head = (self.codes.data_ptr(), self.scale.data_ptr())
        sizes = (self.n, self.k, self.nt, self.kt, self.kb, self._windows[half].oc, *constants.values())

        def to_16(out: torch.Tensor, first: int) -> None:
            stream = _raw_stream(self._index)
            kernel(-(-out.shape[0] // (16 * r)), -(-self.kt // u), stream, *head, out.data_ptr(), first, *sizes)

        return to_16

    # ---- preparation ---------------------------------------------------------------------------------------------------------

    def _sizes(self, m_max: int) -> list[int]:
        """Numbers of rows that between them reach every kernel of 1 .. m_max rows."""
        sizes = {1, m_max, *range(8, min(m_max, 64) + 1, 8), *(r["m_max"] for r in self._rows if r["m_max"])}
        return sorted(s for s in sizes if 0 < s <= m_max)

    def warmup(self, m_max: int = 8192, dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,), bias: torch.dtype | None = None) -> None:
        """Compile and load every kernel that calls with up to m_max rows can reach, and run each once."""
        b = None if bias is None else torch.zeros(self.n, dtype=bias, device=self.device)
        for dtype in dtypes:
            for m in self._sizes(m_max):
                self(torch.zeros((m, self.k), dtype=dtype, device=self.device), b)
        torch.cuda.synchronize(self.device)
