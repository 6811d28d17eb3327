"""``triton_kernels``: the Triton project's grouped matmul on Hopper, through whichever of its five generations is installed.

Weights: MXFP4, swizzled for wgmma on SM90 (bf16 activations only), strided on SM80 to SM89 (bf16 and fp16). NVFP4 where the generation
has it (strided). What must not bite: K is padded to 64 with zero codes and x with zeros,
because three generations compute a wrong tail; scales are padded to four groups of K, because all of them read that far.
Their ``matmul`` costs 0.3 to 1.5 ms of Python a call: small MoE batches are replayed from CUDA graphs of our own, see the replay module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from fp4.errors import Unsupported
from fp4.formats import MXFP4, NVFP4
from fp4.gpu.backends._triton_kernels_check import check
from fp4.gpu.backends._triton_kernels_find import Missing, find
from fp4.gpu.backends._triton_kernels_replay import Replay
from fp4.gpu.backends._triton_kernels_route import combine, route
from fp4.gpu.backends._triton_kernels_shim import SWIGLU_BETA, Shim
from fp4.gpu.device import SM8X, SM90, SM100, SM120
from fp4.gpu.problem import Problem
from fp4.gpu.registry import No, Ok
from fp4.gpu.scale_range import EVERY, outside
from fp4.gpu.storage import Stored, reorder_bias
from fp4.prepared import Packed, Prepared, PreparedMoE, Weights, pack
from fp4.ref import activation as activations

name = "triton_kernels"


#: ue8m0 bytes with which every product code * scale is an fp16 number: 0.5 * 2^-23 is its smallest one, 6 * 2^13 below its largest
_FP16 = (104, 140)


def _warps(n: int) -> int:
    """Warps of the kernel, baked into the scale bytes (SGLang and vLLM use 8). Generation A takes tiles of 128 columns when n <= 128,
    which fit 4 warps only: its kernel asserts BLOCK_N % (32 * warps) == 0."""
    return 4 if _bound().found.generation == "A" and n <= 128 else 8


@functools.lru_cache(maxsize=1)
def _shim() -> Shim | Missing:
    found = find()
    if isinstance(found, Missing):
        return found
    shim = Shim(found)
    differs = check(shim)
    return Missing(f"{found.root}: {differs} has other bytes than this library knows; report the package version") if differs else shim


def _bound() -> Shim:
    shim = _shim()
    assert isinstance(shim, Shim), "probe said Ok"
    return shim


def probe() -> Ok | No:
    shim = _shim()
    return No(shim.reason) if isinstance(shim, Missing) else Ok(note=str(shim.found))


def _swizzled(p: Problem) -> bool:
    return p.format == MXFP4 and p.device.cc in SM90


def assumed(problem: Problem) -> Ok | No:
    """``supports`` as if the newest generation were installed."""
    return _supports(problem, nvfp4=True, tensor_scale=True, generation="D")


def supports(problem: Problem) -> Ok | No:
    shim = _shim()
    if isinstance(shim, Missing):
        return No(shim.reason)
    return _supports(problem, shim.nvfp4, shim.tensor_scale, shim.found.generation)


def _supports(p: Problem, nvfp4: bool, tensor_scale: bool, generation: str) -> Ok | No:
    if p.device.kind != "cuda" or p.device.cc is None:
        return No(f"needs an NVIDIA GPU, this is {p.device}")
    if p.device.cc in SM120:
        return No(f"{p.device}: its tiles do not fit the shared memory of SM120 and ptxas refuses its scatter (triton#7942); use 'triton'")
    if p.device.cc in SM100:
        return No(f"{p.device}: its Blackwell path was never run by this library; use 'flashinfer' or 'triton'")
    if p.device.cc not in SM90 | SM8X:
        return No(f"{p.device} is not in its list: SM80, SM86, SM87, SM89, SM90")
    if p.act not in ("any", "keep"):
        return No(f"keeps activations in 16 bit; act={p.act!r} is for other backends")
    if p.format not in (MXFP4, NVFP4):
        return No(f"takes MXFP4 and NVFP4, not {p.format}")
    if p.format == NVFP4 and not nvfp4:
        return No(f"generation {generation} has no NVFP4; generation C or D (triton >= 3.8) has")
    allowed = (torch.bfloat16,) if _swizzled(p) else (torch.bfloat16, torch.float16)
    if p.act_dtype not in allowed:
        return No(f"on {p.device} x must be {' or '.join(str(d).removeprefix('torch.') for d in allowed)}, got {p.act_dtype}")
    if p.global_scales in ("expert", "gate_up", "gate_up_foldable") and not tensor_scale:
        return No(f"generation {generation} takes no per-expert global scale; generation D does")
    for what, size in (("k", p.k), ("hidden", p.hidden), ("intermediate", p.intermediate)):
        if size is not None and size % p.format.block:
            return No(f"{what} = {size} is not a multiple of the block {p.format.block}")
    if not _swizzled(p):
        return Ok(60, "strided, spills registers")
    if p.op == "matmul":
        return Ok(32, "swizzled for wgmma; after our tuned kernel, which needs no Python a call")
    return Ok(15, "swizzled for wgmma, fused activation") if _fused(p.activation) else Ok(35, "swizzled for wgmma, activation not fused")


def exact_scale_range(problem: Problem) -> tuple[int, int]:
    """Its kernels shift a ue8m0 byte into a bf16 exponent: 0 becomes 0.0 and 255 infinity, neither of which the format says. fp16 x has
    a narrower range, ``_FP16``, which ``prepare`` looks at."""
    return {NVFP4: (0x00, 0x7E), MXFP4: (0x01, 0xFE)}.get(problem.format, EVERY)


def _fused(act: Any) -> bool:
    return act is None or (isinstance(act, activations.SwiGLU) and act.beta == SWIGLU_BETA)


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


def layouts(problem: Problem) -> dict[str, Stored]:
    p = problem
    if p.op == "matmul":
        return {part: _stored(p, part, int(p.n or 0), int(p.k or 0), None) for part in ("codes", "scale")}
    inter, hidden = _up(int(p.intermediate or 0), 64), int(p.hidden or 0)
    gated = p.gate_up is not None
    rows, order = (2 * inter, "interleaved") if gated else (inter, None)
    return {
        **{f"w13.{part}": _stored(p, part, rows, hidden, order) for part in ("codes", "scale")},
        **{f"w2.{part}": _stored(p, part, hidden, inter, None) for part in ("codes", "scale")},
    }


def _stored(p: Problem, part: str, n: int, k: int, order: str | None) -> Stored:
    k = _up(k, 64)
    cols = k // 2 if part == "codes" else _up(k // p.format.block, 4)
    layout = "plain"
    if _swizzled(p):
        shim = _bound()
        value = f"hopper_value_v3(pad_n={shim.pad_n},pad_k={shim.pad_k})"
        layout = value if part == "codes" else f"hopper_sf(num_warps={_warps(n)},pad_k=4)"
    return Stored(layout, order=order, shape=(n, cols))


def prepare(problem: Problem, weights: Weights) -> Packed:
    p, shim = problem, _bound()
    wants = layouts(p)
    arrays = pack(p, weights, wants)
    if p.op == "moe":
        inter = _up(int(p.intermediate or 0), 64)
        for label, bias, order in (("bias13", weights.bias13, p.gate_up), ("bias2", weights.bias2, None)):
            if bias is not None:
                b = bias.to(weights.device)
                b = reorder_bias(b, order, "interleaved") if order else b
                pad = (2 * inter if order else inter) - b.shape[1] if label == "bias13" else 0
                arrays[f"triton_kernels.{label}"] = F.pad(b.float(), (0, pad)).contiguous()
    return Packed(arrays, wants, {"triton_kernels": f"generation {shim.found.generation}"}, act_dtypes=_act_dtypes(p, weights))


def _act_dtypes(p: Problem, weights: Weights) -> tuple[torch.dtype, ...] | None:
    """bf16 x alone where MXFP4 scales are too large or small for fp16 products. Raises Unsupported when fp16 was asked for."""
    if p.format != MXFP4 or _swizzled(p) or all(outside(q, _FP16) is None for q in weights.named().values()):
        return None
    if p.act_dtype == torch.float16:
        why = f"MXFP4 scale bytes outside {_FP16[0]}..{_FP16[1]} leave the range of float16; use bfloat16 x, or backend='triton'"
        raise Unsupported("prepare: scales do not fit the activations", {name: why})
    return (torch.bfloat16,)


class _Weight:
    """One weight as their objects, bound once; ``alpha`` is a global scale that the generation cannot take as a tensor."""

    def __init__(self, p: Prepared | PreparedMoE, prefix: str, experts: int, n: int, k: int, order: bool) -> None:
        shim, fmt = _bound(), p.problem.format
        swizzled = _swizzled(p.problem)
        self.k, self.k_padded, self.n = k, _up(k, 64), n
        groups = _up(self.k_padded // fmt.block, 4)
        scale = p.arrays[prefix + "scale"]
        if fmt == NVFP4:
            scale = scale.view(torch.float8_e4m3fn)
        self.w = shim.weight(p.arrays[prefix + "codes"], experts, self.k_padded, n, swizzled)
        self.scale = shim.scale(scale, experts, groups, n, _warps(n) if swizzled else None)
        self.block = fmt.block
        self.alpha: float | None = None
        self.columns: torch.Tensor | None = None
        second = p.arrays.get(prefix + "global_scale")
        if second is not None and shim.tensor_scale:
            per = second.reshape(-1, second.shape[1] if second.ndim == 2 else 1).expand(experts, -1)
            self.columns = per.repeat(1, n // per.shape[1]).contiguous() if order or per.shape[1] == 1 else per
        elif second is not None:
            # 0 is an all-zero tensor: the bias cannot be divided by it, and products (below 2^40) vanish beside 2^-80
            self.alpha = float(second) or 2.0**-80
        self._precision: dict[torch.dtype, Any] = {}

    def precision(self, out_dtype: torch.dtype) -> Any:
        config = self._precision.get(out_dtype)
        if config is None:
            config = self._precision[out_dtype] = _bound().precision(self.scale, self.block, out_dtype, self.columns)
        return config

    def bias(self, b: torch.Tensor | None) -> torch.Tensor | None:
        """f32 [experts, n]; their epilogue multiplies by alpha after the bias, so it is divided out here."""
        if b is None:
            return None
        b = b.float().reshape(-1, b.shape[-1])
        return b if self.alpha is None else b / self.alpha

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.k == self.k_padded else F.pad(x, (0, self.k_padded - self.k))


def run(prepared: Prepared | PreparedMoE) -> Callable[..., torch.Tensor]:
    return _run_moe(prepared) if isinstance(prepared, PreparedMoE) else _run_matmul(prepared)


def _run_matmul(prepared: Prepared) -> Callable[..., torch.Tensor]:
    shim = _bound()
    n, k = prepared.shape
    w = _Weight(prepared, "", 1, n, k, order=False)

    def call(x: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
        return shim.call(w.pad(x), w.w, w.bias(bias), w.precision(out_dtype), alpha=w.alpha)

    return call


def _run_moe(prepared: PreparedMoE) -> Callable[..., torch.Tensor]:
    shim, p = _bound(), prepared.problem
    experts, hidden, inter = prepared.shape
    start, stop = p.local or (0, experts)
    padded = _up(inter, 64)
    gated = p.gate_up is not None
    w13 = _Weight(prepared, "w13.", experts, padded * (2 if gated else 1), hidden, order=gated)
    w2 = _Weight(prepared, "w2.", experts, hidden, padded, order=False)
    bias13 = w13.bias(prepared.arrays.get("triton_kernels.bias13"))
    bias2 = w2.bias(prepared.arrays.get("triton_kernels.bias2"))
    act = p.activation
    fused = shim.swiglu(act.alpha, act.limit) if gated and _fused(act) else None
    half = p.act_dtype

    def call(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        slots = ids.shape[1]
        r = route(ids, weights, start, stop)
        ragged, gather = shim.ragged(r.hist, r.token.numel()), shim.gather(r.token)
        first = half if fused is not None else torch.float32
        h = shim.call(
            w13.pad(x), w13.w, bias13, w13.precision(first), ragged=ragged, gather=gather, activation=fused, alpha=w13.alpha
        )  # fmt: skip
        if fused is None:
            h = activations.apply(act, h, "interleaved" if gated else None).to(half)
        y = shim.call(h, w2.w, bias2, w2.precision(half), ragged=ragged, gammas=r.weight, alpha=w2.alpha)
        return combine(y, r, slots, out_dtype)

    return Replay(call)


def warmup(prepared: Prepared | PreparedMoE, m_max: int) -> bool:
    """Two calls a size where small batches are replayed: one compiles, one captures. False: the general warm-up is enough."""
    call = prepared.bind()
    if not isinstance(call, Replay):
        return False
    p, device = prepared.problem, prepared.device
    slots, experts = p.topk or 4, int(p.experts or 1)
    for m in sorted({*(1 << i for i in range(m_max.bit_length())), m_max}):
        x = torch.zeros((m, int(p.hidden or 0)), dtype=p.act_dtype, device=device)
        ids = (torch.arange(m * slots, device=device, dtype=torch.int32) % experts).view(m, slots)
        for _ in range(2):
            call(x, ids, torch.ones((m, slots), device=device), p.act_dtype)
    return True
