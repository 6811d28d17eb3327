"""One call for five generations of triton_kernels. Only what the generations disagree about is here; nothing looks at values.

No scatter index is ever passed: the generations reduce differently, so the second product stays in expert order and we add the
slots ourselves. With ``n_expts_act = 1`` and the token row of each sorted position as gather index, all five then mean the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator
from typing import Any

import torch

from fp4.gpu.backends._triton_kernels_find import Found

__all__ = ["Shim"]

#: they add the linear half's constant themselves: act = gate * sigmoid(alpha * gate) * (up + 1)
SWIGLU_BETA = 1.0


class Shim:
    """Bound to one found package."""

    def __init__(self, found: Found) -> None:
        self.found = found
        self.ogs = found.ogs
        self.nvfp4 = "b_microblock_size" in found.fields
        self.tensor_scale = "b_mx_tensor_scale" in found.fields
        self._entry = getattr(found.matmul, "matmul_ogs" if self.ogs else "matmul")
        fn_specs = found.matmul.FnSpecs
        self._reduction_in_specs = "reduction_n" in {f.name for f in dataclasses.fields(fn_specs)}

    # ---- weights -------------------------------------------------------------------------------------------------------------

    def value_layout(self, shape: tuple[int, ...]) -> Any:
        """Their Hopper value layout object; ``shape``: packed [e, k/2, n]."""
        cls = self.found.layout.HopperMXValueLayout
        return cls(list(shape), mx_axis=1, mma_version=3) if self.ogs else cls(mx_axis=-2, mma_version=3)

    def scale_layout(self, shape: tuple[int, ...], num_warps: int) -> Any:
        """Their Hopper scale layout object; ``shape``: [e, groups, n]."""
        cls = self.found.layout.HopperMXScaleLayout
        return cls(list(shape), mx_axis=1, num_warps=num_warps) if self.ogs else cls(mx_axis=-2, num_warps=num_warps)

    def _wrap(self, data: torch.Tensor, layout: Any, shape: list[int], fp4: bool) -> Any:
        t = self.found.tensor
        if self.ogs:
            storage = t.Storage(data) if layout is None else t.Storage(data, layout)
            return t.Tensor(storage, dtype=t.FP4 if fp4 else data.dtype, shape=shape)
        layout = self.found.layout.StridedLayout(-2) if layout is None else layout
        dtype = t.FP4 if fp4 else t.torch_dtype_to_dtype(data.dtype)
        return t.Tensor(t.Storage(data, layout), dtype=dtype, shape=shape)

    def weight(self, codes: torch.Tensor, e: int, k: int, n: int, swizzled: bool) -> Any:
        """Their weight Tensor, logical [e, k, n], around our stored bytes; columns are contiguous along k."""
        if not swizzled:
            return self._wrap(codes.view(e, n, k // 2).mT, None, [e, k, n], fp4=True)
        width = codes.numel() // e
        layout = self.value_layout((e, k // 2, n))
        rows = self._columns(width, n)
        return self._wrap(codes.view(e, rows, width // rows).mT, layout, [e, k, n], fp4=True)

    def _columns(self, width: int, n: int) -> int:
        """Padded n / 4 of the swizzled storage [4 k2, n / 4], from the padding rule that the self-test read."""
        pad = self.pad_n
        return -(-n // pad) * pad // 4

    #: padding of HOPPER_VALUE in this generation (rows n, bytes k); set by the self-test
    pad_n = 0
    pad_k = 0

    def scale(self, scale: torch.Tensor, e: int, groups: int, n: int, num_warps: int | None) -> Any:
        """Their scale Tensor, logical [e, groups, n]; ``num_warps`` None: strided."""
        if num_warps is None:
            return self._wrap(scale.view(e, n, groups).mT, None, [e, groups, n], fp4=False)
        rows = -(-n // (32 * num_warps)) * num_warps
        layout = self.scale_layout((e, groups, n), num_warps)
        return self._wrap(scale.view(e, rows, -1).mT, layout, [e, groups, n], fp4=False)

    def precision(self, scale: Any, block: int, out_dtype: torch.dtype, tensor_scale: torch.Tensor | None = None) -> Any:
        """Their PrecisionConfig: only the fields that this generation has."""
        m, have = self.found.matmul, self.found.fields
        args = {
            "weight_scale": scale,
            "b_mx_scale": scale,
            "b_microblock_size": block,
            "b_mx_tensor_scale": tensor_scale,
            "flex_ctx": m.FlexCtx(rhs_data=self.found.numerics.InFlexData()),
            "out_dtype": out_dtype,
        }
        return m.PrecisionConfig(**{n: v for n, v in args.items() if n in have})

    def swiglu(self, alpha: float, limit: float | None) -> Any:
        """Their fused SwiGLU over interleaved columns."""
        m = self.found.matmul
        args = ("swiglu", self.found.swiglu.swiglu_fn, ("alpha", "limit"))
        if self._reduction_in_specs:
            return m.FusedActivation(m.FnSpecs(*args, reduction_n=2), (alpha, limit))
        return m.FusedActivation(m.FnSpecs(*args), (alpha, limit), 2)

    # ---- calls ---------------------------------------------------------------------------------------------------------------

    def ragged(self, hist: torch.Tensor, rows: int) -> Any:
        """Block schedule of ``rows`` sorted rows; ``hist`` i32 [experts] may add up to less: the rest is not computed."""
        f = self.found
        if f.routing is not None:
            return f.routing.RoutingData(None, hist, hist.numel(), 1, f.routing.compute_expt_data(hist, hist.numel(), rows))
        meta = f.tensor.make_ragged_tensor_metadata(hist, rows)
        return f.matmul.RoutingData(None, hist, hist.numel(), 1, meta) if self.ogs else meta

    def gather(self, rows: torch.Tensor) -> Any:
        """``rows`` i32: source row of each sorted position."""
        if not self.ogs:
            return rows
        return (self.found.routing or self.found.matmul).GatherIndx(src_indx=rows, dst_indx=rows)

    def call(
        self,
        x: torch.Tensor,
        w: Any,
        bias: torch.Tensor | None,
        precision: Any,
        *,
        ragged: Any = None,
        gather: Any = None,
        gammas: torch.Tensor | None = None,
        activation: Any = None,
        alpha: float | None = None,
    ) -> torch.Tensor:
        """``y [rows, n or n / 2]``: (x @ w + bias) * alpha, activation, * gammas, in float32, then rounded."""
        common = {"precision_config": precision, "gammas": gammas, "out_alpha": alpha, "fused_activation": activation}
        with self._flags():
            if self.ogs:
                y = self._entry(x, w, bias, routing_data=ragged, gather_indx=gather, **common)
            else:
                y = self._entry(x, w, bias, a_ragged_metadata=ragged, gather_indx=gather, **common)
        return y.view(-1, y.shape[-1])  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def _flags(self) -> Iterator[None]:
        """Generation A may split K of a small grid: float32 scratch and one more kernel, slower (vllm#30528). Its constraints are a
        process-wide dict, so they are put back."""
        if self.found.generation != "A":
            yield
            return
        flags: Any = importlib.import_module("triton_kernels.matmul_ogs_details.opt_flags")
        before = flags._opt_flags_constraints
        flags._opt_flags_constraints = {**before, "split_k": 1}
        try:
            yield
        finally:
            flags._opt_flags_constraints = before
