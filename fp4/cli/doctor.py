"""``fp4 doctor``: facts about this machine that decide what runs."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

from fp4.cli.table import table

__all__ = ["collect", "render"]

#: distributions worth knowing the version of
PACKAGES = (
    "torch", "triton", "numpy", "safetensors", "flashinfer-python", "tokenspeed-triton-kernels", "triton-kernels", "sgl-kernel",
    "sglang-kernel", "sglang", "vllm", "rich", "matplotlib",
)  # fmt: skip


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> tuple[list[dict[str, Any]], str | None]:
    """CUDA devices, and why there are none."""
    import torch

    if not torch.cuda.is_available():
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        return [], f"torch {torch.__version__} is {build} and sees no GPU; the CPU reference serves every layer"
    found = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        found.append({"index": i, "name": p.name, "capability": f"SM{p.major}{p.minor}", "memory_gib": round(p.total_memory / 2**30, 1)})
    return found, None


def _backends() -> list[dict[str, Any]]:
    from fp4.gpu import registry

    rows = []
    for name in registry.backends():
        verdict = registry.probe(name)
        rows.append({"name": name, "usable": bool(verdict), "note": verdict.note if isinstance(verdict, registry.Ok) else verdict.reason})
    return rows


def _choices() -> list[dict[str, Any]]:
    """What a layer of each kind would get on this machine's default device."""
    from fp4 import formats
    from fp4.gpu import registry
    from fp4.gpu.device import Device
    from fp4.gpu.problem import Problem
    from fp4.ref.activation import SiLU

    rows = []
    for op in ("matmul", "moe"):
        for name in ("nvfp4", "mxfp4"):
            extra: dict[str, Any] = {"activation": SiLU(), "gate_up": "gate_up"} if op == "moe" else {}
            ranking = registry.rank(Problem(op=op, format=formats.get(name), device=Device.of(None), **extra))
            rows.append({"op": op, "format": name, "backend": ranking.best, "note": ranking.why})
    return rows


def collect() -> dict[str, Any]:
    """Everything as plain values. A part that fails is reported as its error and hides nothing else."""
    import fp4
    from fp4 import env
    from fp4.errors import Fp4Error, unknown

    report: dict[str, Any] = {
        "fp4": fp4.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "environment": env.settings(),
        "problems": [],
    }
    report["devices"], report["no_gpu"] = [], None
    for part, read in (("devices", _devices), ("backends", _backends), ("choices", _choices)):
        try:
            value = read()
        except Exception as error:  # a broken driver or library is what this command has to tell
            report["problems"].append(f"{part}: {type(error).__name__}: {error}")
            continue
        if part == "devices":
            report["devices"], report["no_gpu"] = value
        else:
            report[part] = value
    try:
        env.strict()
    except Fp4Error as error:
        report["problems"].append(str(error))
    for name in env.unknown_settings():
        report["problems"].append(f"environment: {unknown(name, env.NAMES, '')}; nothing reads it")
    if "triton" not in report["packages"]:
        report["problems"].append("triton is not installed: no GPU kernels and no Triton reference; pip install 'triton>=3.6'")
    if report["packages"].get("triton-kernels"):
        report["problems"].append("the distribution 'triton-kernels' on the package index is another project; the backend ignores it")
    return report


def render(report: dict[str, Any]) -> str:
    lines = [f"fp4 {report['fp4']}  Python {report['python']}  {report['platform']}"]
    lines.append("packages   " + "  ".join(f"{name} {version}" for name, version in report["packages"].items()))
    for d in report["devices"]:
        lines.append(f"device     cuda:{d['index']} {d['name']} {d['capability']} {d['memory_gib']} GiB")
    if report["no_gpu"]:
        lines.append(f"device     {report['no_gpu']}")
    for name, value in report["environment"].items():
        lines.append(f"set        {name}={value}")
    if report.get("backends"):
        rows = [(b["name"], b["usable"], b["note"]) for b in report["backends"]]
        lines += ["", table(("backend", "usable", "note"), rows)]
    if report.get("choices"):
        chosen = [(c["op"], c["format"], c["backend"], c["note"]) for c in report["choices"]]
        lines += ["", table(("layer", "format", "chosen", "note"), chosen)]
    if report["problems"]:
        lines += ["", *(f"problem: {p}" for p in report["problems"])]
    return "\n".join(lines)
