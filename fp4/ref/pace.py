"""How many elements one torch operator takes at once on a CPU: what is faster at the moment.

torch splits an operator of more than 32768 elements over its threads, which then wait for one another. On idle cores long operators
are nearly as many times faster as there are cores. On cores that others use each wait may last a time slice, and the same work takes
several times longer than on one thread. Nobody can tell beforehand, so groups of blocks are timed, and the way that was faster goes on.
The bytes are the same: each block is computed alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch

__all__ = ["ALONE", "GROUP", "NARROW", "WIDE", "paced"]

#: elements of an operator that stays on the calling thread (torch's grain is 32768); temporaries of 120 KB
NARROW = 30720
#: elements of an operator that torch splits over its threads
WIDE = 8 * NARROW
#: elements of an operator where torch has one thread: fewer steps, and the temporaries still fit the second-level cache
ALONE = 4 * NARROW
#: elements of a group: some 4 ms of quantising on one thread
GROUP = 2 * WIDE
#: groups until the slower way is tried again, at first and at most
_AGAIN, _AT_MOST = 16, 256
#: elements at once on other devices
_DEVICE = 1 << 26


@lru_cache(maxsize=1)
def _keep_memory() -> None:
    """glibc gives memory back to the system after each temporary, and faults it in again for the next, until it has once freed a block that
    is larger: a block of 31 MB (32 is its limit) makes it keep what a group needs. Nothing is written to it.
    """
    torch.empty(31 << 20, dtype=torch.uint8, device="cpu")


def paced(work: Callable[..., None], jobs: Iterable[tuple[Any, ...]], like: torch.Tensor) -> None:
    """``work(chunk, *job)`` for every job, in order: a group of at most GROUP elements in operators of ``chunk`` elements.

    ``like`` says where and how much.
    """
    if like.device.type != "cpu":
        for job in jobs:
            work(_DEVICE, *job)
        return
    alone = torch.get_num_threads() == 1
    if like.numel() <= GROUP or alone:
        if like.numel() > GROUP:
            _keep_memory()
        for job in jobs:
            work(ALONE if alone else NARROW, *job)
        return
    _keep_memory()
    best, usual, wait, left = NARROW, 0.0, _AGAIN, 1
    for job in jobs:
        trial = not left
        chunk = NARROW + WIDE - best if trial else best
        start = time.perf_counter()
        work(chunk, *job)
        took = (time.perf_counter() - start) / max(1, job[0].numel())
        if not trial:
            left = 0 if usual and took > 2 * usual else left - 1
            usual = took
        elif took < usual:
            best, usual, wait, left = chunk, took, _AGAIN, _AGAIN
        else:
            wait = left = min(2 * wait, _AT_MOST)
