"""quantize, dequantize, fake_quantize as operations: stored layouts, torch.library, compile, gradients, every 16-bit value, memory."""

from __future__ import annotations

import dataclasses
import itertools
import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantize_cases import DEVICE, DTYPES, FORMATS, both, gen, randn, tie_aimed
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fp4
from fp4.errors import FormatMismatch, LayoutError, LayoutMismatch
from fp4.formats import Format
from fp4.recipe import CHOICES, Recipe
from fp4.ref import pace
from fp4.ref import quantize as ref
from fp4.ref import triton_quantize as golden
from fp4.ref.scales import default_global_scale
from fp4.ref.triton_amax import finite_amax, global_scale
from fp4.testing import assert_same_bytes

# 1 / 0 is meant (an underflowed scale); numpy, which runs the interpreter, warns of it
pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow):RuntimeWarning")


# ---- layouts ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["plain", "sf_128x4", "sf_8x4", "cdna4_sf", "sm90_mixed_sf", "deepgemm_sf", "up_gate_pairs"])
@pytest.mark.parametrize("shape", [(128, 256), (2, 96, 128), (130, 96), (3, 7, 4112), (1, 2064), (2, 250, 1008)])
def test_scales_written_straight_into_a_layout(layout: str, shape: tuple[int, ...]) -> None:
    """The kernel's own stores, torch's apply and the restored tensor agree; padding is the layout's fill.

    Blocks go in the order of rows or in that of the stored scales (``STORED_BYTES``): both are compared.
    """
    fmt, x = fp4.NVFP4, randn(*shape, seed=5)
    plain, order = fp4.quantize(x, fmt), fp4.layouts[layout]
    try:
        want = order.apply(plain.scale)
    except LayoutError:
        for run in (
            lambda: fp4.quantize(x, fmt, scale_layout=layout),
            lambda: golden.quantize_blocks(x, fmt, Recipe(), scale_layout=order),
        ):
            with pytest.raises(LayoutError):
                run()
        return
    q = fp4.quantize(x, fmt, scale_layout=layout)
    assert_same_bytes(q.scale.data, want)
    assert_same_bytes(q.restore().scale, plain.scale)
    g, gs = (t.to(DEVICE) for t in ref.resolve_global_scale(x, fmt, Recipe(), None, None, False))
    filled = dataclasses.replace(order, fill=0xA5)
    for in_stored_order in (math.inf, golden.STORED_BYTES, 0):
        with pytest.MonkeyPatch.context() as m:
            m.setattr(golden, "STORED_BYTES", in_stored_order)
            codes, scale = golden.quantize_blocks(x.to(DEVICE), fmt, Recipe(), g, gs, scale_layout=filled)
        assert_same_bytes(codes, plain.codes)
        assert_same_bytes(scale, filled.apply(plain.scale))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("fmt", "layout"), [(fp4.NVFP4, "sf_128x4"), (fp4.MXFP4, "sf_128x4"), (fp4.NVFP4, "sf_8x4")], ids=str)
def test_stored_scales_by_programs_of_the_device(fmt: Format, layout: str, dtype: torch.dtype) -> None:
    """As many blocks a program as on a GPU (the interpreter takes all at once): borders within tiles and experts, padding."""
    x, order = randn(3, 122, 4 * fmt.block, seed=6).to(dtype), dataclasses.replace(fp4.layouts[layout], fill=0xA5)
    g, gs = ref.resolve_global_scale(x, fmt, Recipe(), None, None, False)
    codes, plain = ref.quantize_blocks(x, fmt, Recipe(), g, gs)
    on = [None if t is None else t.to(DEVICE) for t in (g, gs)]
    tile = golden.PAIR_BLOCKS_STORED[0] * fmt.block
    got, scale = golden.quantize_blocks(x.to(DEVICE), fmt, Recipe(), *on, scale_layout=order, tile=tile)
    assert_same_bytes(got, codes)
    assert_same_bytes(scale, order.apply(plain))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fmt", [fp4.NVFP4, fp4.MXFP4, fp4.NVFP4_B32, fp4.AMDFP4], ids=str)
