"""Select the small vendor-made files next to this script from the complete ones: ``python pick.py ORACLES``. See PROVENANCE.md."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
VALUES = ("2x64x64", "1x96x48", "1x33x18", "2x128x256")
SCALES = ("2x8x256", "1x90x576", "2x3x130", "1x4x64")


def memory_order(array: np.ndarray, stride: np.ndarray) -> np.ndarray:
    """The storage as it lies in memory: the files hold C-contiguous copies of column-major tensors."""
    return np.ascontiguousarray(array.transpose(*np.argsort(-stride, kind="stable")))


def triton_kernels(folder: Path) -> dict[str, np.ndarray]:
    """Keys ``in_KIND_SHAPE`` (rows N, columns K) and ``KIND__SHAPE__GENERATIONS``; equal bytes of several generations are kept once."""
    seen: dict[tuple[str, str, bytes], str] = {}
    arrays: dict[tuple[str, str, bytes], np.ndarray] = {}
    out: dict[str, np.ndarray] = {}
    for generation in "ABMCD":
        z = np.load(folder / f"layouts_{generation}.npz")
        for key in z.files:
            kind, shape = key.rsplit("_", 1)
            if key.endswith("__stride") or shape not in VALUES + SCALES:
                continue
            first = shape == "2x128x256"  # one expert is enough
            cut = 24 if shape == "1x90x576" else None  # scale columns kept, see PROVENANCE.md
            if kind in ("value_in", "scale_in"):
                x = np.ascontiguousarray(z[key].swapaxes(-1, -2))[:1] if first else np.ascontiguousarray(z[key].swapaxes(-1, -2))
                out[f"in_{kind[:5]}_{shape}"] = x[..., :cut]
                continue
            y = memory_order(z[key], z[f"{key}__stride"])
            if first:
                if kind.startswith("hopper_value"):
                    continue
                y = y[:1]
            if kind == "blackwell_value":
                continue  # plain rows; generations M, C, D leave their padding uninitialised
            if cut:  # every layout keeps columns in whole tiles that run along the storage rows, so the first bytes of each row are theirs
                y = y[:, :, : cut // 4] if kind == "blackwell_scale" else y[..., : cut * (128 if kind.startswith("gfx") else 32)]
            at = (kind, shape, y.tobytes())
            seen[at] = seen.get(at, "") + generation
            arrays[at] = y
    out.update({f"{kind}__{shape}__{seen[kind, shape, b]}": y for (kind, shape, b), y in arrays.items()})
    return out


def main() -> None:
    root = Path(sys.argv[1])
    flashinfer = dict(np.load(root / "flashinfer" / "block_scale_interleave_h200.npz"))
    flashinfer.update({f"sm90_{k}": v for k, v in np.load(root / "flashinfer" / "sm90_interleave_golden.npz").items()})
    np.savez_compressed(HERE / "flashinfer.npz", **flashinfer)
    np.savez_compressed(HERE / "other_backends.npz", **dict(np.load(root / "other_backends" / "layouts.npz")))
    np.savez_compressed(HERE / "triton_kernels.npz", **triton_kernels(root / "triton_kernels"))


if __name__ == "__main__":
    main()
