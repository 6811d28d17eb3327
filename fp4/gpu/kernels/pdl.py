# mypy: ignore-errors
"""Programmatic dependent launch (SM90 and newer): a kernel's blocks start while the kernel before it drains, and wait where they must.

``trigger`` lets the next kernel of the stream start once every block here has called it or ended. ``wait`` returns when the kernel before
has ended and its writes are visible. Both do nothing for kernels that were launched the ordinary way, which is the default (dense: field
PDL of a table row; mixture of experts: field ``overlap`` of a plan). Rules of the chains here: the first kernel of a call is an
ordinary launch, so nothing older runs; every other one calls ``wait`` before it reads what the call wrote, and before it ends, so that
the end of one kernel means the end of all before it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fp4.ref.triton_chain import trigger, wait

__all__ = ["gl_trigger", "gl_wait", "trigger", "wait"]


@gluon.jit
def gl_trigger(ON: gl.constexpr):
    if ON:
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; mov.u32 $0,0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def gl_wait(ON: gl.constexpr):
    if ON:
        gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0,0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
