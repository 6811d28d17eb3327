"""CPU quantisation on several threads: the same bytes, the caller's modes, one exception, torch's number of threads as it was."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fp4
from fp4.ref import quantize as ref
from fp4.ref import threads


@pytest.fixture(params=[2, 3])
def several(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """That many threads for tensors of any size, in groups that are small and do not divide them."""
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "SMALL", 1)
    monkeypatch.setattr(ref, "GROUP", 4096 + 512)
    monkeypatch.setattr(ref, "WIDE", 1024 + 256)
    torch.set_num_threads(request.param)
    yield request.param
    assert torch.get_num_threads() == request.param
    torch.set_num_threads(before)


def tensors() -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(7, 37, 192, generator=g) * torch.exp2(torch.randint(-8, 8, (7, 37, 1), generator=g).float())
    x[3, 5, 7], x[2, 0, 64] = torch.inf, torch.nan
    return [x, x.bfloat16(), x.transpose(0, 1), x[:, ::2, :160], x[0], x[..., :32].half()]


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8", "amdfp4"])
def test_bytes_do_not_depend_on_threads(several: int, format: str) -> None:
    recipes = ["default", "modelopt", "fouroversix"] if format == "nvfp4" else ["default"]
    for x in tensors():
        for recipe in recipes:
            for scale in (None, "per_expert") if format == "nvfp4" and x.ndim == 3 else (None,):
                q = fp4.quantize(x, format, recipe, scale)
                values = fp4.dequantize(q, torch.bfloat16)
                torch.set_num_threads(1)
                want = fp4.quantize(x, format, recipe, scale)
                assert torch.equal(q.codes, want.codes)
                assert torch.equal(q.scale, want.scale)
                assert q.global_scale is want.global_scale or torch.equal(q.global_scale, want.global_scale)
                assert torch.equal(values.view(torch.int16), fp4.dequantize(want, torch.bfloat16).view(torch.int16))
                torch.set_num_threads(several)


def test_modes_of_the_caller_hold(several: int) -> None:
    x = torch.randn(64, 256)
    with torch.inference_mode():
        assert fp4.dequantize(fp4.quantize(x, "nvfp4")).is_inference()
    assert not fp4.dequantize(fp4.quantize(x.requires_grad_(False), "mxfp4")).requires_grad

    class Count(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            Count.seen += 1
            return func(*args, **(kwargs or {}))

    with Count():
        fp4.quantize(x, "nvfp4")
    assert Count.seen > 50, "a mode of this thread sees every operator"


def test_one_exception_and_no_thread_left(several: int) -> None:
    done: list[int] = []

    def work(i: int) -> None:
        if i == 5:
            raise RuntimeError("piece 5")
        done.append(i)

    before = threading.active_count()
    with pytest.raises(RuntimeError, match="piece 5"):
        threads.share(work, ((i,) for i in range(10_000)), torch.zeros(1))
    assert threading.active_count() == before
    assert len(done) < 10_000

    def jobs() -> Iterator[tuple[int]]:
        yield (0,)
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        threads.share(work, jobs(), torch.zeros(1))
    assert torch.get_num_threads() == several


def test_work_is_shared(several: int) -> None:
    """As many threads as torch has, none of them the caller's, each with one thread of its own inside torch."""
    together, names, inside = threading.Barrier(several, timeout=20), set(), []

    def work(i: int) -> None:
        together.wait()
        names.add(threading.current_thread().name)
        inside.append(torch.get_num_threads())

    threads.share(work, ((i,) for i in range(2 * several)), torch.zeros(1))
    assert len(names) == several
    assert set(inside) == {1}
    assert threading.current_thread().name not in names


def test_small_tensors_and_single_threads_start_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "Thread", lambda **_: pytest.fail("a thread was started"))
    fp4.dequantize(fp4.quantize(torch.randn(1000, 1024), "nvfp4"))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        fp4.dequantize(fp4.quantize(torch.randn(2048, 1024), "nvfp4"))
    finally:
        torch.set_num_threads(before)
