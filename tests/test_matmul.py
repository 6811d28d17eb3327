"""Products with a quantised weight: torch reference and plain Triton kernel against float64 values decoded by ml_dtypes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layer_cases import exact_weight, random_weight, relative

import fp4
from fp4.ref import matmul as ref
from fp4.ref import triton_matmul as plain

FORMATS = ("nvfp4", "mxfp4", "nvfp4_b32", "amdfp4")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: fp32 sums of k <= 512 exact products: k rounding errors of 2^-24 at most, far fewer on average
FP32 = 2e-6


def _plain(x: torch.Tensor, q: fp4.QuantizedTensor, bias: torch.Tensor | None = None, **kw: object) -> torch.Tensor:
    bias = None if bias is None else bias.to(DEVICE)
    return plain.matmul(x.to(DEVICE), q.to(DEVICE), bias, **kw).cpu()  # type: ignore[arg-type]


@pytest.mark.parametrize("fmt", FORMATS)
def test_decoded_weight_is_exact(fmt: str) -> None:
    q = random_weight(0, fmt, 3, 20, 96)
    np.testing.assert_array_equal(ref.weight(q, torch.float64).numpy(), exact_weight(q))
    np.testing.assert_allclose(ref.weight(q).numpy(), exact_weight(q), rtol=2**-23)


@given(
    seed=st.integers(0, 2**32 - 1),
    fmt=st.sampled_from(FORMATS),
    dtype=st.sampled_from(FLOATS),
    m=st.integers(0, 40),
    n=st.integers(1, 80),
    blocks=st.integers(1, 6),
    bias=st.booleans(),
)
def test_reference_and_kernel(seed: int, fmt: str, dtype: torch.dtype, m: int, n: int, blocks: int, bias: bool) -> None:
    q = random_weight(seed, fmt, n, blocks * fp4.formats.get(fmt).block)
    torch.manual_seed(seed)
    x = torch.randn(m, q.k).to(dtype)
    b = torch.randn(n) if bias else None
    exact = x.double().numpy() @ exact_weight(q).T + (0 if b is None else b.double().numpy())
    assert relative(ref.matmul(x, q, b, torch.float64, torch.float64), exact) < 1e-14
    assert relative(ref.matmul(x, q, b, torch.float32), exact) < FP32
    assert relative(_plain(x, q, b, out_dtype=torch.float32), exact) < FP32


@pytest.mark.parametrize("fmt", FORMATS)
def test_kernel_decodes_every_scale_byte(fmt: str) -> None:
    """Row i has scale byte i and the code of 0.5, then of -6: each output is one decoded product, NaN bytes included."""
    f = fp4.formats.get(fmt)
    for code, value in ((0x10, 0.5), (0xF0, -6.0)):
        codes = torch.zeros(256, f.block // 2, dtype=torch.uint8)
        codes[:, 1] = code  # element 3
        q = fp4.QuantizedTensor(format=f, codes=codes, scale=torch.arange(256, dtype=torch.uint8).reshape(256, 1))
        x = torch.zeros(1, f.block)
        x[0, 3] = 1.0
        got = _plain(x, q)[0].numpy()
        with np.errstate(over="ignore"):
            want = (f.scale.values * np.float32(value)).astype(np.float32)
        np.testing.assert_array_equal(got, want)


def test_kernel_decodes_every_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8).reshape(256, 1).repeat(1, 8)
    q = fp4.QuantizedTensor(format="nvfp4", codes=codes, scale=torch.full((256, 1), 0x38, dtype=torch.uint8))
    for column, shift in ((0, 0), (1, 4), (14, 0), (15, 4)):
        x = torch.zeros(1, 16)
        x[0, column] = 1.0
        want = fp4.formats.E2M1.values[(np.arange(256) >> shift) & 15]
        np.testing.assert_array_equal(_plain(x, q)[0].numpy(), want)
        np.testing.assert_array_equal(ref.matmul(x, q)[0].numpy(), want)


def test_strided_and_batched_input() -> None:
    q = random_weight(1, "nvfp4", 24, 64)
    wide = torch.randn(2, 3, 128)
    x = wide[..., ::2]
    exact = x.double().numpy() @ exact_weight(q).T
    assert ref.matmul(x, q).shape == (2, 3, 24)
    assert relative(ref.matmul(x, q), exact) < FP32
    assert relative(_plain(x, q), exact) < FP32
    assert relative(_plain(wide[0].T.contiguous().T[:, ::2], q), exact[0]) < FP32


def test_one_rounding_to_the_output_type() -> None:
    q = random_weight(2, "mxfp4", 16, 64)
    x = torch.randn(4, 64).bfloat16()
    for product in (ref.matmul, _plain):
        wide = product(x, q, out_dtype=torch.float32)
        assert product(x, q).dtype == torch.bfloat16
        assert torch.equal(product(x, q), wide.bfloat16())


def test_zero_rows_and_zero_scale() -> None:
    q = random_weight(3, "nvfp4", 8, 32)
    for product in (ref.matmul, _plain):
        assert product(torch.zeros(0, 32), q).shape == (0, 8)
        assert product(torch.zeros(2, 0, 32), q).shape == (2, 0, 8)
    dead = replace(q, scale=torch.zeros_like(q.scale))
    bias = torch.arange(8.0)
    assert torch.equal(ref.matmul(torch.randn(3, 32), dead, bias), bias.expand(3, 8))


@pytest.mark.parametrize("fault", ["nibbles", "scales", "global"])
def test_faults_are_far_outside_the_tolerance(fault: str) -> None:
    q = random_weight(4, "nvfp4", 32, 128)
    wrong = {
        "nibbles": lambda: replace(q, codes=(q.codes >> 4) | (q.codes << 4)),
        "scales": lambda: replace(q, scale=q.scale.roll(1, -1)),
        "global": lambda: replace(q, global_scale=1 / q.global_scale),
    }[fault]()
    x = torch.randn(5, 128)
    exact = x.double().numpy() @ exact_weight(q).T
    for product in (ref.matmul, _plain):
        assert relative(product(x, q), exact) < FP32
        assert relative(product(x, wrong), exact) > 0.05


def test_bad_input_is_one_sentence() -> None:
    q = random_weight(5, "nvfp4", 8, 32)
    x = torch.randn(2, 32)
    cases = [
        ((torch.randn(2, 48), q), "x has shape \\[2, 48\\]; the weight needs \\[\\.\\.\\., 32\\]"),
        ((x.int(), q), "x is torch.int32"),
        ((x, q, torch.randn(9)), "bias is torch.float32 \\[9\\]; need floating point \\[8\\]"),
        ((x, random_weight(5, "nvfp4", 2, 8, 32)), "need \\[n, k\\]"),
    ]
    for arguments, message in cases:
        for product in (ref.matmul, plain.matmul):
            with pytest.raises(fp4.FormatMismatch, match=message):
                product(*arguments)
    with pytest.raises(fp4.FormatMismatch, match=r"acc is torch\.bfloat16"):
        ref.matmul(x, q, acc=torch.bfloat16)
    mx8 = fp4.QuantizedTensor(format="mxfp8", codes=torch.zeros(2, 32, dtype=torch.uint8), scale=torch.zeros(2, 1, dtype=torch.uint8))
    with pytest.raises(fp4.FormatMismatch, match="the weight is mxfp8"):
        plain.matmul(x, mx8)


COMPILE = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fp4.ref.triton_matmul import _product as kernel
POINTERS = dict(codes="*u8", scale="*u8", global_scale="*fp32", bias="*fp32", y="*fp32", order="*i32", tile_expert="*i32",
                tile_row="*i32", segment_end="*i32")
def build(arch, x, dot, scale, block, grouped):
    const = dict(GROUPED=grouped, GATHER=4 * grouped, SCATTER=grouped, HAS_BIAS=True, SCALE=scale, BLOCK=block, DOT=dot)
    const |= dict(BM=16, BN=64, BB=32)
    names = kernel.arg_names
    signature = {n: "*" + x if n == "x" else POINTERS.get(n) or ("constexpr" if n in const else "i32") for n in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs={(names.index(n),): v for n, v in const.items()})
    return len(triton.compile(source, target=GPUTarget("cuda", arch, 32)).asm["cubin"])
for arch in (80, 89, 90, 100, 120):
    print(arch, build(arch, "bf16", tl.bfloat16, "e4m3", 16, True), build(arch, "fp16", tl.float32, "ue8m0", 32, False))
"""


def test_compiles_for_every_generation(tmp_path: object) -> None:
    """SM80 to SM120 down to machine code, on this machine, whatever GPU it has."""
    import os

    # compile for real: the interpreter must be off when the kernel is decorated
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, timeout=280, check=False, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    sizes = [line.split() for line in done.stdout.splitlines()]
    assert [s[0] for s in sizes] == ["80", "89", "90", "100", "120"]
    assert all(int(n) > 1000 for s in sizes for n in s[1:])
