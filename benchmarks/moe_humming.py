"""humming's mixture of experts beside fp4's, on the same weights, in one process.

    python benchmarks/moe_humming.py [--format mxfp4|nvfp4 --tokens 1,16,64,256,1024,4096] [--json FILE]

humming (0.1.20) has two indexed products and an activation kernel, and no sum over the slots. ``products``: the two products alone, as
its own figures count them. ``layer``: products, activation and a sum over the slots by torch.bmm; the sort by expert is made beforehand
and is not in the time (it is in fp4's). Tile sizes are what its heuristics choose for the row count; sizes that are no multiple of its
tiles are padded by humming itself, the faster of two paddings counts. Its biases are bf16, its error is checked against the same float64
reference. Marlin's mixture of experts: ``moe_marlin.py``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from moe import compile_ahead, graph_us, inputs, parse
from moe import layer as random_layer

import fp4
from fp4.tensor import QuantizedTensor

SWIGLU = "fminf(a, 7.f) / (1.f + __expf(-1.702f * fminf(a, 7.f))) * (fminf(fmaxf(b, -7.f), 7.f) + 1.f)"


def layer(q: QuantizedTensor, bias: torch.Tensor, pad: tuple[int, int]) -> Any:
    from humming.layer import HummingLayer

    e, n, half = q.codes.shape
    mx = q.format.block == 32
    how = {"quant_method": "mxfp4"} if mx else {"quant_method": "modelopt", "quant_algo": "nvfp4"}
    made = HummingLayer(
        shape_n=n, shape_k=2 * half, weight_config=how, pad_n_to_multiple=pad[0], pad_k_to_multiple=pad[1],
        num_experts=e, has_bias=True, torch_dtype=torch.bfloat16,
    ).cuda()  # fmt: skip
    tensors = {"weight": q.codes.clone(), "weight_scale": q.scale.clone(), "bias": bias.bfloat16()}
    if not mx:
        tensors |= {"weight_scale": q.scale.clone().view(torch.float8_e4m3fn), "weight_scale_2": q.global_scale.float()}
    made.load_from_tensors({k: v.view(getattr(made, k).shape) for k, v in tensors.items()})
    made.transform()
    return made


def by_expert(ids: torch.Tensor, experts: int, block: int) -> dict[str, torch.Tensor]:
    """Pair numbers by expert, each expert padded to a multiple of ``block`` with the number of pairs."""
    flat = ids.flatten().long()
    counts = torch.bincount(flat, minlength=experts)
    blocks = (counts + block - 1) // block
    starts = (blocks.cumsum(0) - blocks) * block
    order = torch.argsort(flat, stable=True)
    rank = torch.arange(flat.numel(), device=ids.device) - (counts.cumsum(0) - counts)[flat[order]]
    total = int(blocks.sum())
    sorted_ids = torch.full((total * block,), flat.numel(), dtype=torch.int32, device=ids.device)
    sorted_ids[starts[flat[order]] + rank] = order.int()
    experts_of = torch.repeat_interleave(torch.arange(experts, device=ids.device, dtype=torch.int32), blocks)
    return {
        "sorted_ids": sorted_ids,
        "expert_ids": experts_of,
        "num_tokens_padded": torch.tensor(total * block, dtype=torch.int32, device=ids.device),
    }


def bind(layers: tuple[Any, Any], ids: torch.Tensor, p: torch.Tensor, experts: int) -> tuple[Callable, Callable, list[Any]]:
    """(the two products, the whole layer, tile sizes) as callables of x."""
    from humming import ops
    from humming.tune import get_heuristics_config

    pairs, topk = ids.numel(), ids.shape[1]
    how = {"gemm_type": "indexed"}
    tuned = [get_heuristics_config(m.humming_config, shape_m=pairs, gemm_type="indexed") for m in layers]
    routes = [by_expert(ids, experts, t["block_shape"][0]) for t in tuned]
    scale = p.bfloat16().unsqueeze(1)
    first, second = layers

    def up(x: torch.Tensor) -> torch.Tensor:
        return first(x, top_k=topk, compute_config=how, tuning_config=tuned[0], **routes[0])

    def down(h: torch.Tensor) -> torch.Tensor:
        return second(h, top_k=1, compute_config=how, tuning_config=tuned[1], **routes[1])

    def whole(x: torch.Tensor) -> torch.Tensor:
        h = ops.process_input(up(x), activation_type="binary_interleaved", activation_impl=SWIGLU)[0]
        return torch.bmm(scale, down(h).view(ids.shape[0], topk, -1)).squeeze(1)

    h = torch.randn(pairs, second.shape_k, device="cuda", dtype=torch.bfloat16)

    def products(x: torch.Tensor) -> None:
        up(x)
        down(h)

    return products, whole, [list(t["block_shape"]) for t in tuned]


def main() -> None:
    a = parse()
    tokens = [int(t) for t in a.tokens.split(",")]
    if not a.compiled:
        compile_ahead(tokens)
    w13, w2, options = random_layer(a)
    ex = fp4.prepare_moe(w13, w2, backend="triton", **options)
    peers: dict[tuple[int, int], Any] = {}
    for pad in ((128, 64), (256, 128)):
        try:
            peers[pad] = layer(w13, options["bias13"], pad), layer(w2, options["bias2"], pad)
        except Exception as e:
            print(f"humming, padding {pad}: {type(e).__name__}: {str(e)[:300]}", file=sys.stderr, flush=True)
    flush = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    rows = []
    for t in tokens:
        x, ids, p, error = inputs(a, t, w13, w2, options)
        ours = lambda: fp4.moe(x, ex, ids, p)  # noqa: B023, E731
        row: dict[str, Any] = {"tokens": t} if a.warm else {"tokens": t, "fp4": graph_us(ours, flush), "error": error(ours())}
        for pad, layers in peers.items():
            try:
                products, whole, tiles = bind(layers, ids, p, a.experts)
                wrong = error(whole(x))
                if not wrong < 1e-2:
                    raise RuntimeError(f"relative error {wrong:.2e}")
                if a.warm:
                    continue
                got = {
                    "humming error": wrong,
                    "humming products": graph_us(lambda: products(x), flush),  # noqa: B023
                    "humming layer": graph_us(lambda: whole(x), flush),  # noqa: B023
                    "padding": pad,
                    "tiles": tiles,
                }
                if got["humming layer"] < row.get("humming layer", 1e9):
                    row |= got
            except Exception as e:
                print(f"humming, {t} tokens, padding {pad}: {type(e).__name__}: {str(e)[:300]}", file=sys.stderr, flush=True)
        rows.append(row)
        if a.json:
            Path(a.json).write_text(json.dumps(rows, indent=1))
        print("  ".join(f"{k} {v:.3g}" if "error" in k else f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
