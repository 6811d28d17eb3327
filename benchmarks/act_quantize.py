"""Activation and block quantisation in one pass, as a share of the device's copy rate.

    python benchmarks/act_quantize.py [--mib 128] [--buffers 4] [--json FILE]

h is bf16 [rows, 2 i] of ``--mib`` MiB (64 or more), several buffers in turn (more than the L2 cache together), all launches in one CUDA
graph, median of the replays. Rate: bytes of h read plus codes and scales written, over the time; ``share``: that over the rate of a device
copy of ``--mib`` MiB in the same run, the same for every width (the copy of a tensor of 11650 x 5760 is itself a third slower). Before
timing, one buffer's bytes are compared with the golden kernels in two steps (activation in float32 by Triton's own exp and division,
rounded to bf16, then quantised by integers only): they must be equal; and with torch's activation, whose exp differs in the last bit.
"""

from __future__ import annotations

import argparse
import json
from functools import partial

import torch
from quantize import graph_time

import fp4
from fp4 import formats
from fp4.gpu.kernels.act_quantize import act_and_quantize
from fp4.ref import activation
from fp4.ref import triton_quantize as golden
from fp4.ref.triton_quantize import quantize_blocks

WIDTHS = (2880, 7168, 14336)
CASES = [(f, a, o) for f in ("nvfp4", "mxfp8", "mxfp4") for a in ("swiglu_oai", "silu") for o in ("interleaved", "gate_up")]


def integers_only(
    h: torch.Tensor, act: activation.Activation, order: str, fmt: formats.Format, recipe: fp4.Recipe, g: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same bytes without any instruction that Triton's interpreter does not run."""
    native = golden._native
    golden._native = lambda device: 0
    try:
        gate, up = activation.split_gate_up(h, order)
        return quantize_blocks(gate, fmt, recipe, g, activation=act, up=up)
    finally:
        golden._native = native


def differ(a: torch.Tensor, b: torch.Tensor) -> str:
    return f"{int((a != b).sum())} of {a.numel()} codes"


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--mib", type=int, default=128)
    p.add_argument("--buffers", type=int, default=4)
    p.add_argument("--formats", nargs="+", default=["nvfp4", "mxfp8", "mxfp4"])
    p.add_argument("--no-time", action="store_true", help="compare bytes and compile only")
    p.add_argument("--json")
    a = p.parse_args()
    import triton

    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, triton {triton.__version__}, {vars(a)}", flush=True)
    recipe, rows = fp4.recipes["default"], []
    flat = [torch.randn(a.mib << 19, device="cuda").to(torch.bfloat16) for _ in range(a.buffers)]
    outs = [torch.empty_like(x) for x in flat]
    copy_rate = 2 * flat[0].nbytes / graph_time([partial(o.copy_, x) for x, o in zip(flat, outs, strict=True)])
    del outs
    print(f"copy: {copy_rate / 1e12:.2f} TB/s", flush=True)
    for width in WIDTHS:
        tokens = (a.mib << 20) // (4 * width)
        hs = [x[: tokens * 2 * width].view(tokens, 2 * width) for x in flat]
        for name, act_name, order in [c for c in CASES if c[0] in a.formats]:
            fmt, act = formats.get(name), activation.get(act_name)
            g = torch.tensor(0.002, device="cuda") if fmt.tensor_scale else None
            run = partial(act_and_quantize, activation=act, gate_up=order, format=fmt, recipe=recipe, global_scale=g)
            codes, scale = run(hs[0])
            plain = integers_only(hs[0], act, order, fmt, recipe, g)
            if not (torch.equal(codes, plain[0]) and torch.equal(scale, plain[1])):
                raise SystemExit(
                    f"{name} {act_name} {order} i {width}: bytes differ from the kernel of integers: {differ(codes, plain[0])}"
                )
            gate, up = activation.split_gate_up(hs[0].float(), order)
            apart = quantize_blocks(act(gate, up).to(hs[0].dtype), fmt, recipe, g)
            same = [(u == v).float().mean().item() for u, v in zip((codes, scale), apart, strict=True)]
            del gate, up, apart, plain
            if a.no_time:
                continue
            took = graph_time([partial(run, h) for h in hs])
            rate = (hs[0].nbytes + codes.nbytes + scale.nbytes) / took
            row = {"i": width, "format": name, "activation": act_name, "order": order, "us": took * 1e6, "gb_s": rate / 1e9}
            row |= {"share": rate / copy_rate, "equal codes": same[0], "equal scales": same[1]}
            rows.append(row)
            print(
                f"i {width:6d} {name:6s} {act_name:10s} {order:12s} {row['us']:8.1f} us {row['gb_s']:7.0f} GB/s share {row['share']:.3f}"
                f"  equal to torch's activation: codes {same[0]:.6f} scales {same[1]:.6f}",
                flush=True,
            )
    if a.json:
        with open(a.json, "w") as f:
            json.dump(rows, f, indent=1)


if __name__ == "__main__":
    main()
