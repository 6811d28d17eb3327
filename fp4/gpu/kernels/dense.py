"""W4A16 dense products on one stored weight: which kernel for how many rows of x, by a plan that is made once (``dense_plans``).

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
from fp4.gpu.kernels import dense_plans, frag, launch

#: block size -> storage layout of "codes" and "scale"
LAYOUT = {16: ("frag_w", "frag_sf16"), 32: ("frag_w", "frag_sf32")}
ACT_DTYPES = (torch.bfloat16, torch.float16)
#: rows of W at most for the Hopper kernels: ``ws_m`` and ``ws_fp8`` have 32-bit offsets inside a tile of y, of 256 rows of x
N_HOPPER = (1 << 31) // 256
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
            if dense_plans.fits(self, row, m):
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

    def _plan(self, m: int, half: bool, out: torch.dtype, bias: torch.Tensor | None, row: dict[str, Any] | None = None) -> Any:
        """(x, bias, y, m) -> None by a row of the table (default: the one for m), for these types and the m of its class."""
        row = row or self.choose(m)
        bias_type = "*fp32" if bias is None else launch.TYPES[bias.dtype]
        return dense_plans.BUILD[row["kernel"]](self, row, m, half, out, bias_type, bias is not None)

    # ---- preparation ---------------------------------------------------------------------------------------------------------

    def _sizes(self, m_max: int) -> list[int]:
        """Numbers of rows that between them reach every kernel of 1 .. m_max rows."""
        sizes = {1, m_max, *range(8, min(m_max, 64) + 1, 8), *(r["m_max"] for r in self._rows if r["m_max"])}
        if any("busy" in r for r in self._rows):  # which of these rows a call takes changes with m, back and forth
            sizes |= {*{id(self.choose(m)): m for m in range(64, m_max, 64)}.values()}
        return sorted(s for s in sizes if 0 < s <= m_max)

    def warmup(self, m_max: int = 8192, dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,), bias: torch.dtype | None = None) -> None:
        """Compile and load every kernel that calls with up to m_max rows can reach, and run each once."""
        b = None if bias is None else torch.zeros(self.n, dtype=bias, device=self.device)
        for dtype in dtypes:
            for m in self._sizes(m_max):
                self(torch.zeros((m, self.k), dtype=dtype, device=self.device), b)
        torch.cuda.synchronize(self.device)
