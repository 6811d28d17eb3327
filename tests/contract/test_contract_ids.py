"""Top-k ids that name no expert here, or one twice: what the fused kernels get, and what comes of it when an expert overflows."""

from __future__ import annotations

import pretend
import pytest
import torch
from cases import error, poisoned
from emulate import Emulator
from test_contract_moe import BACKENDS, installed_sm90_layout, plain_layer

from fp4.gpu.device import Device


@pytest.mark.parametrize(("backend", "format", "cc", "act"), BACKENDS)
def test_an_id_that_is_no_expert_adds_zero(backend: str, format: str, cc: tuple[int, int], act: str) -> None:
    """On a GPU nobody checks ids: they must not index memory and must not count (the callable is asked directly)."""
    layer = plain_layer(backend, format)
    ids = layer.ids.clone()
    ids[0, 0], ids[2, 1], ids[3, 0] = layer.experts, -1, 2**40
    emulator = Emulator(cc, installed_sm90_layout() if cc == (9, 0) else "B")
    with pretend.gpu(cc, emulator.functions) as recorder, poisoned():
        prepared = layer.prepare(backend, Device.fake(cc), act=act)
        y = prepared.bind()(layer.x, ids, layer.weights, torch.bfloat16)
    sees = {"mxfp8": layer.mxfp8, "keep": layer.plain}.get(act) or (layer.nvfp4_shared if backend == "flashinfer_trtllm" else layer.nvfp4)
    assert error(y, layer.reference(sees, ids=ids)) < 0.008
    for call in recorder.calls:
        for a in call.args:
            if isinstance(a, torch.Tensor) and a.shape == ids.shape and a.dtype == torch.int32 and not packed(a):
                assert int(a.min()) == -1
                assert int(a.max()) < layer.experts


def packed(ids: torch.Tensor) -> bool:
    """Packed routing: the weight in the low half (a small id alone has none)."""
    return bool((ids.abs() > 0xFFFF).any())


@pytest.mark.parametrize("local", [None, (2, 4)])
@pytest.mark.parametrize(("backend", "format", "cc", "act"), BACKENDS)
def test_an_expert_that_overflows_stays_with_its_own_tokens(
    backend: str, format: str, cc: tuple[int, int], act: str, local: tuple[int, int] | None
) -> None:
    """0 * inf is NaN: an id that is not here (-1, another rank's, too large) must not be handed over as a real one with weight zero.

    The outer experts, which clamping an id would name, give infinity; nobody asks for them.
    """
    layer = plain_layer(backend, format, experts=6 if local is None else 4, local=local)
    if format == "nvfp4":
        layer.w2.global_scale[[0, -1]] = 3e38
    else:
        layer.w2.scale[[0, -1]] = 254
    own = 2
    bad = torch.tensor([-1, layer.experts, 2**40, -(2**40), 0 if local else -2, 1 if local else 99, -1])
    ids = torch.stack([bad, torch.full((7,), own)], 1)
    ids[3:] = ids[3:].flip(1)
    emulator = Emulator(cc, installed_sm90_layout() if cc == (9, 0) else "B")
    with pretend.gpu(cc, emulator.functions), poisoned():
        prepared = layer.prepare(backend, Device.fake(cc), act=act)
        y = prepared.bind()(layer.x, ids, layer.weights, torch.bfloat16)
        loud = prepared.bind()(layer.x[:1], torch.tensor([[layer.experts - 1, -1]]), layer.weights[:1], torch.bfloat16)
    assert not bool(loud.isfinite().all()), "the last expert was to overflow"
    assert bool(y.isfinite().all())
    sees = {"mxfp8": layer.mxfp8, "keep": layer.plain}.get(act) or (layer.nvfp4_shared if backend == "flashinfer_trtllm" else layer.nvfp4)
    assert error(y, layer.reference(sees, ids=ids)) < 0.008


@pytest.mark.parametrize(("backend", "format", "cc", "act"), BACKENDS)
def test_an_expert_named_twice_by_one_token_counts_twice(backend: str, format: str, cc: tuple[int, int], act: str) -> None:
    """The fused kernels keep one of the two (trtllm-gen: a race), so the weights are added up before."""
    layer = plain_layer(backend, format, topk=3)
    ids = layer.ids.clone()
    ids[0], ids[1], ids[2], ids[3] = torch.tensor([[2, 2, 0], [3, 0, 3], [2, 2, 2], [-1, 0, -1]])
    emulator = Emulator(cc, installed_sm90_layout() if cc == (9, 0) else "B")
    with pretend.gpu(cc, emulator.functions), poisoned():
        prepared = layer.prepare(backend, Device.fake(cc), act=act)
        y = prepared.bind()(layer.x, ids, layer.weights, torch.bfloat16)
    sees = {"mxfp8": layer.mxfp8, "keep": layer.plain}.get(act) or (layer.nvfp4_shared if backend == "flashinfer_trtllm" else layer.nvfp4)
    assert error(y, layer.reference(sees, ids=ids)) < 0.008
