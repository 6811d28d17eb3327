"""Independent pieces of CPU work on as many threads as torch would use.

torch's own parallel operators meet at the end of every operator: a chunk's steps are too short for that, and on a machine that does
something else each meeting may wait for a time slice. Here each thread takes a group of chunks and runs all steps on it, every operator on
that thread alone, so threads meet once, at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

__all__ = ["share"]

#: elements below which starting threads does not pay
SMALL = 1 << 21


def _threads(like: torch.Tensor) -> int:
    """1 where torch is told to use one (a data loader's worker), and where a mode of the calling thread must see every operator."""
    if like.device.type != "cpu" or like.numel() < SMALL or type(like) is not torch.Tensor:
        return 1
    if _get_current_dispatch_mode() is not None or torch._C._len_torch_function_stack():
        return 1
    return torch.get_num_threads()


def share(work: Callable[..., None], jobs: Iterable[tuple[Any, ...]], like: torch.Tensor) -> None:
    """``work(*job)`` for every job, in no order; ``like`` says where and how much. Jobs are made one at a time, as threads ask for them.

    Whatever a job raises is raised here, after the other threads have finished theirs.
    """
    threads = _threads(like)
    if threads == 1:
        for job in jobs:
            work(*job)
        return
    source, lock, raised = iter(jobs), threading.Lock(), list[BaseException]()
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    ready = threading.Barrier(threads + 1)

    def take() -> None:
        try:
            torch.get_num_threads()  # the first question of a thread takes over the number for new threads; then it has its own
            torch.set_num_threads(1)  # of this thread, and of new threads until the caller sets theirs again
            ready.wait()
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):  # both belong to a thread
                while not raised:
                    with lock:
                        job = next(source, None)
                    if job is None:
                        return
                    work(*job)
        except BaseException as error:
            raised.append(error)

    pool = [threading.Thread(target=take, name=f"fp4-{i}", daemon=True) for i in range(threads)]
    for thread in pool:
        thread.start()
    try:
        ready.wait()
        torch.set_num_threads(threads)  # what this thread has had: again the number for new threads
        for thread in pool:
            thread.join()
    except BaseException as error:  # Ctrl-C: the threads end after the job they have
        raised.append(error)
        for thread in pool:
            thread.join()
    if raised:
        raise raised[0]
