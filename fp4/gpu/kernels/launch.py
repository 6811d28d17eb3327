"""Compile a kernel once for a signature, keep it, and launch it without Triton's per-call specialisation.

Pointers are passed as integers that the caller has checked to be 16-byte aligned. ``Kernel`` holds the compiled object; a launch is
one call into Triton's C launcher (about 3 us of host time against 20 and more through ``fn[grid](...)``).
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

#: arguments that stay ordinary integers; all pointers are 16-byte aligned
_Key = tuple[Any, ...]
#: Triton's type of a pointer to numbers of a dtype
TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
#: device index -> cudaStream_t of the current stream; absent in builds of torch without CUDA
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


@functools.lru_cache(maxsize=1)
def gluon_reason() -> str | None:
    """None when the installed Triton has the Gluon names that our kernels use, else what is missing."""
    try:
        import fp4.gpu.kernels.small_m
        import fp4.gpu.kernels.wide_m
        import fp4.gpu.kernels.ws_m
        import fp4.gpu.kernels.ws_tiles  # noqa: F401
    except (ImportError, AttributeError) as e:
        return f"this Triton's Gluon lacks what the kernels use ({e})"
    return None


class Box:
    """A row-major matrix for TMA, as Triton's launchers want a tensor descriptor: address, rows, columns; zeros outside."""

    padding = "zero"
    round_f32_to_tf32 = False

    def __init__(self, address: int, rows: int, columns: int) -> None:
        self.address, self.shape, self.strides = address, [rows, columns], [columns, 1]

    @property
    def base(self) -> Box:
        return self

    def data_ptr(self) -> int:
        return self.address


