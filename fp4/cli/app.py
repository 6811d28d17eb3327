"""The commands. Each imports what it needs when it runs, so that ``fp4 --help`` is quick and ``fp4 doctor`` always works."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fp4.cli.layout import app as layouts
from fp4.cli.table import dump

__all__ = ["app"]

app = typer.Typer(
    name="fp4",
    help="NVFP4 and MXFP4: inspect, convert and check 4-bit checkpoints; layouts; backends.",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="print JSON")]
Trust = Annotated[str, typer.Option(help="config: a contradiction between config and tensors is an error; tensors: believe the tensors")]
Activations = Annotated[
    str | None,
    typer.Option(help="weight_only or dynamic: go on without the activation scales that the config promises"),
]
Repair = Annotated[bool, typer.Option("--repair", help="a NaN scale over a block of zero codes becomes 1.0")]
Rename = Annotated[
    list[str] | None,
    typer.Option("--rename", metavar="CONFIG=FILE", help="how the file spells a module name of the config; may be repeated"),
]


def _opening(trust: str, activations: str | None, repair: bool, rename: list[str] | None) -> dict[str, Any]:
    """Arguments of ``open_checkpoint``; every command that reads a checkpoint has them all."""
    from fp4.errors import Fp4Error

    pairs = [text.partition("=") for text in rename or ()]
    if bad := [text for text, (key, _, value) in zip(rename or (), pairs, strict=True) if not key or not value]:
        raise Fp4Error(f"--rename is {bad[0]!r}; need CONFIG=FILE such as visual=vision")
    return {"trust": trust, "activations": activations, "repair": repair, "rename": {key: value for key, _, value in pairs} or None}


def _version(value: bool) -> None:
    if value:
        import fp4

        print(f"fp4 {fp4.__version__}")
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")] = False,
) -> None:
    """NVFP4 and MXFP4: inspect, convert and check 4-bit checkpoints; layouts; backends."""
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())
        raise typer.Exit(2)


@app.command()
def doctor(json: Json = False) -> None:
    """What is here: versions, devices, backends with the reason of each that is missing, and what would be chosen."""
    from fp4.cli import doctor as module

    report = module.collect()
    print(dump(report) if json else module.render(report))


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="a folder, an index file or one .safetensors file")],
    json: Json = False,
    trust: Trust = "config",
    activations: Activations = None,
    repair: Repair = False,
    rename: Rename = None,
    check: Annotated[bool, typer.Option("--check", help="exit status 1 when there is a suspicious sign")] = False,
) -> None:
    """What a checkpoint holds, tensor by tensor, with suspicious signs."""
    from fp4.cli import inspect as module

    report = module.collect(path, _opening(trust, activations, repair, rename))
    print(dump(report) if json else module.render(report))
    if check and report["suspicious"]:
        raise typer.Exit(1)


@app.command()
def dequantize(
    source: Annotated[Path, typer.Argument(metavar="IN", help="the checkpoint")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="a new folder, or a new .safetensors file")],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "bfloat16",
    trust: Trust = "config",
    activations: Activations = None,
    repair: Repair = False,
    rename: Rename = None,
    fold: Annotated[bool, typer.Option(help="apply pre_quant_scale and low-rank branches to the weight")] = True,
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress bar")] = False,
) -> None:
    """Write the checkpoint with every quantised tensor as the unquantised model holds it."""
    from fp4.cli import dequantize as module

    print(module.run(source, target, dtype, _opening(trust, activations, repair, rename), fold, quiet))


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="the checkpoint")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="a new folder")],
    to: Annotated[str, typer.Option("--to", metavar="DIALECT", help="modelopt, compressed-tensors or gpt-oss")],
    format: Annotated[str | None, typer.Option(help="nvfp4: cast MXFP4 weights, where that is exact; default: keep each format")] = None,
    lossy: Annotated[bool, typer.Option("--lossy", help="cast also what does not fit, and say how many elements changed")] = False,
    trust: Trust = "config",
    activations: Activations = None,
    repair: Repair = False,
    rename: Rename = None,
    json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress bar")] = False,
) -> None:
    """Write a checkpoint in another producer's dialect, and say of each tensor whether that is exact. Exit status 1: refused."""
    from fp4.cli import convert as module

    opening = _opening(trust, activations, repair, rename)
    report, refusal = module.run(source, target, to, format, lossy, opening, quiet or json)
    print(dump(report) if json else module.render(report, bool(refusal)))
    if refusal:
        print(f"fp4: {refusal}", file=sys.stderr)
        raise typer.Exit(1)


