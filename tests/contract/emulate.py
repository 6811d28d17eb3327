"""Emulators of FlashInfer's compiled functions, written from its public sources: they decode exactly the buffers they are given.

Each takes the positional arguments of one compiled function, checks what the C++ binding checks, computes in float64 and writes the
output buffer. ``Emulator.exact`` keeps the float64 result, and between the steps of one layer the intermediate is handed on unrounded
(the *scales* around it are applied as the kernels do), so that a comparison needs no tolerance for FP4 noise. Nothing here imports fp4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import spec
import torch

F64 = torch.float64
_LOGITS, _PACKED, _UNPACKED = 0, 1, 2
_SWIGLU, _SWIGLU_BIAS, _RELU2, _SITU = 3, 5, 6, 10


def check(condition: bool, what: str) -> None:
    """A check of the C++ binding."""
    if not condition:
        raise RuntimeError(f"binding: {what}")


def swiglu(gate: torch.Tensor, up: torch.Tensor, alpha: float, beta: float, limit: float) -> torch.Tensor:
    """g = min(gate, L); u = clamp(up, -L, L); g * sigmoid(alpha g) * (u + beta)."""
    g, u = gate.clamp(max=limit), up.clamp(-limit, limit)
    return g * torch.sigmoid(alpha * g) * (u + beta)


def param(t: torch.Tensor | None, e: int, default: float) -> float:
    return default if t is None else float(t[e])


class Emulator:
    """``functions`` is what ``pretend.gpu`` wants; ``exact`` the float64 result of the last GEMM or MoE."""

    def __init__(self, cc: tuple[int, int], sm90: str = "B") -> None:
        self.cc, self.sm90 = cc, sm90
        self.exact = torch.empty(0, dtype=F64)
        #: data_ptr of a buffer -> float64 values it stands for
        self.shadow: dict[int, torch.Tensor] = {}

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        names = [n for n in dir(self) if not n.startswith("_") and n not in ("functions", "exact", "shadow", "cc", "sm90")]
        return {n: getattr(self, n) for n in names}

    def _write(self, out: torch.Tensor, value: torch.Tensor) -> None:
        out.copy_(value.to(out.dtype))
        self.exact = value

    # --- quantisers ------------------------------------------------------------------------------------------------------------------

    def fp4_quantize(
        self, x: Any, gs: Any, out: Any, sf: Any, vec: int, ue8m0: bool, swizzled: bool, is_8x4: bool, inv: bool, *_: Any
    ) -> None:
        check(x.is_contiguous(), "input must be contiguous")
        check(x.ndim >= 2 and x.stride(-2) != 1, "input is column-major")
        check(vec == 16 and not ue8m0, "this back end quantises activations to NVFP4 only")
        check(gs is None or (gs.dtype == torch.float32 and gs.numel() in (1, x.shape[0])), "global scale must be float32")
        check(self.cc[0] >= 10, "the quantiser has no device code below SM100")
        g = torch.ones(1) if gs is None else gs.reshape(-1, 1) if gs.numel() > 1 else gs.reshape(1)
        codes, scale = spec.nvfp4(x.reshape(-1, x.shape[-1]), 1 / g if inv else g)
        out.copy_(spec.pack(codes).view(out.shape))
        spec.put_sf(sf, scale, ("8x4" if is_8x4 else "128x4") if swizzled else "linear")

    def mxfp8_quantize(self, x: Any, out: Any, sf: Any, layout: int, *_: Any) -> None:
        check(x.is_contiguous() and x.shape[-1] % 32 == 0, "k must be a multiple of 32")
        q, scale = spec.mxfp8(x)
        out.view(torch.uint8).copy_(q)
        spec.put_sf(sf, scale, ("128x4", "8x4", "linear")[layout])

    mxfp8_quantize_host = mxfp8_quantize

    def silu_and_mul_scaled_nvfp4_experts_quantize(self, out: Any, sf: Any, x: Any, gs: Any, mask: Any, silu: bool, *_: Any) -> None:
        """Rows >= mask[e] and the padding of the scales are not written."""
        experts = mask.numel()
        check(gs.dtype == torch.float32 and tuple(gs.shape) == (experts,), "one float32 global scale a group")
        check(mask.dtype == torch.int32, "mask must be int32")
        rows = x.view(experts, -1, x.shape[-1])
        full = self.shadow.get(x.data_ptr(), rows.to(F64)).view(rows.shape)
        if silu:  # [gate | up]
            half = rows.shape[-1] // 2
            full = full[..., :half] * torch.sigmoid(full[..., :half]) * full[..., half:]
        codes_out, sf_out = out.view(experts, -1, out.shape[-1]), sf.view(torch.uint8).view(experts, -1)
        kept = torch.full_like(full, float("nan"))
        for e in range(experts):
            m = int(mask[e])
            codes, scale = spec.nvfp4(full[e, :m].float(), gs[e])
            codes_out[e, :m] = spec.pack(codes)
            if m:
                buffer = sf_out[e].clone()
                spec.put_sf(buffer, scale, "128x4")
                sf_out[e].copy_(buffer)
            # silu: the intermediate is handed on unrounded, times its global scale as the codes are
            kept[e, :m] = full[e, :m] * float(gs[e]) if silu else spec.blocks(spec.E2M1[codes], spec.e4m3(scale))
        self.shadow[out.data_ptr()] = kept

    # --- dense -----------------------------------------------------------------------------------------------------------------------

    def _mm(self, a: Any, w: Any, sf_a: Any, sf_w: Any, alpha: Any, out: Any, shuffled: bool = False, small: bool = False) -> None:
        (m, half), n = a.shape, w.shape[0]
        check(w.shape[1] == half and a.is_contiguous() and w.is_contiguous(), "a and b must be k-major")
        check(tuple(out.shape) == (m, n), "out must be [m, n]")
        cols = half // 8
        read = spec.sf_8x4 if small else spec.sf_128x4
        x = spec.blocks(spec.e2m1(a), spec.e4m3(read(sf_a, m, cols)))
        scale = spec.sf_128x4(sf_w, n, cols)
        codes = spec.nibbles(w)
        if shuffled:
            codes, scale = spec.unshuffle(codes), spec.unshuffle(scale)
        y = x @ spec.blocks(spec.E2M1[codes], spec.e4m3(scale)).T
        check(alpha is not None and alpha.dtype == torch.float32 and alpha.numel() == 1, "alpha must be one float32")
        self._write(out, y * float(alpha))

    def fp4_gemm(self, a: Any, w: Any, sf_a: Any, sf_w: Any, alpha: Any, out: Any, *_: Any) -> None:
        check(a.shape[1] % 16 == 0 and w.shape[0] % 32 == 0, "cutlass: k % 32 and n % 32")
        check(sf_a.dtype == torch.uint8 and sf_w.dtype == torch.uint8, "cutlass: scales must be uint8")
        self._mm(a, w, sf_a, sf_w, alpha, out)

    def trtllm_gemm(
        self, kind: Any, out_kind: Any, ws: Any, a: Any, w: Any, sf_a: Any, sf_w: Any, alpha: Any, out: Any, small: bool, *_: Any
    ) -> None:
        check(w.shape[0] % 128 == 0 and out.dtype == torch.bfloat16, "trtllm: n % 128, bf16 out")
        self._mm(a, w, sf_a, sf_w, alpha, out, shuffled=True, small=small)

    def cudnn_fp4_gemm(
        self, a: Any, b: Any, sf_a: Any, sf_b: Any, alpha: Any, dtype: Any, out: Any, block: int, nvfp4: bool, *_: Any
    ) -> None:
        check(block == 16 and nvfp4, "nvfp4 has blocks of 16")
        self._mm(a, b.T, sf_a, sf_b.T, alpha, out)

    def cute_dsl_fp4_gemm(self, *args: Any) -> None:
        check(args[1].shape[1] % 8 == 0, "cute-dsl: n % 8")
        self.cudnn_fp4_gemm(*args)

    # --- cutlass MoE -----------------------------------------------------------------------------------------------------------------

    def run_moe(self, init: tuple[Any, ...], out: Any, x: Any, ids: Any, weights: Any, w1: Any, b1: Any, w2: Any, b2: Any, qs: Any,
                x_sf: Any, alpha: Any, beta: Any, limit: Any, *rest: Any) -> None:  # fmt: skip
        _x_dtype, _w_dtype, o_dtype, _deepseek, w4_group, mxfp8 = init[:6]
        if not isinstance(rest[0], bool):  # clamped_relu2_limit, situ_beta, situ_linear_beta came in between
            check(all(r is None for r in rest[:3]), "no SiTU parameters expected")
            rest = rest[3:]
        swizzled, _tp_size, tp_rank, _ep_size, ep_rank = rest[:5]
        act = next(int(r) for r in rest if isinstance(r, int) and not isinstance(r, bool) and type(r).__name__ == "ActivationType")
        experts, hidden, gated = w2.shape[0], w2.shape[1], act != _RELU2
        k13, k2 = (spec.nibbles(t.view(torch.uint8)).shape[-1] for t in (w1[0], w2[0]))
        check(
            ids.dtype == torch.int32 and weights.dtype == torch.float32 and ids.shape == weights.shape,
            "routing: int32 ids, float32 weights",
        )
        check(w1.shape[1] == (2 * k2 if gated else k2), "fc1 rows must be 2 x the intermediate size (1 x without a gate)")
        check(out.dtype == o_dtype and tuple(out.shape) == (x.shape[0], hidden), "output dtype and shape")
        check((b1 is None) == (b2 is None), "both biases or neither")
        for b, rows in ((b1, w1.shape[1]), (b2, hidden)):
            check(b is None or (b.dtype == o_dtype and tuple(b.shape) == (experts, rows)), "bias dtype and shape")
        for t in (alpha, beta, limit):
            check(t is None or (t.dtype == torch.float32 and tuple(t.shape) == (experts,)), "swiglu parameters: float32 [experts]")
        check(x.shape[0] > 0, "zero tokens crash the kernel")
        decode = self._cutlass_nvfp4 if not (w4_group or mxfp8) else self._cutlass_mxfp8 if mxfp8 else self._cutlass_sm90
        xs, w1s, w2s, mid, scale = decode(x, x_sf, swizzled, w1, w2, qs, k13, k2)
        y = torch.zeros(x.shape[0], hidden, dtype=F64)
        ids = spec.counted(ids, ep_rank * experts, experts, "first")
        for e in range(experts):
            t, j = (ids == e + ep_rank * experts).nonzero(as_tuple=True)
            if not t.numel():
                continue
            h = xs(e, t) @ w1s(e).T * scale[0][e]
            h = h if b1 is None else h + b1[e].to(F64)
            if gated:  # [up; gate]
                up, gate = h.chunk(2, -1)
                h = swiglu(gate, up, param(alpha, e, 1.0), param(beta, e, 0.0), param(limit, e, float("inf")))
            else:
                h = h.clamp(min=0) ** 2
            v = mid(e, h) @ w2s(e).T * scale[1][e]
            v = spec.held(v if b2 is None or tp_rank else v + b2[e].to(F64))
            y.index_add_(0, t, weights[t, j].to(F64).unsqueeze(-1) * v)
        self._write(out, y)

    def _cutlass_nvfp4(self, x: Any, x_sf: Any, swizzled: bool, w1: Any, w2: Any, qs: Any, k13: int, k2: int) -> Any:
        """Six scales."""
        check(self.cc in ((10, 0), (10, 3), (11, 0), (12, 0), (12, 1)), "NVFP4 MoE needs Blackwell")
        check(w1.dtype == torch.int64 and w2.dtype == torch.int64 and len(qs) == 6, "NVFP4: int64 weights, six quant scales")
        gs1, sf1, a1, gs2, sf2, a2 = qs
        experts, rows, hidden = w1.shape[0], w1.shape[1], w2.shape[1]
        for sf, r, k in ((sf1, rows, k13), (sf2, hidden, k2)):
            check(
                sf.dtype == torch.int32 and tuple(sf.shape) == (experts, spec.rp(r), spec.cp(k // 16) // 4), "scales: int32 [e, rows, k/64]"
            )
        for t in (gs1, gs2):
            check(t.dtype == torch.float32 and t.ndim <= 1 and (t.ndim == 0 or t.shape[0] == experts), "activation scale: 0-d or [experts]")
        for t in (a1, a2):
            check(t.dtype == torch.float32 and tuple(t.shape) == (experts,), "alpha: [experts]")
        check(x.dtype in (torch.bfloat16, torch.float16) and x_sf is None, "input is quantised by the kernel")
        each1, each2 = gs1.expand(experts), gs2.expand(experts)

        def xs(e: int, t: torch.Tensor) -> torch.Tensor:
            codes, scale = spec.nvfp4(x[t], each1[e])
            return spec.blocks(spec.E2M1[codes], spec.e4m3(scale))

        dec = self._expert(spec.sf_128x4, spec.e4m3, 16)
        return xs, dec(w1, sf1), dec(w2, sf2), lambda e, h: h * float(each2[e]), (a1.to(F64), a2.to(F64))

    def _cutlass_mxfp8(self, x: Any, x_sf: Any, swizzled: bool, w1: Any, w2: Any, qs: Any, k13: int, k2: int) -> Any:
        """Four scales; e4m3 activations with 128x4 ue8m0 scales."""
        check(self.cc in ((10, 0), (10, 3), (11, 0), (12, 0), (12, 1)), "MXFP8 x MXFP4 needs Blackwell")
        check(
            w1.dtype == torch.int64 and x.dtype == torch.float8_e4m3fn and len(qs) == 4,
            "MXFP8 x MXFP4: int64 weights, e4m3 input, four scales",
        )
        sf1, g1, sf2, g2 = qs
        experts, rows, hidden = w1.shape[0], w1.shape[1], w2.shape[1]
        check(hidden % 128 == 0 and k2 % 128 == 0, "hidden and intermediate must be multiples of 128")
        for sf, r, k in ((sf1, rows, k13), (sf2, hidden, k2)):
            check(
                sf.dtype == torch.int32 and tuple(sf.shape) == (experts, spec.rp(r), spec.cp(k // 32) // 4),
                "scales: int32 [e, rows, k/128]",
            )
        check(x_sf is not None and x_sf.dtype == torch.uint8, "input_sf must be given, uint8")
        read = spec.sf_128x4 if swizzled else lambda f, r, c: f.reshape(r, c)
        dense = spec.blocks(spec.e4m3(x), spec.ue8m0(read(x_sf, x.shape[0], k13 // 32)))
        dec = self._expert(spec.sf_128x4, spec.ue8m0, 32)
        return lambda e, t: dense[t], dec(w1, sf1), dec(w2, sf2), lambda e, h: h, (g1.to(F64), g2.to(F64))

    def _cutlass_sm90(self, x: Any, x_sf: Any, swizzled: bool, w1: Any, w2: Any, qs: Any, k13: int, k2: int) -> Any:
        """Two folded scales, interleaved weights. The kernel checks neither."""
        check(self.cc == (9, 0) and w1.dtype == torch.uint8 and len(qs) == 2, "mixed input: SM90, uint8 weights, two scales")
        check(x.dtype == torch.bfloat16, "mixed input takes bf16")
        check(w1.shape[1] % 64 == 0 and w2.shape[1] % 64 == 0 and k13 % 128 == 0 and k2 % 128 == 0, "rows % 64 and k % 128")
        cache: dict[tuple[int, int], torch.Tensor] = {}

        def dec(w: Any, sf: Any) -> Callable[[int], torch.Tensor]:
            def one(e: int) -> torch.Tensor:
                if (id(w), e) not in cache:
                    n, k = w.shape[1], w.shape[2] * 2
                    scale = spec.ue8m0_shifted(spec.sm90_scales(sf[e], n, k // 32, self.sm90))
                    cache[id(w), e] = spec.blocks(spec.E2M1[spec.sm90_weights(w[e], self.sm90)], scale)
                return cache[id(w), e]

            return one

        ones = torch.ones(w1.shape[0], dtype=F64)
        return lambda e, t: x[t].to(F64), dec(w1, qs[0]), dec(w2, qs[1]), lambda e, h: h, (ones, ones)

    def _expert(self, read: Any, to_value: Any, block: int) -> Any:
        """Decoder of one expert's [n, k] from packed bytes and a stored scale."""

        def dec(w: Any, sf: Any) -> Callable[[int], torch.Tensor]:
            cache: dict[int, torch.Tensor] = {}

            def one(e: int) -> torch.Tensor:
                if e not in cache:
                    codes = spec.nibbles(w[e].view(torch.uint8))
                    cache[e] = spec.blocks(spec.E2M1[codes], to_value(read(sf[e], codes.shape[0], codes.shape[1] // block)))
                return cache[e]

            return one

        return dec

    def interleave_moe_weights_for_sm90_mixed_gemm(self, *_: Any) -> None:
        raise AssertionError("fp4 writes the SM90 order itself; the helper is not called")

    # --- trtllm MoE ------------------------------------------------------------------------------------------------------------------

    def trtllm_fp4_block_scale_moe(self, *args: Any) -> Any:
        """The argument list of any release from 0.6.11 on, brought to the newest order."""
        a = list(args)
        if not isinstance(a[0], int):  # 0.6.11 has no routing mode
            a.insert(0, _LOGITS if a[0] is not None else _PACKED)
        if isinstance(a[13], torch.Tensor) and a[13].dtype == torch.uint8:  # no gemm1_lora_delta before 0.6.18
            a.insert(10, None)
        if next(i for i in range(22, len(a)) if isinstance(a[i], bool)) == 30:  # no num_fused_shared_experts before 0.6.16
            a.insert(23, 0)
        return self._trtllm(*a)

    def _trtllm(self, mode: int, logits: Any, ids: Any, weights: Any, r_bias: Any, x: Any, x_sf: Any, w1: Any, sf1: Any, b1: Any, lora: Any,
                alpha: Any, beta: Any, limit: Any, w2: Any, sf2: Any, b2: Any, s1: Any, s1_gate: Any, s2: Any, per_token: Any,
                num_experts: int, top_k: int, shared: Any, n_group: Any, topk_group: Any, inter: int, offset: int, local: int, scaling: Any,
                method: int, finalize: bool, pdl: Any, act: int, out: Any, *_: Any) -> Any:  # fmt: skip
        """Rows of w13 in (up, gate) pairs, shuffled; biases and the clamp on raw accumulators."""
        check(self.cc in ((10, 0), (10, 3), (10, 7)), "trtllm-gen needs SM100, SM103 or SM107")
        e4m3 = torch.float8_e4m3fn
        check(
            w1.dtype == torch.uint8 and w2.dtype == torch.uint8 and sf1.dtype == e4m3 and sf2.dtype == e4m3, "weights u8, scales e4m3 views"
        )
        check(w1.is_contiguous() and sf1.is_contiguous() and w2.is_contiguous() and sf2.is_contiguous(), "contiguous weights")
        check(w1.shape[:2] == (local, 2 * inter) and w2.shape[0] == local and w2.shape[2] * 2 == inter, "weight shapes")
        hidden = w1.shape[2] * 2
        vec = hidden // sf1.shape[2]
        nvfp4 = x.dtype == torch.uint8
        check(vec == (16 if nvfp4 else 32), "scale vector size")
        check(inter % 128 == 0 and hidden % (256 if nvfp4 else 128) == 0, "hidden and intermediate alignment")
        to_value = spec.e4m3 if nvfp4 else spec.ue8m0
        dense = self._trtllm_input(x, x_sf, hidden, vec)
        scalars = (s1, s1_gate, s2)
        check(all((s is not None) == nvfp4 for s in scalars), "output scalars: NVFP4 only, all three")
        for t in (*scalars, alpha, beta, limit):
            check(t is None or (t.dtype == torch.float32 and tuple(t.shape) == (local,)), "per-expert parameters: float32 [local experts]")
        for b, rows in ((b1, 2 * inter), (b2, hidden)):
            check(b is None or (b.dtype == torch.float32 and tuple(b.shape) == (local, rows)), "biases: float32 [local experts, rows]")
        ids_, weights_ = self._routing(mode, logits, ids, weights, r_bias, top_k, method, num_experts, (n_group, topk_group, scaling))
        ids_ = spec.counted(ids_, offset, local, "last")
        rows_out, index = [], torch.full(ids_.shape, -1, dtype=torch.int32)
        y = torch.zeros(x.shape[0], hidden, dtype=F64)
        for e in range(local):
            t, j = (ids_ == e + offset).nonzero(as_tuple=True)
            if not t.numel():
                continue
            m1 = spec.blocks(spec.E2M1[spec.nibbles(w1[e])], to_value(spec.sf_128x4(sf1[e], 2 * inter, hidden // vec)))
            m2 = spec.blocks(spec.E2M1[spec.nibbles(w2[e])], to_value(spec.sf_128x4(sf2[e], hidden, inter // vec)))
            gate_w, up_w = spec.unpair(spec.unshuffle(m1))
            zero = torch.zeros(2 * inter, dtype=F64), torch.zeros(hidden, dtype=F64)
            gate_b, up_b = spec.unpair(spec.unshuffle(zero[0] if b1 is None else b1[e].to(F64)))
            down, down_b = spec.unshuffle(m2), spec.unshuffle(zero[1] if b2 is None else b2[e].to(F64))
            gate, up = dense[t] @ gate_w.T + gate_b, dense[t] @ up_w.T + up_b  # raw accumulators, the bias added to them
            gate_unit, up_unit = param(s1_gate, e, 1.0), param(s1, e, 1.0)
            big = float("inf") if limit is None else float(limit[e])
            gate, up = gate.clamp(max=big) * gate_unit, up.clamp(-big, big)
            if act == _SITU:  # beta tanh(x0 / beta) * alpha tanh(x1 / alpha) sigmoid(x1): x0 up, x1 gate
                p0, p1 = param(beta, e, 1.0), param(alpha, e, 1.0)
                h = p0 * torch.tanh(up / p0) * p1 * torch.tanh(gate / p1) * torch.sigmoid(gate)
            else:
                check(act == _SWIGLU, "gated activation")
                h = gate * torch.sigmoid(param(alpha, e, 1.0) * gate) * (up + param(beta, e, 0.0))
            v = spec.held((h * up_unit @ down.T + down_b) * param(s2, e, 1.0))
            index[t, j] = torch.arange(len(rows_out), len(rows_out) + len(v), dtype=torch.int32)
            rows_out.extend(v)
            y.index_add_(0, t, weights_[t, j].to(F64).unsqueeze(-1) * v)
        if not finalize:
            gemm2 = torch.stack(rows_out).to(torch.bfloat16)
            self.exact = torch.stack(rows_out)
            return [gemm2, weights, index.reshape(-1)]
        check(out.dtype == torch.bfloat16 and out.shape[0] == x.shape[0] and out.shape[1] <= hidden, "output")
        self._write(out, y[:, : out.shape[1]])
        return []

    def _trtllm_input(self, x: Any, x_sf: Any, hidden: int, vec: int) -> torch.Tensor:
        if x.dtype == torch.bfloat16:
            check(x_sf is None and x.shape[1] == hidden, "bf16 input has no scales")
            return x.to(F64)
        check(x_sf is not None and x_sf.dtype == torch.float8_e4m3fn, "input scales are an e4m3 view")
        check(tuple(x_sf.shape) == (x.shape[0], hidden // vec), "input scales are linear and two-dimensional")
        if x.dtype == torch.uint8:
            return spec.blocks(spec.e2m1(x), spec.e4m3(x_sf))
        check(x.dtype == torch.float8_e4m3fn, "input dtype")
        return spec.blocks(spec.e4m3(x), spec.ue8m0(x_sf))

    def _routing(
        self, mode: int, logits: Any, ids: Any, weights: Any, bias: Any, top_k: int, method: int, experts: int, groups: tuple[Any, ...]
    ) -> Any:
        if int(mode) == _UNPACKED:
            check(ids.dtype == torch.int32 and weights.dtype in (torch.float32, torch.bfloat16), "unpacked routing dtypes")
            return ids, weights
        if int(mode) == _PACKED:
            check(ids.dtype == torch.int32, "packed ids are int32")
            bits = (ids & 0xFFFF).to(torch.int32)
            return ids >> 16, (bits << 16).view(torch.float32)
        check(logits.dtype in (torch.float32, torch.bfloat16) and logits.is_contiguous() and logits.shape[1] == experts, "logits")
        raw = logits.to(F64)
        n_group, topk_group, scaling = groups
        check(method == 2 or (n_group, topk_group, bias) == (None, None, None), "groups and a bias belong to DeepSeekV3")
        if method == 1:  # top-k, then softmax
            value, index = raw.topk(top_k, -1)
            return index, value.softmax(-1)
        if method == 2:  # sigmoid, bias for the choice only, best groups by their two best, weights of the sigmoid
            score = raw.sigmoid()
            choice = score + bias.to(F64)
            best = choice.view(len(raw), n_group, -1).topk(2, -1)[0].sum(-1).topk(topk_group, -1)[1]
            inside = torch.zeros(len(raw), n_group).scatter_(1, best, 1.0).bool().repeat_interleave(experts // n_group, 1)
            index = choice.masked_fill(~inside, float("-inf")).topk(top_k, -1)[1]
            value = score.gather(1, index)
            return index, value / value.sum(-1, keepdim=True) * scaling
        if method == 3:
            check(top_k == 1, "Llama4 routes to one expert")
            value, index = raw.topk(1, -1)
            return index, value.sigmoid()
        check(method in (0, 5), "routing method without an emulator")
        value, index = (raw.softmax(-1) if method == 0 else raw).topk(top_k, -1)
        return index, value

    # --- masked grouped GEMM ---------------------------------------------------------------------------------------------------------

    def masked_gemm(self, shape: dict[str, Any], t: dict[str, Any]) -> None:
        """Rows >= masked_m are not written."""
        names = ("a", "b", "sfa", "sfb", "c", "masked_m", "alpha")
        a, w, sf_a, sf_w, out, mask, alpha = (t[f"{n}_tensor_gpu"] for n in names)
        m, n, k, experts = (shape[x] for x in "mnkl")
        check(shape["sf_vec_size"] == 16 and k % 32 == 0 and n % 8 == 0, "vec 16, k % 32, n % 8")
        check(mask.dtype == torch.int32 and tuple(mask.shape) == (experts,), "masked_m: int32 [experts]")
        check(alpha.dtype == torch.float32 and alpha.numel() == experts, "alpha: float32, one an expert")
        memory = [x.permute(2, 0, 1) for x in (a, w, out)]
        check(all(x.is_contiguous() for x in memory), "expert outermost, k or n innermost in memory")
        codes_a, codes_w, c = memory
        full = torch.full((experts, m, n), float("nan"), dtype=F64)
        known = self.shadow.get(a.data_ptr())
        flat_a, flat_w = (x.view(torch.uint8).as_strided((experts, x.numel() // experts), (x.numel() // experts, 1)) for x in (sf_a, sf_w))
        for e in range(experts):
            rows = int(mask[e])
            decoded = spec.blocks(spec.e2m1(codes_a[e, :rows]), spec.e4m3(spec.sf_128x4(flat_a[e], rows, k // 16)))
            x = decoded if known is None else known.view(experts, m, k)[e, :rows]
            if known is not None and rows:  # the handed-on values are the codes before rounding: FP4 noise apart
                assert (x - decoded).abs().max() <= 0.26 * x.abs().max(), "codes and scales do not hold the activation that was quantised"
            y = x @ spec.blocks(spec.e2m1(codes_w[e]), spec.e4m3(spec.sf_128x4(flat_w[e], n, k // 16))).T * float(alpha.reshape(-1)[e])
            full[e, :rows] = y
            c[e, :rows] = y.to(c.dtype)
        self.shadow[out.data_ptr()] = full
        self.exact = full
