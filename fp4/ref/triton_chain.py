"""Programmatic dependent launch (SM90 and newer): a kernel's blocks start while the kernel before it drains, and wait where they must.

``trigger`` lets the next kernel of the stream start once every block here has called it or ended. ``wait`` returns when the kernel before
has ended and its writes are visible. Both do nothing for kernels that were launched the ordinary way.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["capability", "launched", "overlaps", "trigger", "wait"]


@lru_cache(maxsize=64)
def capability(device: torch.device) -> int:
    """Of the active GPU, as 90; 0 in Triton's interpreter."""
    compiled = hasattr(trigger, "warmup") and type(trigger).__name__ != "InterpretedFunction"
    return int(triton.runtime.driver.active.get_current_target().arch) if compiled else 0


def overlaps(device: torch.device) -> bool:
    """Whether kernels there may be launched so."""
    return capability(device) >= 90


def launched(overlap: bool) -> dict[str, Any]:
    """Options of such a launch."""
    return {"launch_pdl": True} if overlap else {}


@triton.jit
def trigger(ON: tl.constexpr):
    if ON:
        tl.inline_asm_elementwise("griddepcontrol.launch_dependents; mov.u32 $0,0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def wait(ON: tl.constexpr):
    if ON:
        tl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0,0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
