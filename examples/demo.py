"""The main job on the shipped sample checkpoints: open, inspect, dequantise, compare with the producing library, run layers, plot errors.

``python examples/demo.py [--out out]``. Every comparison prints PASS or FAIL; the exit status is 1 when one failed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tiny_model import TinyModel

import fp4
from fp4.checkpoint import CheckpointWarning
from fp4.checkpoint.dequantize import dequantize_checkpoint
from fp4.cli import error, inspect, verify
from fp4.cli.table import table
from fp4.ref import matmul as ref
from fp4.tensor import QuantizedTensor

ROOT = Path(__file__).resolve().parents[1]
SAMPLES = ROOT / "tests" / "data" / "checkpoints"
#: float32 sums in another order than the library's
FP32 = 2e-6


class Checks:
    """Comparisons and their limits; nothing is printed as passed that was not compared."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, what: str, value: float, limit: float, detail: str = "") -> None:
        ok = value <= limit  # a NaN fails
        self.rows.append({"what": what, "value": value, "limit": limit, "passed": ok, "detail": detail})
        print(f"  {'PASS' if ok else 'FAIL'}  {what}: {value:.3g} (limit {limit:.3g}) {detail}".rstrip())

    @property
    def failed(self) -> int:
        return sum(not r["passed"] for r in self.rows)


def relative(y: torch.Tensor, want: torch.Tensor) -> float:
    return float((y.double() - want.double()).norm() / want.double().norm())


def heading(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}")


def weights(checks: Checks, out: Path) -> None:
    """Every sample: inspect it, dequantise it, compare each tensor with the producing library's own values."""
    heading("1. Checkpoints: inspect, dequantise, compare with the library that made them")
    for folder in sorted(p.parent for p in SAMPLES.rglob("dequantized_by_library.safetensors")):
        name = str(folder.relative_to(SAMPLES))
        source = folder if (folder / "config.json").is_file() else next(p for p in folder.glob("*.safetensors") if "library" not in p.name)
        report = inspect.collect(source)
        target = out / "inspect" / f"{name.replace('/', '-')}.txt"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(inspect.render(report).replace(str(ROOT), ".") + "\n")
        theirs = load_file(folder / "dequantized_by_library.safetensors")
        # compressed-tensors dequantises in bf16; the others are exact up to one float32 rounding
        limit = 2.0**-8 if name.startswith("compressed_tensors") else 1e-6
        worst = 0.0
        with fp4.open_checkpoint(source) as ck:
            for tensor, want in theirs.items():
                got = ck.dequantize(tensor)
                worst = max(worst, relative(got, want) if got.shape == want.shape else float("inf"))
            formats = " ".join(sorted({str(ck[n].format) for n in ck.names() if isinstance(ck[n], QuantizedTensor)}))
        checks.add(f"{name} ({report['dialect']}, {formats})", worst, limit, f"worst of {len(theirs)} tensors")


def refused(checks: Checks) -> None:
    """A sample whose config contradicts its tensors is refused, and in one sentence."""
    heading("2. A checkpoint that contradicts itself is refused")
    try:
        fp4.open_checkpoint(SAMPLES / "amd_quark" / "trap_fused_experts_left_bf16").close()
        print("  it was opened")
        checks.add("refused", 1.0, 0.0)
    except fp4.CheckpointError as reason:
        print(f"  {str(reason).replace(str(ROOT), '.')}")
        checks.add("refused", 0.0, 0.0)


def streamed(checks: Checks, out: Path) -> None:
    heading("3. Write an unquantised copy and verify it")
    target = out / "gpt_oss_dequantized"
    source = SAMPLES / "gpt_oss_mxfp4" / "hf"
    report = dequantize_checkpoint(source, target, torch.float32)
    print(f"  {report.tensors} tensors, {report.bytes_in:,} bytes read, {report.bytes_out:,} written to {target.name}")
    checks.add("tensors that differ from the source", float(verify.collect(source, target, 0.0)["different"]), 0.0)


