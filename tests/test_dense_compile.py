"""The dense kernels compile for every target, without a GPU and without spilling where it counts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.kernel

SCRIPT = """
import sys
from triton.backends.compiler import GPUTarget
from fp4.gpu.kernels import launch, plain
arch = int(sys.argv[1])
target = GPUTarget("cuda", arch, 32)
i = lambda names: dict.fromkeys(names.split(), "i32")
common = dict(KIND=16, ANY=False, HALF=False, HAS_BIAS=True)
sizes = i("M N K NT KT KB stride_xm oc")
sig = dict(x_ptr="*bf16", w_ptr="*i32", s_ptr="*i32", alpha_ptr="*fp32", bias_ptr="*bf16", y_ptr="*bf16")
more = dict(num_stages=2, aligned=("K", "stride_xm"), target=target)
launch.build(plain.dense_plain, sig | sizes, common | dict(BM=16, R=4, U=4), num_warps=4, **more)
half = common | dict(KIND=32, ANY=True, HALF=True, BM=64, R=4, U=4)
launch.build(plain.dense_plain, sig | dict(x_ptr="*fp16", y_ptr="*fp32") | sizes, half, num_warps=8, **more)
launch.build(plain.dequantize_tiles, dict(w_ptr="*i32", s_ptr="*i32", o_ptr="*bf16") | i("row0 N K NT KT KB oc"),
             dict(KIND=16, ANY=False, HALF=False, R=4, U=4), num_warps=4, target=target)
assert launch.gluon_reason() is None, launch.gluon_reason()
from fp4.gpu.kernels.small_m import small_m
more = dict(part_ptr="*fp32", count_ptr="*i32")
for kind, half, mt, mr, xs in ((16, False, 8, 1, 2), (16, False, 8, 1, 1), (32, True, 16, 16, 0)):
    k = launch.build(small_m, sig | dict(x_ptr="*i32", s_ptr="*i64") | i("M N oc"), dict(K=1056, KIND=kind, ANY=False, HALF=half,
        HAS_BIAS=True, EVEN_N=False, WK=4, WN=1, R=1, U=4, MT=mt, MR=mr, D=1, XS=xs), num_warps=4, target=target)
    assert k.shared <= 99 * 1024
if arch >= 89:
    from fp4.gpu.kernels import dense_fp8, plain_fp8
    sig8 = dict(x_ptr="*fp8e4nv", xs_ptr="*fp32", w_ptr="*i32", s_ptr="*i32", bias_ptr="*bf16", y_ptr="*bf16",
        base_ptr="*i32", ws_ptr="*fp32")
    for _, _, (bm, r, u, warps, stages) in dense_fp8._PLAIN:
        k = launch.build(plain_fp8.dense_fp8_plain, sig8 | i("M N NT KT KB"), dict(HAS_BIAS=True, BM=bm, R=r, U=u), num_warps=warps,
            num_stages=stages, aligned=("N",), target=target)
        assert k.shared <= 99 * 1024, k.shared
        if arch == 89:
            assert "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32" in k.compiled.asm["ptx"]
    for once in (False, True):
        launch.build(plain_fp8.quantize_x, dict(x_ptr="*bf16", o_ptr="*fp8e4nv", scale_ptr="*fp32", count_ptr="*i32", K="i32", KT="i32"),
            dict(B=32, FRAG=False, PDL=False, ROUND=True, COUNTS=0, ONCE=once, IEEE=False), num_warps=8, target=target)
if arch == 90:
    from fp4.gpu.kernels.small_fp8 import small_fp8
    from fp4.gpu.kernels.wide_m import permute_x, wide_m
    for mt, mr, wn, u, d, xs in ((8, 1, 1, 4, 1, 2), (16, 16, 1, 2, 1, 0), (32, 32, 2, 2, 2, 4)):
        launch.build(small_fp8, sig8 | dict(x_ptr="*i32") | i("M N"), dict(KT=17, HAS_BIAS=True, EVEN_N=False, WK=4, WN=wn, R=1, U=u, MT=mt,
            MR=mr, D=d, XS=xs), num_warps=4 * wn, target=target)
    for kind, split in ((16, 1), (32, 2)):
        launch.build(wide_m, sig | more | i("M N KT oc"), dict(KIND=kind, ANY=False, HALF=False, HAS_BIAS=True, EVEN=False, BT=64, R=1, U=4,
            XS=6, GM=8, SPLIT=split, NW=4), num_warps=4, aligned=("N",), target=target)
    order = dict(x_ptr="*i32", o_ptr="*i32", count_ptr="*i32", words="i32", tiles="i32")
    launch.build(permute_x, order, dict(B=32, COUNTS=256), num_warps=4, target=target)
print("compiled", arch)
"""


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
def test_compiles_for(arch):
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(arch)], capture_output=True, text=True, env=env, timeout=300)
    assert f"compiled {arch}" in done.stdout, done.stderr[-2000:]


HAZARDS = """
import sys
sys.path.insert(0, sys.argv[1])
import sass
from triton.backends.compiler import GPUTarget
from fp4.gpu.kernels import dense, dense_fp8, dense_plans, launch
launch.compile_only(GPUTarget("cuda", 90, 32))
import torch
made, build = [], launch.build_ring
def keep(*a, **k):
    made.append((build(*a, **k), k.get("per", 1)))
    return made[-1][0]
