"""W4A8: MXFP4 weights times activations quantised to e4m3 per token.

On Hopper ``small_fp8`` for few rows of x, ``ws_fp8`` for more; ``plain_fp8`` on SM89 and other newer GPUs.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from fp4.gpu.kernels import launch
from fp4.gpu.kernels.decode_fp8 import BASE
from fp4.gpu.kernels.dense import N_HOPPER, table
from fp4.gpu.kernels.dense_plans import STEPS, X_BYTES


class Few(NamedTuple):
    """Constants of ``small_fp8`` for at most MT rows of x; ONE: for one; XS: slots of x in shared memory, at most what k needs."""

    MT: int
    WK: int
    WN: int
    R: int
    U: int
    D: int
    XS: int
    ONE: bool = False


class Specialised(NamedTuple):
    """Constants of ``ws_fp8``; PER: blocks a multiprocessor; CUT as in ``ws_m.share``; QW: warps that quantise a row of x."""

    BT: int
    R: int
    SK: int
    XS: int
    NW: int
    PER: int = 1
    PDL: bool = False
    CUT: int = 0
    GM: int = 8
    TS: bool = False
    QW: int = 8
    PF: int = 0


#: codes, scale
LAYOUT = ("frag_w8", "frag_sf32")
#: tiles of 64 columns that ``quantize_x`` takes at a time when a row has more than ONCE of them
QUANTIZE = 32
ONCE = 256
#: counters of a product with cut tiles; with more tiles none is cut
COUNTS = 1024


Row = Few | Specialised
#: by their names in ``table.json``
KERNELS: dict[str, type[Row]] = {"small": Few, "ws": Specialised}


def kernel_of(row: dict[str, Any]) -> Row:
    """What a row of ``table.json`` names."""
    constants = {k: v for k, v in row.items() if k not in ("m_max", "n_min", "kernel")}
    return KERNELS[row["kernel"]](**constants)


@functools.cache
def hopper_table() -> tuple[tuple[int | None, int, Row], ...]:
    """(m_max, n_min, kernel), the first that fits: section "sm90 w4a8" of ``table.json``."""
    return tuple((r["m_max"], r["n_min"], kernel_of(r)) for r in table()["sm90 w4a8"])


#: plain Triton: the same with (BM, R, U, warps, stages); fits the 99 KB of shared memory of SM89 and SM120, tuned on no GPU
_PLAIN: tuple[tuple[int | None, int, tuple[int, int, int, int, int]], ...] = (
    (16, 0, (16, 4, 4, 4, 2)),
    (64, 0, (64, 4, 4, 4, 2)),
    (None, 0, (128, 8, 4, 8, 1)),
)


def reason(capability: tuple[int, int], block: int) -> str | None:
    """None when W4A8 can serve the format on the device (whether the values fit is for ``row_base`` to say), else why not."""
    if block == 16:
        return "an NVFP4 product e2m1 x e4m3 has up to 6 significant bits and e4m3 holds 4: not exact; use act='keep', or MXFP4 weights"
    if capability < (8, 9):
        return f"fp8 tensor cores need SM89 or newer, got SM{capability[0]}{capability[1]}"
    return None


def _wide(device: torch.device) -> bool:
    """Whether the Hopper kernel serves the device; the plain one serves the others."""
    return launch.gluon_reason() is None and torch.cuda.get_device_capability(device) == (9, 0)


class Dense8:
    """One MXFP4 weight for fp8 activations: ``Dense8(...)(x, bias, out_dtype) -> y``.

    ``y[m, n] = xs[m] * ws[n] * sum_k x8[m, k] * w8[n, k] (+ bias[n])`` with ``xs[m] = amax_k |x[m, k]| / 448``,
    ``x8 = e4m3(x / xs)`` (nearest even), w8 and ws exact. codes: ``frag_w8`` bytes; scale: ``frag_sf32``
    bytes; base: ``plain_fp8.row_base`` u8 [n].
    The tensor core adds e4m3 products with about 14 bits; nothing else is rounded. wide: the Hopper kernel, else plain Triton; None: what
    the device has.
    """

    def __init__(
        self,
        codes: torch.Tensor,
        scale: torch.Tensor,
        base: torch.Tensor,
        global_scale: torch.Tensor | None,
        n: int,
        k: int,
        wide: bool | None = None,
    ) -> None:
        self.n, self.k = n, k
        self.codes = codes.contiguous().view(torch.int32).reshape(-1)
        self.scale = scale.contiguous().view(torch.int32).reshape(-1)
        self.device = codes.device
        self.kt, nt = -(-k // 64), -(-n // 16)
        top = torch.zeros(nt * 16, dtype=torch.uint8, device=base.device)
        top[:n] = base
        self.base = top.view(nt, 2, 8).transpose(1, 2).repeat_interleave(2, 2).contiguous().view(torch.int32).reshape(-1).to(self.device)
        second = 1.0 if global_scale is None else float(global_scale)
        rows = torch.zeros(nt * 16, dtype=torch.float64, device=base.device)
        rows[:n] = torch.ldexp(torch.ones(n, dtype=torch.float64, device=base.device), base.to(torch.int32) - BASE) * second
        self.ws = rows.to(torch.float32).to(self.device)
        self._index = self.device.index or 0
        self.wide = _wide(self.device) and n <= N_HOPPER if wide is None else wide
        self._table: Any = hopper_table() if self.wide else _PLAIN
        self._build: Any = self._plan if self.wide else self._plan_plain
        self._plans: dict[Any, Any] = {}

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        out_dtype = out_dtype or x.dtype
        if torch.cuda.current_device() != self._index:
            with torch.cuda.device(self._index):
                return self(x, bias, out_dtype)
        m = x.shape[0]
        y = torch.empty((m, self.n), dtype=out_dtype, device=x.device)
        if m == 0 or self.n == 0:
            return y
        if x.data_ptr() & 15 or not x.is_contiguous():
            x = x.clone(memory_format=torch.contiguous_format)
        if bias is not None and bias.data_ptr() & 15:
            bias = bias.clone()
        row = self.choose(m)
        key = (row, x.dtype, out_dtype, None if bias is None else bias.dtype)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._build(row, x.dtype, out_dtype, bias)
        plan(x, bias, y, m)
        return y

    def choose(self, m: int) -> Any:
        """The row of the table for m rows of x."""
        return next(r for top, least, r in self._table if (top is None or m <= top) and self.n >= least and self._fits(r))

    def _fits(self, row: Any) -> bool:
        """small_fp8 has its steps of k one behind the other: no more of them than small_m."""
        return not isinstance(row, Few) or -(-self.kt // (row.WK * row.U)) <= STEPS

    def _plan(self, row: Row, act: torch.dtype, out: torch.dtype, bias: torch.Tensor | None) -> Any:
        return self._plan_few(row, act, out, bias) if isinstance(row, Few) else self._plan_ws(row, act, out, bias)

    def _plan_few(self, row: Few, act: torch.dtype, out: torch.dtype, bias: torch.Tensor | None) -> Any:
        from fp4.gpu.kernels.small_fp8 import small_fp8

        mt, wk, wn, r, u, d, xs, one = row
        held, bn = 1 if one and xs else mt, 16 * r * wn
        slot = held * wk * u * 64
        xs = min(xs, -(-self.kt // (wk * u)), max(2, X_BYTES // slot))
        constants = {
            "KT": self.kt, "HAS_BIAS": bias is not None, "EVEN_N": self.n % bn == 0, "WK": wk, "WN": wn, "R": r, "U": u, "MT": mt,
            "MR": held, "D": d, "XS": xs,
        }  # fmt: skip
        signature = {
            "x_ptr": "*i32", "xs_ptr": "*fp32", "w_ptr": "*i32", "s_ptr": "*i32",
            "bias_ptr": "*fp32" if bias is None else launch.TYPES[bias.dtype],
            "y_ptr": launch.TYPES[out], "base_ptr": "*i32", "ws_ptr": "*fp32", "M": "i32", "N": "i32",
        }  # fmt: skip
        aligned = ("N",) if self.n % 16 == 0 else ()
        kernel = launch.build(small_fp8, signature, constants, num_warps=wk * wn, aligned=aligned, pdl=True)
        quantize = self.quantizer(act, False, 16)
        tail = launch.constants_in_order(small_fp8, constants)
        w, s, base, ws = (t.data_ptr() for t in (self.codes, self.scale, self.base, self.ws))
        blocks, n, kt, index, device = -(-self.n // bn), self.n, self.kt, self._index, self.device

        def run(x: torch.Tensor, b: torch.Tensor | None, y: torch.Tensor, m: int) -> None:
            stream = launch.raw_stream(index)
            yp = y.data_ptr()
            space = torch.empty(m * (kt * 16 + 1), dtype=torch.int32, device=device)
            x8, scales = quantize(x, space, m, stream)
            kernel(blocks, 1, stream, x8, scales, w, s, yp if b is None else b.data_ptr(), yp, base, ws, m, n, *tail)

        return run

    def _plan_ws(self, row: Specialised, act: torch.dtype, out: torch.dtype, bias: torch.Tensor | None) -> Any:
        from fp4.gpu.kernels.dense_plans import share
        from fp4.gpu.kernels.ws_fp8 import ws_fp8

        bt, r, sk, xs, nw, per, pdl, cut, gm, ts, qw, pf = row
        bn = r * nw * 16
        ts = bool(ts) and out is not torch.float32 and self.n % 8 == 0  # a row of y starts at a multiple of 16 bytes, as TMA wants
        constants = {
            "HAS_BIAS": bias is not None, "EVEN": self.n % bn == 0 and self.kt % 4 == 0, "CUT": cut > 0, "TS": ts, "BT": bt, "R": r,
            "SK": sk, "XS": xs, "GM": gm, "PF": pf, "NW": nw,
        }  # fmt: skip
        signature = {
            "xd": launch.box_type("fp8e4nv", bt, 128), "xs_ptr": "*fp32", "w_ptr": "*i32", "s_ptr": "*i32",
            "bias_ptr": "*fp32" if bias is None else launch.TYPES[bias.dtype], "y_ptr": launch.TYPES[out], "base_ptr": "*i32",
            "ws_ptr": "*fp32", "part_ptr": "*fp32", "count_ptr": "*i32", "M": "i32", "N": "i32", "KT": "i32", "unit": "i32",
        }  # fmt: skip
        if ts:
            signature["yd"] = launch.box_type(launch.TYPES[out].removeprefix("*"), bt, bn)
        else:
            constants["yd"] = None
        aligned = tuple(name for name, v in (("N", self.n), ("KT", self.kt)) if v % 16 == 0)
        kernel = launch.build_ring(
            ws_fp8, signature, constants, slot=sk * bt * 128, per=per, num_warps=nw, aligned=aligned, pdl=pdl,
            maxnreg=launch.registers(nw + 4, per),
        )  # fmt: skip
        tiles_n, n, kt, index, room, device = (
            -(-self.n // bn),
            self.n,
            self.kt,
            self._index,
            per * launch.processors(self.device),
            self.device,
        )
        counts = COUNTS if cut else 0
        quantize = self.quantizer(act, True, qw, counts)
        tail = tuple(constants[name] for name in ws_fp8.arg_names if name in constants and name != "yd")
        w, s, base, ws = (t.data_ptr() for t in (self.codes, self.scale, self.base, self.ws))
        rounds, words = -(-kt // 4), kt * 16 + 1

        def run(x: torch.Tensor, b: torch.Tensor | None, y: torch.Tensor, m: int) -> None:
            stream = launch.raw_stream(index)
            yp = y.data_ptr()
            tiles = tiles_n * -(-m // bt)
            blocks, parts = share(tiles, rounds, room, cut if tiles <= counts else 0, 4 * kt // bt)
            sums = 2 * blocks * bn * bt if parts else 0
            space = torch.empty(-(-m * words // 4) * 4 + counts + sums, dtype=torch.int32, device=device)
            x8, scales = quantize(x, space, m, stream)
            count = space.data_ptr() + -(-m * words // 4) * 16
            bp = yp if b is None else b.data_ptr()
            xbox = kernel.box(x8, m, kt * 64)
            ybox = kernel.box(yp, m, n, 1) if ts else (None,)
            part = count + 4 * counts
            kernel(blocks, 1, stream, *xbox, *ybox, scales, w, s, bp, yp, base, ws, part, count, m, n, kt, 1 if parts else rounds, *tail)

        return run

    def _plan_plain(self, row: tuple[int, int, int, int, int], act: torch.dtype, out: torch.dtype, bias: torch.Tensor | None) -> Any:
        from fp4.gpu.kernels.plain_fp8 import dense_fp8_plain

        bm, r, u, warps, stages = row
        constants = {"HAS_BIAS": bias is not None, "BM": bm, "R": r, "U": u}
        signature = {
            "x_ptr": "*fp8e4nv", "xs_ptr": "*fp32", "w_ptr": "*i32", "s_ptr": "*i32",
            "bias_ptr": "*fp32" if bias is None else launch.TYPES[bias.dtype],
            "y_ptr": launch.TYPES[out], "base_ptr": "*i32", "ws_ptr": "*fp32", **dict.fromkeys(("M", "N", "NT", "KT", "KB"), "i32"),
        }  # fmt: skip
        aligned = ("N",) if self.n % 16 == 0 else ()
        kernel = launch.build(dense_fp8_plain, signature, constants, num_warps=warps, num_stages=stages, aligned=aligned)
        quantize = self.quantizer(act, False)
        w, s, base, ws = (t.data_ptr() for t in (self.codes, self.scale, self.base, self.ws))
        sizes = (self.n, -(-self.n // 16), self.kt, -(-self.kt // 4), *constants.values())
        tiles_n, index, kt, device = -(-self.n // (16 * r)), self._index, self.kt, self.device

        def run(x: torch.Tensor, b: torch.Tensor | None, y: torch.Tensor, m: int) -> None:
            stream = launch.raw_stream(index)
            yp = y.data_ptr()
            space = torch.empty(m * (kt * 16 + 1), dtype=torch.int32, device=device)
            x8, scales = quantize(x, space, m, stream)
            kernel(tiles_n * -(-m // bm), 1, stream, x8, scales, w, s, yp if b is None else b.data_ptr(), yp, base, ws, m, *sizes)

        return run

    def quantizer(self, act: torch.dtype, frag: bool, warps: int = 8, counts: int = 0) -> Any:
        """(x, workspace, m, stream) -> address of e4m3 [m, kt * 64] and of f32 [m], both at the start of the workspace, counters behind
        them at the next 16 bytes; frag: k in the order of the kernels with fp8 MMAs."""
        from fp4.gpu.kernels.plain_fp8 import quantize_x

        once = self.kt <= ONCE
        block = 1 << (self.kt - 1).bit_length() if once else QUANTIZE
        constants = {"B": block, "FRAG": frag, "PDL": self.wide, "ROUND": not self.wide, "COUNTS": counts, "ONCE": once, "IEEE": False}
        order = {"x_ptr": launch.TYPES[act], "o_ptr": "*fp8e4nv", "scale_ptr": "*fp32", "count_ptr": "*i32", "K": "i32", "KT": "i32"}
        aligned = ("K",) if self.k % 16 == 0 else ()
        warps = max(warps, block // 16) if once else 8
        kernel = launch.build(quantize_x, order, constants, num_warps=warps, aligned=aligned)
        k, kt, tail = self.k, self.kt, tuple(constants.values())

        def run(x: torch.Tensor, space: torch.Tensor, m: int, stream: int) -> tuple[int, int]:
            x8 = space.data_ptr()
            scales = x8 + m * kt * 64
            kernel(m, 1, stream, x.data_ptr(), x8, scales, x8 + -(-m * (kt * 16 + 1) // 4) * 16, k, kt, *tail)
            return x8, scales

        return run

    def warmup(self, m_max: int = 8192, dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)) -> None:
        """Compile and load what calls with up to m_max rows need."""
        for dtype in dtypes:
            for m in sorted({min(top or m_max, m_max) for top, _, _ in self._table}):
                self(torch.zeros((m, self.k), dtype=dtype, device=self.device))
        torch.cuda.synchronize(self.device)
