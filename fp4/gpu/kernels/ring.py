"""The ring of slots through which the warps that fetch hand chunks to those that multiply: what the warp-specialised Hopper kernels share.

A slot has two mbarriers: ``full`` tells that its chunk is there, ``empty`` that the products which read it are done. A slot and the
phase of its mbarriers run along together; who fills starts with phase 1, for which a fresh mbarrier does not wait. Importing this module
needs ``triton.experimental.gluon``; names that moved between Triton releases are looked up by attribute.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy as _ac
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from fp4.gpu.kernels.gluon_decode import barrier

arrive = _ac.mbarrier_arrive
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def mbarriers(XS: gl.constexpr, FULL: gl.constexpr, EMPTY: gl.constexpr):
    """(full, empty) of XS slots, for FULL and EMPTY arrivals."""
    full = gl.allocate_shared_memory(gl.int64, [XS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [XS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(XS):
        mbarrier.init(full.index(i), count=FULL)
        mbarrier.init(empty.index(i), count=EMPTY)
    return full, empty


@gluon.jit
def following(slot, phase, XS: gl.constexpr):
    """The next slot and its phase."""
    wrap = slot == XS - 1
    return gl.where(wrap, 0, slot + 1), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def release(empty, slot, XS: gl.constexpr):
    """Hand the slot in front of ``slot`` back to the producer, each thread for itself.

    Its number comes from ``slot``, not from a variable that remembers it: Triton carries a variable through a loop only if tracing the body
    once changes it, and with one slot a round ``last = slot`` is an alias of the slot in front of the loop. All rounds then released
    that one, and the producer waited for ever.
    """
    arrive(empty.index(gl.where(slot == 0, XS - 1, slot - 1)), increment_count=False)


@gluon.jit
def into_buffer(sy, r):
    """The tile r [rows of W, rows of x] of y into the buffer sy, once the tile in front has left that; ``tma_store`` may then send it."""
    tma.store_wait(0)
    barrier()
    sy.permute([1, 0]).store(r.to(sy.dtype))
    fence_async_shared()
    barrier()