launch.build_ring = keep
none = torch.zeros(4, dtype=torch.int32)
ways = (*dense_plans.CONDITIONS, "CUT", "MOST", "GM")  # what is no constant of a kernel, or only an order of tiles
rows = {str({k: v for k, v in r.items() if k not in ways}): r for r in dense.table()["sm90"] if r["kernel"] in ("wide", "ws", "tiles")}
rows8 = dict.fromkeys(row._replace(GM=8, QW=8) for _, _, row in dense_fp8.hopper_table() if isinstance(row, dense_fp8.Specialised))
shapes = ((16, torch.bfloat16, torch.bfloat16, 8192, 8192), (32, torch.float16, torch.float32, 1000, 2880))
if sys.argv[2] == "quick":
    rows, rows8, shapes = dict(list(rows.items())[-1:]), list(rows8)[-1:], shapes[:1]
for block, act, out, n, k in shapes:
    about = {"low": 116, "high": 123, "any": False, "fp16": True}
    d = dense.Dense(none, none, None, n, k, block, about, "sm90")
    for row in rows.values():
        d._plan(row["m_max"] or 16384, act is torch.float16, out, None, dict(row))
    if block == 16:  # one shape for each W4A8 kernel
        for i, row in enumerate(rows8):
            n8, k8, out8 = ((8192, 8192, torch.bfloat16), (1000, 2880, torch.float32))[i % 2]
            d8 = dense_fp8.Dense8(none, none, torch.full((n8,), 120, dtype=torch.uint8), None, n8, k8, True)
            d8._plan(row, torch.bfloat16, out8, None)
checked, made = 0, list({id(m[0]): m for m in made}.values())  # a ring that was shortened may be that of another row
for kernel, per in made:
    name = kernel.compiled.metadata.name
    assert kernel.shared <= launch.SHARED // per - launch.BLOCK_SHARED, (name, kernel.shared)
    code = sass.disassemble(kernel.compiled.asm["cubin"])
    loops, bad = sass.hazards(code)
    assert not bad, (name, bad[:3])
    assert not sass.serialised(code), name
    wrong = sass.hand_over(code, "release" in kernel.compiled.asm["ptx"]) if name.startswith("ws_") else []
    assert not wrong, (name, wrong)
    checked += loops > 0
print("kernels", len(made), "checked", checked)
"""


@pytest.mark.parametrize("which", ["quick", pytest.param("all", marks=pytest.mark.slow)])
def test_no_mma_operand_is_overwritten_in_flight(which):
    """In the machine code of every warp-group MMA kernel that the tables can pick (two of them in the quick run), which fit the GPU."""
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    here = os.path.dirname(os.path.abspath(__file__))
    done = subprocess.run([sys.executable, "-c", HAZARDS, here, which], capture_output=True, text=True, env=env, timeout=600)
    assert "checked" in done.stdout, done.stderr[-2000:]
    _, made, _, checked = done.stdout.split()
    assert int(made) == int(checked) >= (2 if which == "quick" else 18), done.stdout


def test_the_hand_over_check_can_fail():
    """Each barrier of Triton's hand-over taken away, the write of the bytes and the read of the values moved over theirs."""
    import sass

    barrier = ["BAR.SYNC.DEFER_BLOCKING 0x1"]
    again = "BRA `(.L_x_1)"
    others = [
        ".L_x_1",
        *barrier,
        "LDS.U8 R0, [R0+UR25+0x1885c]",
        "BRX R2",
        ".L_x_2",
        "LDS.64 R2, [UR24+0x18000]",
        *barrier,
        "UTMALDG.2D [UR20], [UR12]",
        *barrier,
        again,
        ".L_x_5",
        *barrier,
        *barrier,
        again,
    ]
    write = ["STS [UR6+0x18860], R0", "STS.64 [UR6+0x18000], R2"]
    work = ["BAR.SYNC.DEFER_BLOCKING 0x0, 0x80", "@P0 STS [UR6+0x18000], R32", "LDS R115, [UR6+0x18000]"]
    default = [*write, *barrier, *barrier, *work, *barrier, "STS [UR4+0x18860], R0", *barrier, "EXIT"]

    def found(*code, helpers=False):
        lines = [f"{t}:" if t.startswith(".L") else f"        /*{16 * i:04x}*/                   {t} ;" for i, t in enumerate(code)]
        return sass.hand_over("\n".join(lines), helpers)

    assert found(*others, *default) == []
    pairs = [".L_x_3", *["STS [R6+0x100], R32", "LDS R115, [R7+0x100]"] * 4, ".L_x_4"]  # of blocks that are helpers
    assert found(*others, *pairs, *default)
    assert found(*others, *pairs, *default, helpers=True) == []
    assert found(*others, *pairs[:-1], "UTMALDG.2D [UR20], [UR12]", *barrier, *default, helpers=True)
    assert found(*others, *pairs, "STS [R6+0x100], R32", *default, helpers=True)
    for i in [i for i, t in enumerate(default) if t == barrier[0]]:
        assert found(*others, *default[:i], *default[i + 1 :]), i
    assert found(*others, *barrier, *write, *default[3:])
    assert found(*others, *write, *barrier, *work[1:], *barrier, *barrier, "STS [UR4+0x18860], R0", *barrier, "EXIT")
    assert found(*default, ".L_x_9", *others) == []
    assert found(*others[:5], others[6], others[5], *others[7:], *default)
    for i in [i for i, t in enumerate(others) if t in (again, barrier[0])]:
        assert found(*others[:i], *others[i + 1 :], *default), i
        assert found(*others[: i + 1], *others[i:], *default), i
    assert found(*default)


