"""Pace of CPU work: the same bytes at any chunk, and the choice between one thread and torch's by what is faster at the moment."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

import fp4
from fp4.ref import pace
from fp4.ref import quantize as ref


@pytest.fixture
def two() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def tensors() -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(7, 37, 192, generator=g) * torch.exp2(torch.randint(-8, 8, (7, 37, 1), generator=g).float())
    x[3, 5, 7], x[2, 0, 64] = torch.inf, torch.nan
    return [x, x.bfloat16(), x.transpose(0, 1), x[:, ::2, :160], x[0], x[..., :32].half()]


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8", "amdfp4"])
def test_bytes_do_not_depend_on_the_pace(two: None, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = ["default", "modelopt", "fouroversix"] if format == "nvfp4" else ["default"]
    for x in tensors():
        for recipe in recipes:
            for scale in (None, "per_expert") if format == "nvfp4" and x.ndim == 3 else (None,):
                want = fp4.quantize(x, format, recipe, scale)
                values = fp4.dequantize(want, torch.bfloat16).view(torch.int16)
                with monkeypatch.context() as small:  # groups and chunks that do not divide anything, both ways in turn
                    small.setattr(pace, "GROUP", 4096 + 512)
                    small.setattr(ref, "GROUP", 4096 + 512)
                    small.setattr(pace, "NARROW", 512 + 64)
                    small.setattr(pace, "WIDE", 2048 + 96)
                    small.setattr(pace, "_AGAIN", 2)
                    small.setattr(pace, "_AT_MOST", 3)
                    got = fp4.quantize(x, format, recipe, scale)
                    assert torch.equal(got.codes, want.codes)
                    assert torch.equal(got.scale, want.scale)
                    assert got.global_scale is want.global_scale or torch.equal(got.global_scale, want.global_scale)
                    assert torch.equal(fp4.dequantize(want, torch.bfloat16).view(torch.int16), values)


def run(monkeypatch: pytest.MonkeyPatch, groups: int, seconds: object) -> list[int]:
    """Chunks of each group on a machine where group i at a chunk takes ``seconds(i, chunk)``."""
    clock, used = SimpleNamespace(now=0.0), []
    monkeypatch.setattr(pace.time, "perf_counter", lambda: clock.now)

    def work(chunk: int, part: torch.Tensor) -> None:
        clock.now += seconds(len(used), chunk)  # type: ignore[operator]
        used.append(chunk)

    pace.paced(work, ((torch.empty(pace.GROUP),) for _ in range(groups)), torch.empty(pace.GROUP + 1))
    assert len(used) == groups
    return used


def test_idle_cores_get_wide_operators(two: None, monkeypatch: pytest.MonkeyPatch) -> None:
    used = run(monkeypatch, 400, lambda i, chunk: 1.0 if chunk == pace.NARROW else 0.6)
    assert used.count(pace.NARROW) <= 8
    assert used[:3] == [pace.NARROW, pace.WIDE, pace.WIDE]


def test_busy_cores_get_one_thread(two: None, monkeypatch: pytest.MonkeyPatch) -> None:
    used = run(monkeypatch, 400, lambda i, chunk: 1.0 if chunk == pace.NARROW else 10.0)
    assert used.count(pace.WIDE) <= 6, "each of them costs ten times its share"


def test_cores_that_become_busy_are_left_at_once(two: None, monkeypatch: pytest.MonkeyPatch) -> None:
    used = run(monkeypatch, 400, lambda i, chunk: 1.0 if chunk == pace.NARROW else 0.6 if i < 200 else 8.0)
    assert used[:200].count(pace.NARROW) <= 6
    assert used[200:].count(pace.WIDE) <= 6
    free = run(monkeypatch, 400, lambda i, chunk: 1.0 if chunk == pace.NARROW else 9.0 if i < 100 else 0.6)
    assert free[250:].count(pace.NARROW) <= 4, "and found again when they are free"


def test_small_tensors_stay_on_one_thread(two: None) -> None:
    seen = []
    pace.paced(lambda chunk, part: seen.append(chunk), ((torch.empty(1),) for _ in range(3)), torch.empty(1000))
    assert seen == [pace.NARROW] * 3
    torch.set_num_threads(1)
    pace.paced(lambda chunk, part: seen.append(chunk), ((torch.empty(1),),), torch.empty(pace.GROUP + 1))
    assert seen[3:] == [pace.ALONE]
