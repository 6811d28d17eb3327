"""tests/gpu/twice.py repeats the barriers of a whole block and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "gpu"))

from twice import twice

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize("whole", ["barrier.sync \t1;", "bar.sync \t0;", "bar.sync.aligned 0;", "barrier.cta.sync 1;"])
def test_whole_block(whole):
    assert twice(f"@%p1 st.shared.b8 [%r1], %r2;\n{whole}\nret;") == f"@%p1 st.shared.b8 [%r1], %r2;\n{whole} {whole}\nret;"


OTHER = ("bar.sync \t0, 256;", "barrier.sync 2, 128;", "bar.warp.sync -1;", "bar.arrive 1, 64;", "mbarrier.init.shared::cta.b64 [%r1], 1;")


@pytest.mark.parametrize("part", OTHER)
def test_part_of_a_block(part):
    assert twice(part) == part
