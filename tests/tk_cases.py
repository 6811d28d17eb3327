"""Runs one installed copy of triton_kernels through fp4 on a CPU and prints one JSON line a case; needs a process of its own.

The kernels are the library's, executed by Triton's interpreter on a stand-in SM90 or SM89; the expected values are fp4's reference.
"""

from __future__ import annotations

import json
import sys
import traceback
from dataclasses import replace
from typing import Any

import tk_interpreter  # first: it turns the interpreter on
import torch

import fp4
from fp4.gpu import registry
from fp4.gpu.device import Device
from fp4.tensor import QuantizedTensor

CC = tuple(int(d) for d in sys.argv[1]) if len(sys.argv) > 1 else (9, 0)
tk_interpreter.install(CC)  # type: ignore[arg-type]
DEVICE = Device.fake(CC)  # type: ignore[arg-type]


def weight(seed: int, fmt: str, *shape: int, global_scale: Any = None) -> QuantizedTensor:
    """Random codes; scales differ from block to block and from expert to expert."""
    g = torch.Generator().manual_seed(seed)
    block, low, high = {"mxfp4": (32, 120, 128), "nvfp4": (16, 0x28, 0x48)}[fmt]
    codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, generator=g)
    scale = torch.randint(low, high, (*shape[:-1], shape[-1] // block), dtype=torch.uint8, generator=g)
    return QuantizedTensor(fmt, codes, scale, global_scale)


def poisoned(p: Any) -> Any:
    """The same prepared weight with every array followed by 0xFF bytes (a NaN in every scale format)."""

    def embed(t: torch.Tensor) -> torch.Tensor:
        if t.dtype != torch.uint8:
            return t
        room = torch.full((t.numel() + 65536,), 0xFF, dtype=torch.uint8)
        room[: t.numel()] = t.flatten()
        return room[: t.numel()].view(t.shape)

    return replace(p, arrays={n: embed(t) for n, t in p.arrays.items()})


def error(y: torch.Tensor, ref: torch.Tensor) -> float:
    """Relative Frobenius error; infinite when something is not finite."""
    y, ref = y.double(), ref.double()
    return float((y - ref).norm() / ref.norm()) if bool(torch.isfinite(y).all()) else float("inf")


def same(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    pairs = ((getattr(a, n), getattr(b, n)) for n in ("codes", "scale", "global_scale"))
    return all((s is None) == (t is None) and (s is None or torch.equal(s, t)) for s, t in pairs) and a.shape == b.shape


def dense(fmt: str, n: int, k: int, dtype: torch.dtype = torch.bfloat16, g: float | None = None) -> dict[str, Any]:
    w = weight(n + k, fmt, n, k, global_scale=None if g is None else torch.tensor(g))
    p = fp4.prepare(w, "triton_kernels", device=DEVICE, act_dtype=dtype)
    seeded = torch.Generator().manual_seed(n * k)
    x, bias = torch.randn(5, k, generator=seeded).to(dtype), torch.randn(n, generator=seeded)
    y = fp4.matmul(x, poisoned(p), bias)
    return {"error": error(y, fp4.matmul(x, fp4.prepare(w, "reference"), bias)), "restored": same(p.restore(), w)}


def layer(
    fmt: str, hidden: int, inter: int, order: str | None, act: Any, local: Any = None, scales: Any = None, slots: int = 3, bias: bool = True
) -> dict[str, Any]:
    experts, rows = 5, inter * (2 if order else 1)
    s13, s2 = scales or (None, None)
    w2 = weight(2, fmt, experts, hidden, inter, global_scale=s2)
    if isinstance(s13, tuple):
        w13: Any = tuple(weight(10 + i, fmt, experts, inter, hidden, global_scale=s) for i, s in enumerate(s13))
    else:
        w13 = weight(1, fmt, experts, rows, hidden, global_scale=s13)
    g = torch.Generator().manual_seed(3)
    b13 = (torch.arange(experts * rows).view(experts, rows) % 17 / 8 - 1).bfloat16() if bias else None
    b2 = torch.randn(experts, hidden, generator=g) if bias else None
    kw = {"gate_up": None if isinstance(w13, tuple) else order, "bias13": b13, "bias2": b2, "activation": act, "local_experts": local}
    p = fp4.prepare_moe(w13, w2, backend="triton_kernels", device=DEVICE, **kw)
    ref = fp4.prepare_moe(w13, w2, backend="reference", **kw)
    x = torch.randn(9, hidden, generator=g).bfloat16() * 2
    ids = torch.stack([torch.randperm(experts - 1, generator=g)[:slots] for _ in range(9)])  # the last expert gets no token
    weights = torch.rand(9, slots, generator=g)
    y, want = fp4.moe(x, poisoned(p), ids, weights), fp4.moe(x, ref, ids, weights)
    (a, b), (c, d) = p.restore(), ref.restore()
    parts = zip(a, c, strict=True) if isinstance(a, tuple) else [(a, c)]
    return {"error": error(y, want), "restored": all(same(s, t) for s, t in parts) and same(b, d)}


def strided(shim: Any) -> dict[str, Any]:
    """Weights and scales that are not swizzled, wrapped by us and by the library's own function: the same layout, shape and strides."""
    t, e, n, k = shim.found.tensor, 2, 96, 160
    codes, scale = torch.zeros(e * n * k // 2, dtype=torch.uint8), torch.zeros(e * n * k // 32, dtype=torch.uint8)
    pairs = [
        (shim.weight(codes, e, k, n, False), t.wrap_torch_tensor(codes.view(e, n, k // 2).mT, dtype=t.FP4)),
        (shim.scale(scale, e, k // 32, n, None), t.wrap_torch_tensor(scale.view(e, n, k // 32).mT)),
    ]
    ok = all(
        repr(a.storage.layout) == repr(b.storage.layout)
        and list(a.shape) == list(b.shape)
        and a.storage.data.stride() == b.storage.data.stride()
        for a, b in pairs
    )
    return {"error": 0.0 if ok else float("inf"), "restored": ok}


def cases() -> dict[str, Any]:
    shim = __import__("importlib").import_module("fp4.gpu.backends.triton_kernels")._bound()
    bf16, e5 = torch.bfloat16, torch.tensor([0.5, 2.0, 0.3, 1.5, 0.7])
    oss, silu, situ, relu2 = fp4.SwiGLU(), fp4.SiLU(), fp4.SiTU(), fp4.ReLU2()
    out: dict[str, Any] = {
        "dense 96x160": lambda: dense("mxfp4", 96, 160),
        "dense odd n 48x64": lambda: dense("mxfp4", 48, 64),
        "dense n>256, k%64 264x352": lambda: dense("mxfp4", 264, 352),  # 264: two tiles of 256 scale rows, not one of 264
        "moe halves, padded intermediate": lambda: layer("mxfp4", 96, 96, "gate_up", oss),
        "moe interleaved, local experts": lambda: layer("mxfp4", 64, 96, "interleaved", oss, (1, 3)),
        "moe up_gate, silu, two slots": lambda: layer("mxfp4", 64, 64, "up_gate", silu, slots=2),
        "moe situ without bias": lambda: layer("mxfp4", 64, 64, "gate_up", situ, bias=False),
        "moe relu2, not gated": lambda: layer("mxfp4", 64, 96, None, relu2),
        "dense with a global scale": lambda: dense("mxfp4", 32, 64, bf16, 0.37),
        "dense all zero, with a bias": lambda: dense("mxfp4", 32, 64, bf16, 0.0),
    }
    if not shim.ogs and hasattr(shim.found.tensor, "wrap_torch_tensor"):
        out["strided tensors as the library wraps them"] = lambda: strided(shim)
    if CC != (9, 0):
        out["dense fp16 96x160"] = lambda: dense("mxfp4", 96, 160, torch.float16)
    if shim.nvfp4 and tk_interpreter.DOT_SCALED:
        out["nvfp4 dense 96x160"] = lambda: dense("nvfp4", 96, 160, bf16, 0.37)
        out["nvfp4 moe"] = lambda: layer("nvfp4", 96, 96, "up_gate", oss, None, (torch.tensor(0.3), torch.tensor(1.7)))
    if shim.tensor_scale:
        out["nvfp4 moe, a scale an expert"] = lambda: layer("nvfp4", 96, 64, "gate_up", oss, (1, 5), (e5, e5.flip(0)))
        out["nvfp4 moe, gate and up differ"] = lambda: layer("nvfp4", 64, 96, "gate_up", oss, None, ((e5, e5.flip(0) / 3), e5))
    return out


def main() -> int:
    verdict = registry.probe("triton_kernels")
    usable = bool(verdict) and (CC == (9, 0) or tk_interpreter.DOT_SCALED)
    says = str(verdict) if usable or not verdict else "strided weights use tl.dot_scaled, which this Triton's interpreter does not have"
    print(json.dumps({"case": "probe", "ok": usable, "says": says}))
    if not usable:
        return 1
    bad = 0
    for name, run in cases().items():
        try:
            result = run()
        except Exception as e:
            while e.__cause__ is not None:
                e = e.__cause__  # type: ignore[assignment]
            traceback.print_exception(e, file=sys.stderr)
            result = {"error": float("inf"), "restored": False, "raised": f"{type(e).__name__}: {e}"}
        # dense: the same exact products, added in another order, so that the one rounding may go the other way in a few of 240 or more
        # outputs (2^-8 each: 2.5e-4 for one). moe: the intermediate and each slot are rounded to bf16 (2^-9) on the way
        bad += not (result["restored"] and result["error"] < (6e-3 if "moe" in name else 5e-4))
        print(json.dumps({"case": name, **result}), flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