def box_type(element: str, rows: int, columns: int) -> str:
    """The Triton type of a ``Box`` of 16-bit elements read in boxes [rows, columns], 128 bytes a row."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 if element.startswith("fp8") else 16, rank=2)
    return f"tensordesc<{element}[{rows}, {columns}],{layout!r}>"


class Kernel:
    """A compiled kernel, bound to nothing: ``kernel(grid, args, stream)``."""

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled
        self.shared = int(compiled.metadata.shared)
        self._ready = False
        self._direct: tuple[Any, tuple[Any, ...]] | None = None
        self._expand: list[Any] | None = None
        self._boxes: dict[tuple[int, int, int, int], tuple[Any, ...]] = {}

    def _bind(self) -> None:
        self._run = self.compiled.run
        self._function = self.compiled.function
        self._packed = self.compiled.packed_metadata
        run = self._run
        scratch = getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1)
        if not scratch and hasattr(run, "launch_pdl") and not hasattr(run, "arg_annotations"):
            # no scratch to allocate and the launcher takes flat arguments: go to it directly
            direct, head = (
                run.launch,
                (self._function, run.launch_cooperative_grid, run.launch_pdl, None, None, self._packed, None, None, None),
            )
            self._direct = direct, head
            self._bind_box(direct, head)
        self._ready = True

    def _bind_box(self, wrapped: Any, head: tuple[Any, ...]) -> None:
        """Go past the wrapper with which Triton encodes a ``Box`` anew on every call (3 us): ``box`` keeps what it makes of one."""
        meta = getattr(self.compiled.metadata, "tensordesc_meta", None) or ()
        inner = inspect.getclosurevars(wrapped).nonlocals.get("launcher") if inspect.isfunction(wrapped) else None
        if meta and None not in meta and callable(inner):
            from triton.backends.nvidia.driver import make_tensordesc_arg

            self._direct = inner, head
            self._expand = [functools.partial(make_tensordesc_arg, metadata=m) for m in meta]

    def box(self, address: int, rows: int, columns: int, which: int = 0) -> tuple[Any, ...]:
        """What stands among the arguments for ``Box`` number ``which``; encodings are kept, workspaces often have the same address."""
        if not self._ready:
            self._bind()
        if self._expand is None:
            return (Box(address, rows, columns),)
        key = (address, rows, columns, which)
        found = self._boxes.get(key)
        if found is None:
            if len(self._boxes) >= 256:
                self._boxes.clear()
            found = self._boxes[key] = tuple(self._expand[which](Box(address, rows, columns)))
        return found

    def __call__(self, gx: int, gy: int, stream: int, *args: Any) -> None:
        if not self._ready:
            self._bind()
        if self._direct is not None:
            direct, head = self._direct
            direct(gx, gy, 1, stream, *head, *args)
        else:
            self._run(gx, gy, 1, stream, self._function, self._packed, None, None, None, *args)


_cache: dict[_Key, Kernel] = {}

_target: Any = None


def compile_only(target: Any) -> None:
    """From now on ``build`` compiles for this GPUTarget and asks no device; what it returns cannot be launched. For warming caches."""
    global _target
    _target = target


def build(
    fn: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    *,
    num_warps: int,
    num_stages: int = 3,
    aligned: tuple[str, ...] = (),
    maxnreg: int | None = None,
    target: Any = None,
    pdl: bool = False,
) -> Kernel:
    """Compile ``fn`` (Triton or Gluon JIT function) for a signature (name -> Triton type) and constexpr values; cached.

    pdl: its blocks may start before the kernel in front of it has ended (``fp4.gpu.kernels.pdl``).
    aligned: integer arguments that are multiples of 16. target: a GPUTarget, default the active device.
    """
    target = target or _target
    device = None if target is not None else torch.cuda.current_device()
    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages}
    if maxnreg is not None:
        options["maxnreg"] = maxnreg
    if pdl:
        options["launch_pdl"] = True
    how = (tuple(options.items()), aligned, device if target is None else target)
    key = (id(fn), tuple(signature.items()), tuple(constants.items()), how)
    found = _cache.get(key)
    if found is None:
        import triton
        from triton.compiler import ASTSource

        if type(fn).__name__ == "GluonJITFunction":
            from triton.experimental.gluon._runtime import GluonASTSource as Source
        else:
            Source = ASTSource
        names = list(fn.arg_names)
        types = {n: signature.get(n, "constexpr") for n in names}
        values = {(names.index(n),): v for n, v in constants.items()}
        attrs = {(names.index(n),): [["tt.divisibility", 16]] for n, t in signature.items() if t.startswith("*") or n in aligned}
        if target is None:
            target = triton.runtime.driver.active.get_current_target()
        compiled = triton.compile(Source(fn, types, values, attrs), target=target, options=options)
        found = _cache[key] = Kernel(compiled)
    return found


#: shared memory of a Hopper multiprocessor, of which every block takes BLOCK_SHARED more than it asks for
SHARED, BLOCK_SHARED = 228 << 10, 1 << 10


def build_ring(fn: Any, signature: dict[str, str], constants: dict[str, Any], *, slot: int, per: int = 1, **how: Any) -> Kernel:
    """``build`` a Hopper kernel with a ring of ``constants["XS"]`` slots of ``slot`` bytes, fewer where they do not fit.

    What else a kernel keeps in shared memory (a wide output's way to another layout) is known once it is compiled: if ``per`` blocks a
    multiprocessor ask for too much, XS is lowered in ``constants`` and the kernel built again. Two slots are left in any case.
    """
    kernel = build(fn, signature, constants, **how)
    over = kernel.shared - (SHARED // per - BLOCK_SHARED)
    if over > 0:
        constants["XS"] = max(2, constants["XS"] + -over // slot)
        kernel = build(fn, signature, constants, **how)
    return kernel


@functools.lru_cache(maxsize=8)
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU (132, as on an H200, where kernels are only compiled)."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 132


def registers(warps: int, blocks: int) -> int | None:
    """Registers a thread so that ``blocks`` blocks of ``warps`` warps fit a multiprocessor; None: no limit for one block."""
    return 65536 // (32 * warps * blocks) // 8 * 8 if blocks > 1 else None


def full_args(fn: Any, signature: dict[str, str], constants: dict[str, Any], values: dict[str, Any]) -> list[Any]:
    """All arguments in order, constexpr placeholders included, as the launcher expects them."""
    return [values[n] if n in signature else constants[n] for n in fn.arg_names]


def constants_in_order(fn: Any, constants: dict[str, Any]) -> tuple[Any, ...]:
    """The constexpr placeholders that follow the run-time arguments of a kernel whose constexprs come last."""
    return tuple(constants[n] for n in fn.arg_names if n in constants)
