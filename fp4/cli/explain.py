"""``fp4 explain``."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from typing import Any

from fp4.cli.table import dump

__all__ = ["run"]


def run(op: str, format: str, device: str | None, sizes: dict[str, Any], json: bool, assume_installed: bool = False) -> None:
    """Print the ranking of ``fp4.explain``."""
    import fp4
    from fp4.gpu.registry import Ok
    from fp4.ref import activation

    if "activation" in sizes:
        sizes["activation"] = activation.get(sizes["activation"])
    if not json:
        fp4.explain(op=op, format=format, device=device, assume_installed=assume_installed, **sizes)
        return
    with redirect_stdout(StringIO()):
        ranking = fp4.explain(op=op, format=format, device=device, assume_installed=assume_installed, **sizes)
    rows = []
    for choice in ranking:
        v = choice.verdict
        rows.append({"backend": choice.name} | ({"rank": v.rank, "note": v.note} if isinstance(v, Ok) else {"reason": v.reason}))
    print(dump({"problem": str(ranking.problem), "assumed_installed": ranking.assumed, "chosen": ranking.best, "backends": rows}))
