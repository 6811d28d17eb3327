"""SGLang's Marlin kernels as a peer, called with plain pointers: no torch build, no SGLang installation, no JIT.

    python benchmarks/marlin.py build --source DIR --include DIR --out FILE

``--source``: ``sglang/kernels/jit`` of an unpacked sglang wheel (checked with 0.5.23); ``--include``: header folders of apache-tvm-ffi
and of its dlpack (headers only). Needs nvcc and a minute on two cores; nothing of SGLang comes into this repository. The result has no
dependency but the driver. ``MARLIN_LIBRARY=FILE`` then makes ``benchmarks/moe_marlin.py`` and ``tests/gpu/test_marlin.py`` use it.

Weights, scales and biases are put in Marlin's storage orders by ``fp4.layouts`` (marlin_w, marlin_mx_sf, marlin_bias) and ``fp4.encode``
alone, so that a right result of the vendor's kernel is also a check of those.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

import fp4
from fp4 import encode
from fp4.tensor import QuantizedTensor

FLAGS = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Xcompiler", "-fPIC"]
#: rows of a block of sorted pairs, and the share of it that must be filled on average: SGLang's rule
BLOCKS, FILL = (8, 16, 32, 48, 64), 0.9


def build(source: Path, include: list[Path], out: Path, arch: str = "90a") -> None:
    """Compile marlin.cu beside a copy of SGLang's sources from which the instantiations of other formats were taken out."""
    with tempfile.TemporaryDirectory() as tmp:
        csrc = Path(tmp) / "csrc"
        for part in ("gemm/marlin", "gemm/marlin_moe"):
            shutil.copytree(source / "csrc" / part, csrc / part)
        (csrc / "moe").mkdir()
        shutil.copy(source / "csrc/moe/topk_sum.cuh", csrc / "moe")
        for file in ("gemm/marlin/gptq_marlin.cuh", "gemm/marlin_moe/moe_wna16_marlin.cuh"):
            text, n = re.subn(r"^ +\w+_GET_IF\(host::k(?!FE2M1f\))\w+\)$", "", (csrc / file).read_text(), flags=re.M)
            if n < 6 or "_GET_IF(host::kFE2M1f)" not in text:
                raise SystemExit(f"marlin: {file} of {source} is not as in sglang 0.5.23")
            (csrc / file).write_text(text)
        code = ["-gencode", f"arch=compute_{arch},code=sm_{arch}", f"-DSGL_CUDA_ARCH={int(arch.rstrip('a')) * 10}"]
        folders = [f"-I{f}" for f in (csrc, source / "include", *include)]
        file, parts = str(Path(__file__).parent / "marlin.cu"), {p: str(Path(tmp) / f"{p}.o") for p in ("MOE", "DENSE")}
        running = [subprocess.Popen(["nvcc", *FLAGS, *code, *folders, f"-D{p}", "-c", file, "-o", o]) for p, o in parts.items()]
        failed = [process.wait() for process in running]
        if any(failed):
            raise SystemExit("marlin: nvcc failed")
        subprocess.run(["nvcc", "-shared", "-Xlinker", "-s,--no-undefined", "-o", str(out), *parts.values()], check=True)


