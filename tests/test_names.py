"""A misspelt name of a layout, recipe, format or dialect gets the nearest names first."""

from __future__ import annotations

from typing import Any

import pytest

import fp4
from fp4.checkpoint.convert import convert_checkpoint


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda: fp4.layouts["sf128x4"], "'sf128x4' is not known; did you mean 'sf_128x4'"),
        (lambda: fp4.layouts["sf128x4(a=1)"], "'sf128x4' is not known; did you mean 'sf_128x4'"),
        (lambda: fp4.recipes["model_opt"], "'model_opt' is not known; did you mean 'modelopt'"),
        (lambda: fp4.formats.get("nvpf4"), "'nvpf4' is not known; did you mean 'nvfp4'"),
        (
            lambda: convert_checkpoint("a", "b", "compressed_tensors"),
            "'compressed_tensors' is not known; did you mean 'compressed-tensors'",
        ),
    ],
)
def test_a_wrong_name_gets_the_nearest_first(ask: Any, says: str) -> None:
    with pytest.raises(fp4.Fp4Error) as caught:
        ask()
    assert says in str(caught.value)
    assert len(str(caught.value)) < 200


def test_a_name_like_no_other_gets_the_list() -> None:
    with pytest.raises(fp4.LayoutError, match=rf"^layouts: 'zzz' is not known; fp4.layouts.names\(\) lists all {len(fp4.layouts)}$"):
        fp4.layouts["zzz"]
    with pytest.raises(fp4.FormatMismatch, match="'zzz' is not known; need one of nvfp4, "):
        fp4.formats.get("zzz")
