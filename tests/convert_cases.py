"""What the tests of conversions share: samples, dialects, bounds, and comparison by bytes and by meaning."""

from __future__ import annotations

from pathlib import Path

from fp4.checkpoint.index import Store
from fp4.cli.verify import collect

SAMPLES = Path(__file__).parent / "data" / "checkpoints"
MO, CT, GO = "modelopt", "compressed-tensors", "gpt-oss"
#: largest relative change of a float32 by one reciprocal, and by two with the reading's own
ONCE, TWICE = 2.0**-24, 3 * 2.0**-24


def stored(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Name -> (dtype, shape, bytes) of everything in a checkpoint."""
    store = Store.open(folder)
    out = {n: (e.dtype, e.shape, store.bytes(n).contiguous().numpy().tobytes()) for n, e in store.entries.items()}
    store.close()
    return out


def same(a: Path, b: Path, tolerance: float = 0.0) -> None:
    report = collect(a, b, tolerance)
    assert not report["different"], [r for r in report["tensors"] if not r["same"]][:3]