def test_plain_scales_by_programs_of_the_device(fmt: Format, dtype: torch.dtype) -> None:
    """As many blocks a program as on a GPU, in rows and experts that end inside a program, and a last program that is not full."""
    x = randn(3, 61, 5 * fmt.block, seed=7).to(dtype)
    g, gs = ref.resolve_global_scale(x, fmt, Recipe(), None, None, False)
    codes, plain = ref.quantize_blocks(x, fmt, Recipe(), g, gs)
    on = [None if t is None else t.to(DEVICE) for t in (g, gs)]
    got, scale = golden.quantize_blocks(x.to(DEVICE), fmt, Recipe(), *on, tile=golden.PAIR_BLOCKS[0] * fmt.block)
    assert_same_bytes(got, codes)
    assert_same_bytes(scale, plain)


def test_kernels_refuse_operands_of_another_device() -> None:
    """A host pointer in a launch is an opaque error of Triton (the first run on a GPU had one); the wrappers say which operand it is."""
    x, there = randn(4, 64).to(DEVICE), torch.ones((), device="meta")
    for name, args in (("global_scale", (there, None)), ("encode_scale", (None, there))):
        with pytest.raises(FormatMismatch, match=f"quantize: {name} is on meta, the data on {DEVICE}"):
            golden.quantize_blocks(x, fp4.NVFP4, Recipe(), *args)
    codes, scale = golden.quantize_blocks(x, fp4.NVFP4, Recipe())
    for name, args in (("scale", (scale.to("meta"), None)), ("global_scale", (scale, there))):
        with pytest.raises(FormatMismatch, match=f"dequantize: {name} is on meta"):
            golden.dequantize_blocks(codes, *args, fp4.NVFP4)


def test_second_level_scales_follow_the_codes() -> None:
    """A scale read on the host beside codes on a device must not reach a kernel as a host pointer."""
    codes, scale = torch.zeros(2, 8, dtype=torch.uint8, device="meta"), torch.zeros(2, 1, dtype=torch.uint8, device="meta")
    q = fp4.QuantizedTensor("nvfp4", codes, scale, torch.tensor(0.5), input_scale=torch.tensor(0.5))
    assert q.global_scale.device == q.input_scale.device == codes.device


def test_a_stored_tensor_is_not_stored_twice() -> None:
    """Bug A2 (modular#6600): a second swizzle is an error, and a StoredQuantized is no QuantizedTensor."""
    q = fp4.quantize(randn(128, 64))
    stored = fp4.to_layout(q.scale, "sf_128x4")
    assert_same_bytes(stored.restore(), q.scale)
    assert fp4.to_layout(stored, "sf_128x4") is stored
    with pytest.raises(LayoutMismatch, match="stored as sf_128x4; need plain bytes"):
        fp4.to_layout(stored, "sf_8x4")
    with pytest.raises(FormatMismatch, match=r"call \.restore\(\) first"):
        fp4.dequantize(fp4.quantize(randn(128, 64), scale_layout="sf_128x4"))


# ---- torch.library, compile, gradients, memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        ("quantize", lambda: (randn(4, 64), "nvfp4", "default", None, None, False)),
        ("quantize", lambda: (randn(2, 4, 64), "nvfp4", "te", None, None, True)),
        ("quantize", lambda: (randn(4, 64), "mxfp4", Recipe(tie="away").key, None, None, False)),
        ("fake_quantize", lambda: (randn(4, 64).requires_grad_(), "mxfp8", "default", None, None, False)),
        ("dequantize", lambda: (*_parts(randn(4, 64)), "nvfp4", torch.bfloat16)),
        ("quantize_stored", lambda: (randn(130, 96), "nvfp4", "default", None, None, False, "sf_128x4")),
        ("quantize_stored", lambda: (randn(2, 3, 96), "nvfp4", "te", None, None, True, "sf_8x4")),
        ("quantize_stored", lambda: (randn(96), "mxfp4", "default", None, None, False, "plain")),
        ("quantize_stored", lambda: (randn(2, 130, 96), "nvfp4", "default", torch.tensor([0.5, 2.0]), None, False, "sf_128x4")),
        ("to_layout", lambda: (fp4.quantize(randn(128, 64)).scale, "sf_128x4")),
        ("to_layout", lambda: (fp4.quantize(randn(128, 64)).scale, "plain")),
    ],
)
def test_opcheck(op: str, arguments: Any) -> None:
    torch.library.opcheck(getattr(torch.ops.fp4, op).default, arguments())


