"""Runs a script with every barrier of a whole block compiled as two of the same, for compute-sanitizer's racecheck.

compute-sanitizer --tool racecheck python tests/gpu/twice.py tests/gpu/sanitize_dense.py 0/1 tiles

Two barriers with nothing between order exactly what one orders, so a race between the kernel's own accesses stays a race. The tool needs
it: where some warps of a block also meet at a barrier of their own, as the warps that multiply do, racecheck 2025.3.1 takes the barrier of
the whole block before or behind it for missing and reports what Triton's warp_specialize hands to its other warps. ``handover.cu`` shows
it in a program of 40 lines that has no race, and that the reports end with the barrier written twice.
"""

from __future__ import annotations

import os
import re
import runpy
import sys


def twice(ptx: str) -> str:
    """The PTX with each ``bar.sync`` and ``barrier.sync`` without a thread count, all warps of the block, repeated."""
    return re.sub(r"\b(bar(?:rier)?(?:\.cta)?\.sync(?:\.aligned)?\s+\d+;)", r"\1 \1", ptx)


if __name__ == "__main__":
    os.environ["TRITON_CACHE_DIR"] = os.path.join(os.environ.get("TRITON_CACHE_DIR", "/tmp/triton"), "twice")
    from triton.backends.nvidia.compiler import CUDABackend

    make = CUDABackend.make_ptx
    CUDABackend.make_ptx = lambda *a: twice(make(*a))
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
