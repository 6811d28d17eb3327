"""Write ``docs/layouts.md`` and its pictures from the catalogue: ``python docs/make_layouts.py``. A test checks that they are current."""

from __future__ import annotations

from pathlib import Path

from fp4 import encode
from fp4 import layouts as catalogue
from fp4.layout import Layout
from fp4.layout_doc import sample_shape

HERE = Path(__file__).parent
ROLES = {
    "rows": ("Row orders", "Rows move whole. `apply_rows` gives a bias the same order."),
    "scale": ("Block scales", "One byte a block; rows are N (M for activations), columns blocks along K."),
    "value": ("Packed values", "Two codes a byte; rows are N, columns bytes along K (nibbles where it says so)."),
}

INTRO = """# Layouts

<!-- made by docs/make_layouts.py from fp4/layouts.py; do not edit -->

A layout is one line. Left of the arrow stands one group for each logical dimension, outer to inner; right of it the storage order, outer to
inner. `m32` is an axis of 32, `mo` takes what is left, `~g2` is stored backwards. Pack, unpack, offset, kernel, picture and legal shards
follow from the line.

```python
import numpy as np, fp4

L = fp4.layouts["sf_128x4"]  # (mo m4 m32) (ko k4) -> mo ko m32 m4 k4
x = np.arange(130 * 6, dtype=np.uint8).reshape(130, 6)
y = L.apply(x)  # u8 [nbytes], padded with fill
assert (L.invert(y, shape=x.shape) == x).all()
assert y[L.offset(x.shape, 129, 5)] == x[129, 5]
print(L.formula((256, 8)), L.cute((256, 8)), L.shard(0, 2, (256, 8)))
chain = fp4.layouts["gate_up_pairs"] >> fp4.layouts["trtllm_rows_32"] >> L
```

On the command line: `fp4 layout list`, `fp4 layout show sf_128x4 --shape 1024x64`, `fp4 layout equal sf_128x4 blackwell_sf`.

A layout has one text everywhere (`fp4.layouts.parse`, `fp4.to_layout`, `quantize(scale_layout=)`, a backend's `Stored`, the command line):
a name of this page, `hopper_sf(num_warps=4)` for one with parameters, a spec, or several joined with ` >> `.

## From a quantised weight to a kernel's bytes

`apply` and `invert` take and give bare bytes. `fp4.to_layout` keeps the order with them, so that they are not swizzled twice:

```python
import torch

q = fp4.quantize(torch.randn(256, 128), "nvfp4")
blackwell = fp4.to_layout(q.scale, "sf_128x4")  # cuBLASLt, CUTLASS, FlashInfer mm_fp4, torch._scaled_mm
trtllm = fp4.to_layout(q.codes, "trtllm_rows_32"), fp4.to_layout(q.scale, "trtllm_rows_32 >> sf_128x4")
assert torch.equal(blackwell.restore(), q.scale)
print(blackwell, blackwell.data.shape)
fused = fp4.quantize(torch.randn(256, 128), "nvfp4", scale_layout="sf_128x4")  # the same in one pass over x
print(fused.scale)
```
```text
Stored(sf_128x4, shape=[256, 8], 2048 bytes, device=cpu) torch.Size([2048])
Stored(sf_128x4, shape=[256, 8], 2048 bytes, device=cpu)
```

Marlin also maps scale values, before it orders them ([encode steps](#encode-steps)):

```python
weight = fp4.to_layout(q.codes, "marlin_w").data.view(torch.int32)
step = fp4.encode.get("marlin_nvfp4_v3")(q.scale)  # data, and the power of two that the scales were multiplied by
scale = fp4.to_layout(step.data, "marlin_mx_sf").data
assert q.global_scale is not None
second = fp4.encode.marlin_global_scale(q.global_scale, step.factor, torch.bfloat16)
print(weight.shape, scale.shape, step.factor)
```
```text
torch.Size([4096]) torch.Size([2048]) 1.0
```

Activation scales of a grouped GEMM lie one expert after the other, each padded on its own: `fp4.Segmented(layout, starts)`.

```python
ragged = fp4.Segmented(L, (0, 10, 150))  # first row of each expert, then the total
print(ragged.bases(8), ragged.nbytes((150, 8)))
```
```text
(0, 1024, 3072) 3072
```

## One of your own

```python
from fp4.testing import mutants

mine = fp4.Layout("mine", "(mo m4 m8) (ko k2) -> ko mo m8 m4 k2", pad=(32, 2))
print(mine.formula(), mine.multiple)
scale = torch.randint(0, 256, (40, 5), dtype=torch.uint8)
packed = torch.nn.functional.pad(scale, (0, 1, 0, 24)).reshape(2, 4, 8, 3, 2).permute(3, 0, 2, 1, 4).reshape(-1)  # the kernel's own code
assert torch.equal(mine.apply(scale), packed)
assert all(not torch.equal(m.apply(scale), packed) for m in mutants(mine))  # no wrong neighbour passes for it
```
```text
(m % 8)*8 + ((m//8) % 4)*2 + (m//32)*64 + (k % 2) + (k//2)*64*RO (32, 2)
```

`RO` and `CO` in a formula are what the free row and column axes come to, `multiple` what a shape is padded to, or must be a multiple
of where `pad` is None. `unit="nibble"` counts 4-bit columns, `word` permutes the bits of each 32-bit word afterwards.
"""