def _parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    q = fp4.quantize(x)
    return q.codes, q.scale, q.global_scale


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_compile_fullgraph(fmt: str) -> None:
    """One graph, no break, any batch size; quantize returns its object from inside the graph too."""
    fake = torch.compile(lambda x: fp4.fake_quantize(x * 2, fmt) + 1, fullgraph=True, backend="aot_eager", dynamic=True)
    round_trip = torch.compile(lambda x: fp4.dequantize(fp4.quantize(x, fmt, "te")), fullgraph=True, backend="aot_eager")
    for m in (4, 7):
        x = randn(m, 64, seed=m)
        assert torch.equal(fake(x), fp4.fake_quantize(x * 2, fmt) + 1)
        assert torch.equal(round_trip(x), fp4.dequantize(fp4.quantize(x, fmt, "te")))


@pytest.mark.parametrize("given", [None, 0.25, torch.tensor(0.25), "per_expert"])
def test_stored_scales_compile_fullgraph(given: Any) -> None:
    """Bug K1: the stored path is one op whose fake knows the padding; the graph's own results are the eager bytes, whatever the rows."""
    lead = (2,) if isinstance(given, str) else ()

    def run(x: torch.Tensor) -> Any:
        q = fp4.quantize(x * 2, "nvfp4", global_scale=given, scale_layout="sf_128x4")
        return q.codes + 0, q.scale.data + 0, q.global_scale + 0

    nodes: list[str] = []

    def look(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nodes.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function" and "fp4" in str(n.target))
        return graph.forward

    torch.compile(run, fullgraph=True, backend=look)(randn(*lead, 4, 64))
    assert nodes == ["fp4.quantize_stored"]
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (4, 130, 300):
        x = randn(*lead, rows, 64, seed=rows)
        for got, want in zip(compiled(x), run(x), strict=True):
            assert got.shape == want.shape
            assert torch.equal(got, want)


def test_stored_scales_stay_dynamic() -> None:
    """The fake computes with symbolic rows: one graph serves them all."""
    from torch._dynamo.testing import CompileCounter

    frames = CompileCounter()
    run = torch.compile(lambda x: fp4.quantize(x, scale_layout="sf_128x4").scale.data + 1, fullgraph=True, backend=frames, dynamic=True)
    for rows in (5, 130, 300):
        assert torch.equal(run(randn(rows, 64)), fp4.quantize(randn(rows, 64), scale_layout="sf_128x4").scale.data + 1)
    assert frames.frame_count == 1


def test_stored_in_a_layout_without_a_name_compiles() -> None:
    chain = fp4.layouts["plain"] >> fp4.layouts["sf_128x4"]
    run = torch.compile(lambda x: fp4.quantize(x, "nvfp4", scale_layout=chain).scale.data + 1, fullgraph=True, backend="aot_eager")
    x = randn(128, 64)
    assert torch.equal(run(x), fp4.quantize(x, "nvfp4", scale_layout="sf_128x4").scale.data + 1)


class _Host(TorchDispatchMode):
    """Lists what would make the host wait for the device, or end a graph capture: values read, copies between host and device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        devices = {t.device.type for t in (*torch.utils._pytree.tree_leaves((args, kwargs)), out) if isinstance(t, torch.Tensor)}
        if len(devices) > 1 or func is torch.ops.aten._local_scalar_dense.default:
            self.seen.append(str(func))
        return out


@pytest.mark.parametrize("stored", [None, "sf_128x4"])
@pytest.mark.parametrize("given", [None, 0.25, "tensor", "per_expert"])
@pytest.mark.parametrize("recipe", ["default", "te", "compressed_tensors", "torchao"])
def test_no_hidden_wait_for_the_device(monkeypatch: pytest.MonkeyPatch, recipe: str, given: Any, stored: str | None) -> None:
    """All of quantize but the kernel launch, on a device that is not there: nothing is read back, nothing comes from the host."""

    def launch(x: torch.Tensor, fmt: Any, how: Any, g: Any, gs: Any, scale_layout: Any = None) -> Any:
        codes = x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.uint8)
        shape = (*x.shape[:-1], x.shape[-1] // fmt.block)
        return codes, x.new_empty(shape if scale_layout is None else (x.shape[0], scale_layout.nbytes(shape[-2:])), dtype=torch.uint8)

    monkeypatch.setattr(golden, "quantize_blocks", launch)
    with FakeTensorMode(allow_non_fake_inputs=False), _Host() as host:
        x = torch.empty(2, 130, 64, device="cuda", dtype=torch.bfloat16)
        g = torch.empty(2, device="cuda") if given == "tensor" else given
        q = fp4.quantize(x, "nvfp4", recipe, g, scale_layout=stored)
        assert q.codes.device.type == "cuda"
    assert host.seen == []


def test_straight_through_gradient() -> None:
    x = randn(4, 64).requires_grad_()
    fp4.fake_quantize(x, "nvfp4").square().sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * fp4.fake_quantize(x.detach(), "nvfp4"))


def test_fake_quantize_is_dequantize_of_quantize() -> None:
    for fmt, dtype, axis in itertools.product(FORMATS, DTYPES, (-1, 0)):
        x = randn(64, 64, seed=6).to(dtype)
        got = fp4.fake_quantize(x, fmt, axis=axis)
        assert got.dtype == dtype
        assert torch.equal(got, fp4.dequantize(fp4.quantize(x, fmt, axis=axis), dtype))


@pytest.mark.parametrize("shape", [(37, 160), (3, 5, 160)])
def test_64_bit_offsets_give_the_same_bytes(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels for tensors beyond 2^31 elements, on small ones; strided too."""
    x = randn(*shape, seed=11)
    wide = torch.cat((x, x), -1)[..., :160]
    want = fp4.quantize(x, "mxfp4")
    monkeypatch.setattr(golden, "WIDE_FROM", 0)
    monkeypatch.setattr(golden, "STORED_BYTES", math.inf)
    for t in (x, wide):
        codes, scale = golden.quantize_blocks(t.to(DEVICE), fp4.MXFP4, Recipe())
        assert_same_bytes(codes, want.codes)
        assert_same_bytes(scale, want.scale)
    for name in ("sf_128x4", "cdna4_sf") if len(shape) == 3 else ("sf_128x4", "gfx1250_sf"):
        order = fp4.layouts[name]
        if order.pad is not None:
            codes, stored = golden.quantize_blocks(wide.to(DEVICE), fp4.MXFP4, Recipe(), scale_layout=order)
            assert_same_bytes(codes, want.codes)
            assert_same_bytes(stored, order.apply(want.scale))
    assert torch.equal(golden.dequantize_blocks(codes, scale, None, fp4.MXFP4).cpu(), fp4.dequantize(want))


@pytest.mark.parametrize("preset", ["default", "te", "flashinfer", "flashinfer_fast"])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_value_of_16_bits(fmt: Format, preset: str, dtype: torch.dtype) -> None:
    """All 65,536, among neighbours and among values of any size, NaN and infinities included; both scale orders of storage."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    mixed = every[torch.randperm(65536, generator=gen(3))]
    x = torch.cat((every, mixed)).reshape(256, 512)
    g = torch.tensor(0.37) if fmt.tensor_scale else None
    both(x, fmt, fp4.recipe.get(preset, fmt.name), g)


@pytest.mark.parametrize("d", [1, 2, 3, 7, 180, 512, 513, 65535, 65536, 2**30 - 1, 2**31 - 1])
def test_division_by_multiplication(d: int) -> None:
    factor, shift = golden.divider(d)
    assert -(2**31) <= factor < 0
    for n in {0, 1, d - 1, d, d + 1, 2 * d - 1, 2 * d, (2**31 - 1) // d * d, (2**31 - 1) // d * d - 1, 2**31 - 1}:
        if not 0 <= n < 2**31:
            continue
        assert ((2 * n * (factor + 2**32)) >> 32) >> shift == n // d


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 64, 96), (1, 1, 7), (2, 5, 33), (4, 200, 208)])
def test_one_pass_amax(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The kernel behind the default global scale on a GPU: as the CPU's, for any strides; NaN and infinity do not count."""
    x = randn(*shape, seed=8, dtype=dtype)
    x.view(-1)[0], x.view(-1)[3], x.view(-1)[-1] = math.nan, -math.inf, -5.5
    for t in (x, x.transpose(1, 2), x[..., 1:], x.transpose(0, 1), x[:, ::2]):
        assert torch.equal(finite_amax(t.to(DEVICE)).cpu(), ref.tensor_amax(t))
        assert torch.equal(finite_amax(t.to(DEVICE), per_expert=True).cpu(), torch.stack([ref.tensor_amax(part) for part in t]))
    for t in (torch.full((4, 8), math.nan, dtype=dtype), torch.zeros(0, 8, dtype=dtype), torch.full((4, 8), -0.0, dtype=dtype)):
        assert finite_amax(t.to(DEVICE)).view(torch.int32).item() == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [n for n in fp4.recipes.names() if fp4.recipes[n] is not None])
