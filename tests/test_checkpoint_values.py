"""Values of less usual tensors: stacked FP8 experts, E8M0 scales without a type, folded weights, multipliers near zero."""

from __future__ import annotations

from pathlib import Path

import checkpoint_builder as cb
import pytest
import torch

import fp4

SVD = Path(__file__).parent / "data" / "checkpoints" / "modelopt" / "nvfp4_svd"
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize("shape", [(2,), (2, 1, 1), (2, 160, 1), (2, 160), (2, 2, 1)])
def test_each_expert_of_stacked_fp8_has_its_own_scales(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """One scale an expert, one a row, one a block of 128 x 128."""
    weight = torch.stack([cb.fp8_weight(160, 64, seed=i) for i in range(2)])
    scale = torch.rand(shape) + 0.5
    tensors = {"m.experts.weight": weight, "m.experts.weight_scale": scale, "x.weight": cb.floats(4, 4)}
    rows = scale.repeat_interleave(128, 1)[:, :160] if shape == (2, 2, 1) else scale.reshape(2, -1, 1)
    with fp4.open_checkpoint(cb.Example(tensors, {}, nested=cb.nested_config("FP8", group=None, exclude=["x"])).write(tmp_path)) as ck:
        assert torch.equal(ck.dequantize("m.experts.weight"), weight.float() * rows)
        assert torch.equal(ck["m.experts.weight"], ck.dequantize("m.experts.weight"))  # type: ignore[arg-type]


def test_fp8_scales_of_plain_bytes_are_powers_of_two(tmp_path: Path) -> None:
    """DeepSeek files from before safetensors had F8_E8M0: the same bytes as U8."""
    ex = cb.deepseek()
    for name, t in ex.tensors.items():
        if name.endswith(".scale"):
            ex.tensors[name] = t.view(torch.uint8)
    with fp4.open_checkpoint(ex.write(tmp_path)) as ck:
        for name, value in ex.want.items():
            assert torch.equal(ck.dequantize(name), value), name


@pytest.mark.filterwarnings("ignore::fp4.checkpoint.base.CheckpointWarning")
def test_a_folded_weight_is_rounded_once() -> None:
    """The smoothing vector and the low-rank branch meet the exact values, not values that are bfloat16 already."""
    with fp4.open_checkpoint(SVD) as ck:
        folded = ck.dequantize(DOWN, torch.bfloat16, fold=True)
        assert torch.equal(folded, ck.dequantize(DOWN, fold=True).bfloat16())


@pytest.mark.parametrize(("second", "told"), [(1e-10, True), (2e-9, False)])
def test_a_multiplier_that_looks_like_its_reciprocal_is_told(tmp_path: Path, second: float, told: bool) -> None:
    ex = cb.modelopt(act=False)
    ex.nested = cb.nested_config("W4A16_NVFP4")
    ex.tensors["model.layers.0.mlp.down_proj.weight_scale_2"] = cb.f32(second)
    with fp4.open_checkpoint(ex.write(tmp_path)) as ck:
        if told:
            with pytest.warns(UserWarning, match="need 1e-9 to 100; .* the scale looks like its own reciprocal"):
                ck[DOWN]
        else:
            ck[DOWN]
        assert any("reciprocal" in w for w in ck.warnings) == told