def variants() -> list[Layout]:
    return [catalogue.variants(name)[0] for name in catalogue.names()]


def same_table(layouts: list[Layout]) -> list[str]:
    """Groups of names with one order."""
    lines, seen = ["| same order | stored by | padding |", "|---|---|---|"], []
    for layout in layouts:
        group = [x for x in layouts if x.same_digits(layout)]
        if len(group) < 2 or any(layout.same_digits(s) for s in seen):
            continue
        seen.append(layout)
        pads = "; ".join(f"`{x.name}` {x.multiple[0]} x {x.multiple[1]}" + (f" fill {x.fill:#x}" if x.fill else "") for x in group)
        lines.append(f"| `{layout.spec}` | {'; '.join(f'`{x.name}` ({x.origin})' for x in group)} | {pads} |")
    return lines


RUN = """`marlin_w`, `marlin_mx_sf`, `marlin_bias`, `marlin_mxfp4` and `marlin_nvfp4_v1` to `_v3` were also read by the vendor's
code: SGLang 0.5.23's Marlin kernels, built by `benchmarks/marlin.py`, gave back every weight bit for bit on an H200
(`tests/gpu/test_marlin.py`, 36 tests: e8m0 bytes 3 to 251, every e4m3 byte, a wrong scale order is seen)."""


def entry(layout: Layout) -> list[str]:
    pads = layout.pad or (None, None)
    words = [
        f"padded to a multiple of {n} {what}" if p is not None else f"{what} must be a multiple of {n}"
        for n, p, what in zip(layout.multiple, pads, ("rows", f"{layout.unit} columns"), strict=True)
        if n > 1
    ]
    if layout.fill:
        words.append(f"padding bytes {layout.fill:#x}")
    if layout.unit == "nibble":
        words.append("unit: nibble")
    shape = sample_shape(layout, 4 * layout.multiple[0], 4 * layout.multiple[1])
    lines = [f"### `{layout.name}`", "", f"{layout.origin}. Checked for: {layout.holds}.", ""]
    lines += ["```", layout.spec, "```", ""]
    lines += [f"* {'; '.join(words)}" if words else "* any shape"]
    lines += [f"* offset: `{layout.formula()}`", f"* CuTe at {shape[0]} x {shape[1]}: `{layout.cute(shape)}`"]
    if layout.word is not None:
        lines.append(f"* then output bit j of each 32-bit word is input bit `{' '.join(map(str, layout.word))}`")
    return [*lines, "", f"![{layout.name}](layouts/{layout.name}.svg)", ""]


def page() -> str:
    layouts = variants()
    lines = [INTRO, "## Which layouts are the same", "", *same_table(layouts), ""]
    for role, (title, text) in ROLES.items():
        lines += [f"## {title}", "", text, ""]
        for layout in layouts:
            if layout.role == role:
                lines += entry(layout)
    what = "Value maps that some backends need besides a layout; `fp4.encode.get(name)(scale)` gives the bytes and a power of two."
    lines += ["## Encode steps", "", what, ""]
    lines += ["| name | lossless | read exactly over | whose |", "|---|---|---|---|"]
    for name in encode.names():
        e = encode.get(name)
        lines.append(f"| `{name}` | {'yes' if e.lossless else 'no'} | {e.over} | {e.origin} |")
    lines += ["", RUN]
    return "\n".join(lines) + "\n"


def picture_shape(layout: Layout) -> tuple[int, int]:
    return sample_shape(layout, 8, 8)


def pictures() -> dict[str, str]:
    """File name -> SVG: up to 32 rows and 8 columns of one tile."""
    return {f"{layout.name}.svg": layout.svg(picture_shape(layout), limit=(32, 8)) for layout in variants()}


def main() -> None:
    (HERE / "layouts.md").write_text(page())
    (HERE / "layouts").mkdir(exist_ok=True)
    for name, text in pictures().items():
        (HERE / "layouts" / name).write_text(text)


if __name__ == "__main__":
    main()
