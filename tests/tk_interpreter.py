"""Run triton_kernels' own kernels on a CPU: Triton's interpreter, a stand-in device, and their kernel specialiser taught about both.

Import this before triton (it sets TRITON_INTERPRET). ``install(cc)`` makes torch and Triton report a device of that capability.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import importlib
import inspect
import itertools
import linecache
import operator
import re
import textwrap
import types
from typing import Any

import tk_ptx as ptx
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, interpreter
from triton.runtime.interpreter import TensorHandle

#: whether this Triton's interpreter has tl.dot_scaled (3.6 does not)
DOT_SCALED = hasattr(interpreter, "_dot_scaled_scale_to_f32")
_launch: dict[str, int] = {}
_count = itertools.count()


class _Driver:
    """What triton_kernels asks of the active driver."""

    def __init__(self, cc: tuple[int, int]) -> None:
        self.target = GPUTarget("cuda", cc[0] * 10 + cc[1], 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cuda


def install(cc: tuple[int, int] = (9, 0)) -> None:
    driver.set_active(_Driver(cc))
    facts = types.SimpleNamespace(multi_processor_count=4, shared_memory_per_block_optin=232448, major=cc[0], minor=cc[1], name="stand-in")
    torch.cuda.get_device_capability = lambda device=None: cc
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda device=None: facts
    _teach_bf16()
    tl.inline_asm_elementwise = tl.core.inline_asm_elementwise = ptx.inline_asm_elementwise
    tl.extra.cuda.num_warps = lambda **_: _launch["num_warps"]
    tl.constexpr.__rmod__ = lambda self, other: other % self.value
    try:
        module = importlib.import_module("triton_kernels.specialize")
    except ImportError:
        return
    module.specialize = _specialize
    for name in ("matmul_ogs", "matmul", "reduce"):
        try:
            user = importlib.import_module(f"triton_kernels.{name}")
        except ImportError:
            continue
        if hasattr(user, "specialize") and callable(user.specialize):
            user.specialize = _specialize


def _teach_bf16() -> None:
    """The interpreter keeps bfloat16 as raw uint16 and multiplies those; and it truncates where hardware rounds to nearest even."""
    builder = interpreter.InterpreterBuilder
    plain_op, plain_dot = builder.binary_op, builder.create_dot

    def wide(t: Any) -> Any:
        return TensorHandle(ptx.to_float(t.data), tl.float32) if t.dtype.scalar == tl.bfloat16 else t

    def narrow(data: Any) -> Any:
        return TensorHandle(ptx.round_bf16(data).astype("uint16"), tl.bfloat16)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.dtype.scalar == tl.bfloat16 and rhs.dtype.scalar == tl.bfloat16:
            return narrow(op(wide(lhs).data, wide(rhs).data))
        return plain_op(self, lhs, rhs, op)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        return plain_dot(self, wide(a), wide(b), d, *rest)

    def rounding(plain: Any) -> Any:
        def cast(self: Any, src: Any, dst_type: Any, *rest: Any) -> Any:
            if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
                return narrow(src.data)
            return plain(self, src, dst_type, *rest)

        return cast

    plain_scale = getattr(interpreter, "_dot_scaled_scale_to_f32", None)

    def scale_to_f32(handle: Any, *rest: Any) -> Any:
        """dot_scaled reads every scale as ue8m0 there; e4m3 scales are numbers."""
        if handle.dtype.scalar == tl.float8e4nv:
            return torch.from_numpy(handle.data.copy()).view(torch.float8_e4m3fn).float().numpy()
        return plain_scale(handle, *rest)

    if plain_scale is not None:
        interpreter._dot_scaled_scale_to_f32 = scale_to_f32
    builder.binary_op, builder.create_dot = binary_op, create_dot
    builder.create_fp_to_fp, builder.create_fp_trunc = rounding(builder.create_fp_to_fp), rounding(builder.create_fp_trunc)
    builder.create_fmul = lambda self, lhs, rhs: self.binary_op(lhs, rhs, operator.mul)
    builder.create_fadd = lambda self, lhs, rhs: self.binary_op(lhs, rhs, operator.add)
    builder.create_fsub = lambda self, lhs, rhs: self.binary_op(lhs, rhs, operator.sub)


def _specialize(
    fn: Any, module: Any, constants: dict[str, Any], tuples: dict[str, Any], name: Any = None, do_not_specialize: Any = ()
) -> Any:
    """Their ``specialize`` for an interpreted function: constants and tuple arguments are written into a new source."""
    source = textwrap.dedent(inspect.getsource(fn.fn))
    head = re.search(r"def (\w+)\((.*?)\)\s*:[ \t]*(#[^\n]*)?\n", source, re.S)
    assert head is not None, "a kernel has a header"
    text = re.sub(r"#[^\n]*", "", head.group(2))
    arguments: list[str] = []
    for argument in (a.strip() for a in text.split(",")):
        key = argument.split(":")[0].split("=")[0].strip()
        if argument and key not in constants:
            arguments += list(tuples.get(key, [argument]))
    lines = [f"    {key} = {value.__name__ if callable(value) else value}" for key, value in constants.items()]
    lines += [f"    {key} = ({''.join(v + ',' for v in values)})" for key, values in tuples.items()]
    new = f"@triton.jit\ndef {head.group(1)}({', '.join(arguments)}):\n" + "\n".join(lines) + "\n" + source[head.end() :]
    new = re.sub(r"(\b\w+)\.to\(\s*index_type\s*\)", r"_to(\1, index_type)", new)  # a plain int is a tensor only when compiled
    filename = f"<specialised {head.group(1)} {next(_count)}>"
    linecache.cache[filename] = (len(new), None, new.splitlines(True), filename)
    scope = dict(fn.fn.__globals__)
    scope.update({v.__name__: v for v in constants.values() if hasattr(v, "fn")})
    scope |= {"triton": triton, "_to": lambda value, dtype: value.to(dtype) if hasattr(value, "to") else value}
    exec(compile(new, filename, "exec"), scope)
    return _Unwrapping(scope[head.group(1)])


class _Unwrapping:
    """A kernel that takes triton_kernels' Tensor where a torch tensor is meant: the interpreter wants the latter."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn

    def __getitem__(self, grid: Any) -> Any:
        def plain(a: Any) -> Any:
            storage = getattr(a, "storage", None)
            return storage.data if storage is not None and not isinstance(a, torch.Tensor) and hasattr(storage, "data") else a

        def launch(*args: Any, **kwargs: Any) -> Any:
            _launch["num_warps"] = kwargs.get("num_warps", 4)
            return self.fn[grid](*map(plain, args), **kwargs)

        return launch
