"""Activation and block quantisation in one pass, as a share of the device's copy rate.

    python benchmarks/act_quantize.py [--mib 128] [--buffers 4] [--json FILE]

h is bf16 [rows, 2 i] of ``--mib`` MiB (64 or more), several buffers in turn (more than the L2 cache together), all launches in one CUDA
graph, median of the replays. Rate: bytes of h read plus codes and scales written, over the time; ``share``: that over the rate of a device
copy of the same buffers in the same run. Before timing, one buffer's bytes are compared with activation and quantisation in two steps.
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
from fp4.ref.triton_quantize import quantize_blocks

WIDTHS = (2880, 7168, 14336)
CASES = [(f, a, o) for f in ("nvfp4", "mxfp8", "mxfp4") for a in ("swiglu_oai", "silu") for o in ("interleaved", "gate_up")]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--mib", type=int, default=128)
    p.add_argument("--buffers", type=int, default=4)
    p.add_argument("--json")
    a = p.parse_args()
    import triton

    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, triton {triton.__version__}, {vars(a)}", flush=True)
    recipe, rows = fp4.recipes["default"], []
    for width in WIDTHS:
        tokens = (a.mib << 20) // (4 * width)
        hs = [torch.randn(tokens, 2 * width, device="cuda", dtype=torch.bfloat16) for _ in range(a.buffers)]
        outs = [torch.empty_like(h) for h in hs]
        copy = graph_time([partial(o.copy_, h) for h, o in zip(hs, outs, strict=True)])
        copy_rate = 2 * hs[0].numel() * 2 / copy
        del outs
        print(f"copy, i = {width}: {copy_rate / 1e12:.2f} TB/s", flush=True)
        for name, act_name, order in CASES:
            fmt, act = formats.get(name), activation.get(act_name)
            g = torch.tensor(0.002, device="cuda") if fmt.tensor_scale else None
            run = partial(act_and_quantize, activation=act, gate_up=order, format=fmt, recipe=recipe, global_scale=g)
            codes, scale = run(hs[0])
            gate, up = activation.split_gate_up(hs[0].float(), order)
            apart = quantize_blocks(act(gate, up).to(hs[0].dtype), fmt, recipe, g)
            pairs = (codes, apart[0]), (scale.view(torch.uint8), apart[1].view(torch.uint8))
            same = [(u == v).float().mean().item() for u, v in pairs]
            took = graph_time([partial(run, h) for h in hs])
            rate = (hs[0].numel() * 2 + codes.nbytes + scale.nbytes) / took
            row = {"i": width, "format": name, "activation": act_name, "order": order, "us": took * 1e6, "gb_s": rate / 1e9}
            row |= {"share": rate / copy_rate, "equal codes": same[0], "equal scales": same[1]}
            rows.append(row)
            print(
                f"i {width:6d} {name:6s} {act_name:10s} {order:12s} {row['us']:8.1f} us {row['gb_s']:7.0f} GB/s share {row['share']:.3f}"
                f"  equal to two steps: codes {same[0]:.6f} scales {same[1]:.6f}",
                flush=True,
            )
    if a.json:
        with open(a.json, "w") as f:
            json.dump(rows, f, indent=1)


if __name__ == "__main__":
    main()