def test_global_scale_in_one_launch(name: str, dtype: torch.dtype) -> None:
    """The kernel of a GPU against the torch twin, bit for bit: zero, subnormal, ordinary and largest amax."""
    recipe = fp4.recipe.get(name, "nvfp4")
    exponents = torch.arange(-149, 128).double()
    amax = torch.cat([torch.zeros(1), torch.exp2(exponents).float(), (torch.exp2(exponents) * 1.37).float(), randn(200, seed=3).abs()])
    amax = torch.cat([amax, torch.tensor([torch.finfo(torch.float32).max, 2688.0, 65504.0])])
    for recipe_ in (recipe, *(dataclasses.replace(recipe, global_rule=rule) for rule in CHOICES["global_rule"])):
        want = default_global_scale(amax, recipe_, dtype)
        got = global_scale(amax.to(DEVICE), recipe_, dtype)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a.cpu().view(torch.int32), b.view(torch.int32))
    assert [t.shape for t in global_scale(amax[5].to(DEVICE), recipe, dtype)] == [(), ()]


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any chunk size gives the same bytes, for rows that are and are not contiguous."""
    x = randn(37, 160, seed=11)
    wide = torch.cat((x, x), 1)[:, :160]
    want, values = fp4.quantize(x), fp4.dequantize(fp4.quantize(x))
    for chunk in (16, 100, 1 << 12):
        for name in ("NARROW", "ALONE", "WIDE"):
            monkeypatch.setattr(pace, name, chunk)
        monkeypatch.setattr(ref, "GROUP", 3 * chunk)
        for t in (x, wide):
            got = fp4.quantize(t)
            assert_same_bytes(got.codes, want.codes)
            assert_same_bytes(got.scale, want.scale)
            assert torch.equal(fp4.dequantize(got), values)


MEMORY = """
import resource, torch, fp4
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
x = torch.randn(1024, 16).to(torch.bfloat16).repeat(2048, 1)
fp4.dequantize(fp4.quantize(x[:1024]), torch.bfloat16)
start = peak()
q = fp4.quantize(x)
after = peak()
y = fp4.dequantize(q, torch.bfloat16)
print(after - start, peak() - after)
"""


def test_memory_is_output_plus_a_bounded_chunk() -> None:
    """2^25 bf16 elements: 18 MB of codes and scales, 64 MB of values; temporaries below 40 MB."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=120, check=True)
    first, second = (float(v) for v in done.stdout.split())
    assert first < 18 + 40
    assert second < 64 + 40