@app.command()
def explain(
    op: Annotated[str, typer.Option(help="matmul or moe")] = "matmul",
    format: Annotated[str, typer.Option(help="nvfp4, mxfp4, mxfp8 ...")] = "nvfp4",
    device: Annotated[str | None, typer.Option(help="cuda, cpu, or a capability such as sm90; default: this machine")] = None,
    n: Annotated[int | None, typer.Option(help="output features")] = None,
    k: Annotated[int | None, typer.Option(help="input features")] = None,
    experts: Annotated[int | None, typer.Option()] = None,
    hidden: Annotated[int | None, typer.Option()] = None,
    intermediate: Annotated[int | None, typer.Option()] = None,
    topk: Annotated[int | None, typer.Option()] = None,
    activation: Annotated[str | None, typer.Option(help="silu, swiglu_oai, situ or relu2")] = None,
    gate_up: Annotated[str | None, typer.Option(help="interleaved, gate_up or up_gate")] = None,
    act: Annotated[str | None, typer.Option(help="any, keep, or the format that activations are quantised to: nvfp4, mxfp8 ...")] = None,
    input_scale: Annotated[bool, typer.Option("--input-scale", help="the weight carries a calibrated activation scale")] = False,
    assume_installed: Annotated[bool, typer.Option("--assume-installed", help="rank missing vendor libraries as if present")] = False,
    json: Json = False,
) -> None:
    """Which backend a layer would get, and why not each other one. Needs no GPU: name a capability."""
    from fp4.cli import explain as module

    sizes: dict[str, Any] = {"n": n, "k": k, "experts": experts, "hidden": hidden, "intermediate": intermediate}
    sizes |= {"topk": topk, "activation": activation, "gate_up": gate_up}
    sizes |= {"act": act, "input_scale": input_scale or None}
    module.run(op, format, device, {name: v for name, v in sizes.items() if v is not None}, json, assume_installed)


@app.command()
def verify(
    a: Annotated[Path, typer.Argument(metavar="A", help="a checkpoint, quantised or not")],
    b: Annotated[Path, typer.Argument(metavar="B", help="another one")],
    tolerance: Annotated[float, typer.Option(help="largest relative Frobenius error of a tensor; 0: equal values")] = 0.0,
    fold: Annotated[bool, typer.Option(help="apply pre_quant_scale and low-rank branches, as dequantize does")] = True,
    trust: Trust = "config",
    activations: Activations = None,
    repair: Repair = False,
    rename: Rename = None,
    json: Json = False,
) -> None:
    """Compare two checkpoints tensor by tensor by the values they mean. Exit status 1 on a difference."""
    from fp4.cli import verify as module

    report = module.collect(a, b, tolerance, fold=fold, opening=_opening(trust, activations, repair, rename))
    print(dump(report) if json else module.render(report))
    if report["different"]:
        raise typer.Exit(1)


@app.command()
def error(
    path: Annotated[Path | None, typer.Argument(help="a .safetensors file or checkpoint folder; default: random tensors")] = None,
    name: Annotated[list[str] | None, typer.Option("--name", help="tensor of PATH; may be repeated; default: the largest matrices")] = None,
    format: Annotated[list[str] | None, typer.Option("--format", help="default: all")] = None,
    recipe: Annotated[list[str] | None, typer.Option("--recipe", help="default: all")] = None,
    seed: Annotated[int, typer.Option(help="of the random tensors")] = 0,
    trust: Trust = "config",
    activations: Activations = None,
    repair: Repair = False,
    rename: Rename = None,
    json: Json = False,
) -> None:
    """Quantisation error by format and recipe: signal-to-noise ratio and the largest error."""
    from fp4.cli import error as module

    if path is None and name:
        raise typer.BadParameter(f"--name {name[0]} names a tensor of a file; give its PATH too")
    opening = _opening(trust, activations, repair, rename)
    tensors, stored = (module.random_tensors(seed), {}) if path is None else module.load(path, name, opening)
    rows = [{**row, "stored_as": stored.get(row["tensor"])} for row in module.measure(tensors, format, recipe)]
    print(dump(rows) if json else module.render(rows))


@app.command()
def bench(
    elements: Annotated[int, typer.Option(help="elements of the tensor, in Mi")] = 16,
    tune: Annotated[bool, typer.Option("--tune", help="measure the dense kernels on this GPU and write their table")] = False,
    json: Json = False,
) -> None:
    """Time quantise, dequantise and a product on this machine, each as a ratio to a plain copy or product in the same run."""
    from fp4.cli import bench as module

    if tune:
        rows = module.tune(quiet=json)
        print(dump(rows) if json else f"wrote {len(next(iter(rows.values())))} rows of the table of dense kernels")
        return
    report = module.collect(elements)
    print(dump(report) if json else module.render(report))


app.add_typer(layouts, name="layout")
