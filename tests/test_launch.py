"""Launches with a box for TMA: what goes to Triton's C launcher is what Triton's own wrapper would send."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.kernel
triton = pytest.importorskip("triton")
from triton.backends.nvidia import driver  # noqa: E402

from fp4.gpu.kernels import launch  # noqa: E402

META = {"swizzle": 3, "elem_size": 2, "elem_type": 9, "block_size": [64, 64], "fp4_padded": False}
flat = pytest.mark.skipif(
    not hasattr(driver, "_BASE_ARGS_FORMAT_LEN"),
    reason="this Triton's launchers take their arguments as one tuple; fp4 calls them as they are",
)


@pytest.fixture
def encoded(monkeypatch):
    """Boxes that Triton encodes; an encoding is a string."""
    made = []

    def fill(address, *how):
        made.append(address)
        return f"map of {address} {how}"

    active = SimpleNamespace(utils=SimpleNamespace(fill_tma_descriptor=fill))
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))
    return made


def bound(sent):
    """A kernel (box, i32, constexpr), its wrapper as Triton makes it, and the head of every launch."""
    kernel = launch.Kernel(SimpleNamespace(metadata=SimpleNamespace(shared=0, tensordesc_meta=[META])))
    wrapper = driver.wrap_handle_tensordesc(
        lambda *args: sent.append(args), {"x": "tensordesc<bf16[64, 64],...>", "M": "i32", "B": "constexpr"}, [META]
    )
    kernel._bind_box(wrapper, ("function", "cooperative", "pdl", "scratch", "profile", "packed", "metadata", "enter", "exit"))
    kernel._ready = True
    return kernel, wrapper


@flat
def test_a_box_is_sent_as_triton_sends_it(encoded):
    sent = []
    kernel, wrapper = bound(sent)
    for address, rows, columns in ((4096, 17, 8192), (4096, 300, 8192), (4096, 17, 128)):
        kernel(5, 1, 77, *kernel.box(address, rows, columns), 17, 32)
        wrapper(5, 1, 1, 77, *kernel._direct[1], launch.Box(address, rows, columns), 17, 32)
        assert sent[-1] == sent[-2]
        assert list(sent[-1][13:18]) == [sent[-1][13], rows, columns, columns, 1]


@flat
def test_encodings_are_kept_but_not_without_end(encoded):
    sent = []
    kernel, _ = bound(sent)
    for _ in range(3):
        kernel.box(4096, 17, 64)
    assert len(encoded) == 1
    for address in range(0, 4096 * 600, 4096):
        kernel.box(address, 17, 64)
    assert len(kernel._boxes) <= 256


def test_other_launchers_get_the_box_itself():
    kernel = launch.Kernel(SimpleNamespace(metadata=SimpleNamespace(shared=0)))
    kernel._ready = True
    (box,) = kernel.box(4096, 17, 64)
    assert (box.data_ptr(), box.shape, box.strides) == (4096, [17, 64], [64, 1])
    kernel._bind_box(print, ())  # not a wrapper
    assert kernel._expand is None