def test_the_hazard_check_can_fail():
    import sass

    loop = """.L_x_1:
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R24, R60, gdesc[UR4], R24, gsb0 ;
        /*0020*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0030*/                   LOP3.LUT {0}, R4, 0x3, RZ, 0xc0, !PT ;
        /*0040*/              @!P0 BRA `(.L_x_1) ;
"""
    assert sass.hazards(loop.format("R70"))[1] == []
    assert sass.hazards(loop.format("R61"))[1]
    waited = loop.replace("gsb0, 0x1", "gsb0, 0x0").format("R61")
    assert sass.hazards(waited)[1] == []
    assert sass.serialised(waited)
    assert not sass.serialised(loop)


OVERLAP = """
from triton.backends.compiler import GPUTarget
from fp4.gpu.kernels import dense_fp8, launch
import torch
launch.compile_only(GPUTarget("cuda", 90, 32))
made = []
build = launch.build
def keep(*a, **k):
    made.append(build(*a, **k))
    return made[-1]
launch.build = keep
none = torch.zeros(4, dtype=torch.int32)
for on in (False, True):
    d = dense_fp8.Dense8(none, none, torch.full((256,), 120, dtype=torch.uint8), None, 256, 256, True)
    d._plan(dense_fp8.Specialised(64, 1, 2, 6, 4, PDL=on), torch.bfloat16, torch.bfloat16, None)
d._plan(dense_fp8.Few(16, 1, 2, 1, 4, 1, 2), torch.bfloat16, torch.bfloat16, None)
print([(k.compiled.metadata.name, k.compiled.metadata.launch_pdl) for k in made])
for k in made:
    name = k.compiled.metadata.name
    want = "griddepcontrol.launch_dependents" if name == "quantize_x" else "griddepcontrol.wait"
    assert want in k.compiled.asm["ptx"], name
    if name == "small_fp8":  # x is read behind the wait, the weights in front of it
        ptx = k.compiled.asm["ptx"]
        assert ptx.index("ld.global") < ptx.index(want) < ptx.index("cp.async.cg")
"""


def test_overlap_only_where_the_row_asks_for_it():
    """Only the second kernel of a chain may start early, only where its row says so; its wait stands before the first read of x."""
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", OVERLAP], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    chains = [("ws_fp8", False), ("ws_fp8", True), ("small_fp8", True)]
    assert done.stdout.strip() == str([k for first in chains for k in (first, ("quantize_x", False))]), done.stdout


SMALL = """
from triton.backends.compiler import GPUTarget
from fp4.gpu.kernels import dense, launch
import torch
launch.compile_only(GPUTarget("cuda", 90, 32))
build, seen = launch.build, []
def keep(fn, signature, constants, **how):
    k = constants["K"]  # hundreds of unrolled steps take minutes to compile: those are only counted
    seen.append((constants, build(fn, signature, constants, **how).shared if k == 8192 else None))
    return launch.Kernel.__new__(launch.Kernel)
launch.build = keep
none = torch.zeros(4, dtype=torch.int32)
rows = {str({c: v for c, v in r.items() if c not in ("m_max", "n_min")}): r for r in dense.table()["sm90"] if r["kernel"] == "small"}
rows["tests/gpu"] = {"m_max": 16, "kernel": "small", "WK": 4, "WN": 1, "R": 1, "U": 4, "D": 1, "XS": 99}
for row in rows.values():
    for k in (8192, 131072):
        d = dense.Dense(none, none, None, 272, k, 32, {"low": 116, "high": 123, "any": False, "fp16": True}, "sm90")
        for m in (1, 16):
            if m <= row["m_max"] and (k == 131072 or m == row["m_max"] or "n_min" not in row):
                d._plan(m, False, torch.bfloat16, None, row)
for c, shared in seen:
    x = c["XS"] * c["MR"] * c["WK"] * c["U"] * 128
    assert x <= 96 << 10, (c, x)
    assert shared is None or x <= shared <= 227 << 10, (c, x, shared)
print("compiled", sum(shared is not None for _, shared in seen), "counted", len(seen))
"""


def test_few_rows_fit_shared_memory():
    """Rows of x that small_m holds: the compiled size at k = 8192 fits Hopper's 227 KiB, as it does for the longest k by its count."""
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", SMALL], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    _, compiled, _, counted = done.stdout.split()
    assert int(compiled) >= 4, done.stdout
    assert int(counted) >= 12, done.stdout
