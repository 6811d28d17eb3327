"""Once a process: swizzle one tile with the installed triton_kernels and compare the bytes with our catalogue.

It reads the padding rule of HOPPER_VALUE (the one thing that differs between generations) from the result, and it refuses a generation
whose byte order nobody has seen.
"""

from __future__ import annotations

import torch

from fp4.gpu.backends._triton_kernels_shim import Shim
from fp4.layouts import get

__all__ = ["check"]


def check(shim: Shim) -> str | None:
    """None when all bytes agree (and ``shim.pad_n``, ``shim.pad_k`` are set), else what differs."""
    shim.pad_n, shim.pad_k = _padding(shim)
    value = f"hopper_value_v3(pad_n={shim.pad_n},pad_k={shim.pad_k})"
    for n, k2 in ((48, 64), (96, 160)):
        w = (torch.arange(n * k2, device="cpu") * 73 % 251).to(torch.uint8).view(1, n, k2)
        theirs = _swizzle(shim, w, values=True)
        if not torch.equal(theirs, get(value).apply(w[0])):
            return f"HOPPER_VALUE of a {n} x {k2} tile"
    for warps in (4, 8):
        s = (torch.arange(80 * 8, device="cpu") * 29 % 253).to(torch.uint8).view(1, 80, 8)
        if not torch.equal(_swizzle(shim, s, values=False, num_warps=warps), get(f"hopper_sf(num_warps={warps},pad_k=4)").apply(s[0])):
            return f"HOPPER_SCALE with {warps} warps"
    return None


def _swizzle(shim: Shim, t: torch.Tensor, values: bool, num_warps: int = 8) -> torch.Tensor:
    """Storage bytes of ``t [1, n, cols]`` after their conversion, flat."""
    lib = shim.found.tensor
    logical = t.mT  # [1, k, n], contiguous along k
    if values:
        source = lib.wrap_torch_tensor(logical, dtype=lib.FP4)
        layout = shim.value_layout(tuple(logical.shape))
    else:
        source = lib.wrap_torch_tensor(logical)
        layout = shim.scale_layout(tuple(logical.shape), num_warps)
    if shim.ogs:
        args = {"mx_axis": 1, "mma_version": 3} if values else {"mx_axis": 1, "num_warps": num_warps}
        out = lib.convert_layout(source, type(layout), **args)
    else:
        out = lib.convert_layout(source, layout)
    storage: torch.Tensor = out.storage.data
    return storage[0].mT.contiguous().flatten()


def _padding(shim: Shim) -> tuple[int, int]:
    """(rows n, bytes k) to which HOPPER_VALUE rounds up, read from the smallest tile that it takes."""
    lib = shim.found.tensor
    t = torch.zeros((1, 16, 32), dtype=torch.uint8, device="cpu").mT
    source = lib.wrap_torch_tensor(t, dtype=lib.FP4)
    layout = shim.value_layout(tuple(t.shape))
    out = lib.convert_layout(source, type(layout), mx_axis=1, mma_version=3) if shim.ogs else lib.convert_layout(source, layout)
    k4, n4 = out.storage.data.shape[-2:]
    return n4 * 4, k4 // 4