def layers(checks: Checks) -> None:
    """One linear against float64, two MoE layers against the oracles, whole models against the library's logits."""
    heading("4. Layers")
    with fp4.open_checkpoint(SAMPLES / "modelopt" / "nvfp4") as ck:
        q = ck["model.layers.0.mlp.down_proj.weight"]
    torch.manual_seed(0)
    x = torch.randn(5, q.k)
    w = fp4.prepare(q, act_dtype=torch.float32, act="keep", backend="reference")
    exact = x.double() @ ref.weight(q, torch.float64).T
    checks.add(f"linear {list(q.shape)} nvfp4, {w.backend}, against float64", relative(fp4.matmul(x, w), exact), FP32)
    same = torch.equal(w.restore().codes, q.codes) and torch.equal(w.restore().scale, q.scale)
    checks.add("  prepare and restore change no byte", float(not same), 0.0)
    for name in ("gpt_oss_mxfp4/hf", "modelopt/nvfp4_qwen3moe"):
        oracle = load_file(SAMPLES / name / "moe_oracle.safetensors")
        ready = TinyModel(SAMPLES / name, backend="reference").experts("model.layers.0.mlp.experts")
        want = oracle["experts_out"]
        y = fp4.moe(oracle["mlp_in"].reshape(want.shape), ready, oracle["topk_ids"], oracle["topk_weights"])
        checks.add(f"MoE of {name} against transformers", relative(y, want), FP32)
    for folder in sorted(p.parent for p in SAMPLES.rglob("expected_logits.safetensors")):
        oracle = load_file(folder / "expected_logits.safetensors")
        logits = TinyModel(folder, backend="reference")(oracle["input_ids"][0])
        checks.add(f"logits of {folder.relative_to(SAMPLES)}", relative(logits, oracle["logits_dequantized_fp32"][0]), FP32)


def errors(checks: Checks, out: Path) -> None:
    """What each format loses on random tensors and on a real weight; a table and a plot."""
    heading("5. Error by format")
    tensors = error.random_tensors(0)
    original = load_file(SAMPLES / "modelopt" / "nvfp4" / "original_bf16.safetensors")
    tensors["down_proj"] = original["model.layers.0.mlp.down_proj.weight"].float()
    rows = error.measure(tensors, recipe_names=["default"])
    (out / "error.json").write_text(json.dumps(rows, indent=1))
    every = error.measure({label: x[:64] for label, x in tensors.items()})  # 16 recipes: fewer rows
    (out / "error_all_recipes.txt").write_text(error.render(every) + "\n")
    labels = list(tensors)
    by = {(r["format"], r["tensor"]): r for r in rows}
    names = list(dict.fromkeys(r["format"] for r in rows))
    cells = [(f, float(by[f, labels[0]]["bits"]), *(by[f, t]["sqnr_db"] for t in labels)) for f in names]
    print(table(("format", "bits", *(f"{t}, dB" for t in labels)), cells, "  "))
    print(f"  (default recipe; all {len(fp4.recipes.names())} recipes: error_all_recipes.txt)")
    # published figures for N(0, 1): NVFP4 20.44 dB, MXFP4 with the scale rounded up 18.75 dB
    for f, expected in (("nvfp4", 20.44), ("mxfp4", 18.75)):
        checks.add(f"SQNR of {f} on a normal tensor, distance from {expected} dB", abs(by[f, "normal"]["sqnr_db"] - expected), 0.1)
    print(f"  plot: {plot(names, labels, by, out)}")


def plot(names: list[str], labels: list[str], by: dict[tuple[str, str], dict[str, Any]], out: Path) -> str:
    """Bars of the signal-to-quantisation-noise ratio, one group a tensor, one colour a format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    colours = ["#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377"]
    figure, axes = plt.subplots(figsize=(10, 5), layout="constrained")
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        at = [j + (i - (len(names) - 1) / 2) * width for j in range(len(labels))]
        label = f"{name} ({by[name, labels[0]]['bits']:g} bits)"
        bars = axes.bar(at, [by[name, t]["sqnr_db"] for t in labels], width * 0.92, label=label, color=colours[i % len(colours)])
        axes.bar_label(bars, fmt="%.1f", fontsize=7, padding=2)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylabel("SQNR in dB (higher is better)")
    axes.set_title("Quantisation error by format, default recipe")
    axes.set_ylim(0, max(r["sqnr_db"] for r in by.values()) * 1.22)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(ncols=len(names), loc="upper center", frameon=False, fontsize=8)
    path = out / "error_by_format.png"
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path.name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for everything that is written")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out / "gpt_oss_dequantized", ignore_errors=True)  # the writer refuses a folder that exists
    warnings.simplefilter("ignore", CheckpointWarning)
    start = time.perf_counter()
    checks = Checks()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(f"fp4 {fp4.__version__}, torch {torch.__version__}, {device}")
    weights(checks, out)
    refused(checks)
    streamed(checks, out)
    layers(checks)
    errors(checks, out)
    (out / "checks.json").write_text(json.dumps(checks.rows, indent=1))
    heading("Result")
    print(f"  {len(checks.rows) - checks.failed} of {len(checks.rows)} comparisons passed, {checks.failed} failed, "
          f"in {time.perf_counter() - start:.0f} s; files in {out}/")  # fmt: skip
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