class Weight:
    """[experts, n, k] weights of one product in Marlin's orders; ``n`` and ``k`` are the padded sizes.

    rows, columns: sizes to pad to (rows of each half when ``pairs``). pairs: the rows come gate, up, gate, up; Marlin's activation wants
    halves. weighted: the product also multiplies by routing weights; its NVFP4 kernel folds the global scale into those, bias included,
    so the bias is divided by it here. rule: of ``encode.marlin_nvfp4``.
    """

    def __init__(
        self, q: QuantizedTensor, rows: int, columns: int, *, bias: torch.Tensor | None = None, pairs: bool = False, weighted: bool = False,
        rule: str = "v1", scale_layout: str = "marlin_mx_sf",
    ) -> None:  # fmt: skip
        experts, n, half = q.codes.shape
        self.n, self.k, self.group = (2 * rows if pairs else rows), columns, q.format.block
        down, right = self.n - n, columns - 2 * half

        def stored(layout: str) -> Any:
            return fp4.layouts["gate_up_halves"] >> fp4.layouts[layout] if pairs else fp4.layouts[layout]

        def padded(x: torch.Tensor, per_byte: int, value: int) -> torch.Tensor:
            return torch.nn.functional.pad(x, (0, right // per_byte, 0, down), value=value)

        self.codes = stored("marlin_w").apply(padded(q.codes, 2, 0))
        self.global_scale = None
        if self.group == 16:
            data, factor = encode.marlin_nvfp4(rule)(q.scale)
            given = q.global_scale.float().expand(experts).contiguous()
            self.global_scale = encode.marlin_global_scale(given, factor).bfloat16()
            scale = padded(data, 16, 0)
        else:
            scale = padded(encode.marlin_mxfp4()(q.scale).data, 32, 127)
        self.scale = stored(scale_layout).apply(scale)
        self.bias = None
        if bias is not None:
            b = torch.nn.functional.pad(bias.float(), (0, down))
            if weighted and self.global_scale is not None:
                b = b / self.global_scale.float()[:, None]
            self.bias = stored("marlin_bias").apply_rows(b.bfloat16())


class Route:
    """Pairs sorted by expert, each expert padded to whole blocks with the number of pairs: what SGLang's moe_align_block_size gives."""

    def __init__(self, ids: torch.Tensor, experts: int, block: int | None = None) -> None:
        pairs, self.top_k = ids.numel(), ids.shape[1]
        self.block = block or next((b for b in BLOCKS if pairs / experts / b < FILL), BLOCKS[-1])
        flat = ids.flatten().long()
        count = torch.bincount(flat, minlength=experts)
        blocks = (count + self.block - 1) // self.block
        start = (blocks.cumsum(0) - blocks) * self.block
        order = torch.argsort(flat, stable=True)
        rank = torch.arange(pairs, device=ids.device) - (count.cumsum(0) - count)[flat[order]]
        total = int(blocks.sum()) * self.block
        self.sorted_ids = torch.full((total,), pairs, dtype=torch.int32, device=ids.device)
        self.sorted_ids[start[flat[order]] + rank] = order.int()
        self.expert_ids = torch.repeat_interleave(torch.arange(experts, device=ids.device, dtype=torch.int32), blocks)
        self.counts = torch.tensor([total, 0], dtype=torch.int32, device=ids.device)


def _stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def find() -> Path:
    """The file that MARLIN_LIBRARY names. Raises FileNotFoundError with the reason when there is none."""
    given = os.environ.get("MARLIN_LIBRARY", "")
    if not given or not Path(given).is_file():
        raise FileNotFoundError(f"MARLIN_LIBRARY is {given!r}; need the file that `python benchmarks/marlin.py build` writes")
    return Path(given)


class Library:
    """The compiled kernels on the current device. Work space is shared by all calls: one stream at a time."""

    def __init__(self, path: str | Path) -> None:
        self._lib = ctypes.CDLL(str(path))
        self._lib.marlin_error.restype = ctypes.c_char_p
        self.device = torch.cuda.current_device()
        self._routes: dict[int, Route] = {}
        self.sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.locks = torch.zeros(4 * self.sms, dtype=torch.int32, device="cuda")
        self.partial = torch.empty(4 * self.sms * 64 * 256, dtype=torch.float32, device="cuda")

    def _call(self, name: str, *args: Any) -> None:
        given = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in args]
        if getattr(self._lib, name)(*given):
            raise RuntimeError(f"{name}: {self._lib.marlin_error().decode()}")

    def moe(
        self, x: torch.Tensor, w: Weight, route: Route, *, top_k: int, weights: torch.Tensor | None = None, out: torch.Tensor | None = None,
        atomic_add: bool | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """[m, k] bf16 -> [m * top_k, n] bf16, rows by pair; ``weights`` float32 of all pairs. atomic_add: SGLang's choice when None."""
        m = len(x)
        if x.shape != (m, w.k) or not x.is_contiguous() or x.dtype != torch.bfloat16:
            raise ValueError(f"marlin: x is {x.dtype} {list(x.shape)}; need contiguous bfloat16 [m, {w.k}]")
        out = torch.empty(m * top_k, w.n, dtype=torch.bfloat16, device=x.device) if out is None else out
        atomic_add = w.group == 16 if atomic_add is None else atomic_add
        none = self.partial if weights is None else weights
        self._call(
            "marlin_moe", x, w.codes, out, self.partial, w.bias, w.scale, w.global_scale, route.sorted_ids, route.expert_ids, route.counts,
            none, self.locks, route.block, top_k, int(weights is not None), m, w.n, w.k, w.group, self.device, _stream(), self.sms,
            int(atomic_add),
        )  # fmt: skip
        return out

    def dense(self, x: torch.Tensor, w: Weight, out: torch.Tensor | None = None) -> torch.Tensor:
        """[m, k] -> [m, n] with the one expert of ``w``: NVFP4 by the dense kernel, MXFP4 (which has none in SGLang) by the MoE kernel."""
        out = torch.empty(len(x), w.n, dtype=torch.bfloat16, device=x.device) if out is None else out
        if w.group == 32:
            if len(x) not in self._routes:
                self._routes[len(x)] = Route(torch.zeros(len(x), 1, dtype=torch.int64, device=x.device), 1)
            return self.moe(x, w, self._routes[len(x)], top_k=1, out=out)
        self._call(
            "marlin_dense", x, w.codes, out, self.partial, w.scale, w.global_scale, self.locks, len(x), w.n, w.k, self.device,
            _stream(), self.sms, 0,
        )  # fmt: skip
        return out

    def topk_sum(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """[t, top_k, n] -> [t, n]."""
        self._call("marlin_topk_sum", x, out, x.shape[0], x.shape[1], x.shape[2], _stream())
        return out


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["build"])
    p.add_argument("--source", type=Path, required=True)
    p.add_argument("--include", type=Path, action="append", required=True)
    p.add_argument("--out", type=Path, required=True)
    a = p.parse_args()
    build(a.source, a.include, a.out)


if __name__ == "__main__":
    main()