@settings(max_examples=10)
@given(st.sampled_from(FORMATS), st.integers(0, 2**31))
def test_rows_are_independent(fmt: Format, seed: int) -> None:
    """Bug L1, L2: a row's bytes depend on that row only (given g), and blocks are told apart."""
    x = tie_aimed((6, 3 * fmt.block), fmt, seed)
    g = 0.01 if fmt.tensor_scale else None
    whole = fp4.quantize(x, fmt, global_scale=g)
    for i in range(6):
        assert_same_bytes(fp4.quantize(x[i : i + 1], fmt, global_scale=g).codes[0], whole.codes[i])
    shifted = fp4.QuantizedTensor(fmt, whole.codes, whole.scale.roll(1, 1), whole.global_scale)
    swapped = fp4.QuantizedTensor(fmt, whole.codes.flip(-1), whole.scale, whole.global_scale)
    assert not torch.equal(fp4.dequantize(swapped), fp4.dequantize(whole))
    if not torch.equal(whole.scale, whole.scale.roll(1, 1)):
        assert not torch.equal(fp4.dequantize(shifted), fp4.dequantize(whole))


def test_stored_repr_is_one_line() -> None:
    q = fp4.quantize(randn(130, 64), "nvfp4", global_scale=0.5, scale_layout="sf_128x4")
    assert repr(q) == "StoredQuantized(nvfp4, shape=[130, 64], global_scale=0.5, scale=sf_128x4, device=cpu)"
    assert repr(q.scale) == "Stored(sf_128x4, shape=[130, 4], 1024 bytes, device=cpu)"
