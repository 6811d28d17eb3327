"""Command line. ``main`` turns every expected failure into one sentence on stderr and an exit status.

Status 0: good. 1: a check failed. 2: bad usage or unreadable input.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

__all__ = ["main"]


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # stderr may be closed too
        print(f"fp4: {' '.join(text.split())}", file=sys.stderr, flush=True)


def _warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    _say(f"warning: {message}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Never shows a traceback for bad input."""
    try:
        import typer
        from typer.main import get_command
    except ImportError as error:
        _say(f"the command line needs the package {error.name!r}; pip install typer")
        return 2

    from fp4.cli.app import app
    from fp4.errors import Fp4Error

    if hasattr(sys.stdout, "reconfigure"):  # names of tensors may hold what the terminal's encoding cannot show
        sys.stdout.reconfigure(errors="backslashreplace")
    # typer uses click's classes, from the package click or from its own copy: take them from a class that it exports
    usage_error: Any = typer.BadParameter.__bases__[0]
    click_exception: Any = usage_error.__bases__[0]
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warning
            status = get_command(app).main(args=None if argv is None else list(argv), prog_name="fp4", standalone_mode=False)
        sys.stdout.flush()
        if status != 130:  # typer's status for an interrupt
            return status if isinstance(status, int) else 0
        _say("interrupted")
    except (BrokenPipeError, SystemExit):
        # The reader went away (| head); click turns that into SystemExit(1), its only one here, and 1 means a failed check to us.
        # Keep the interpreter from failing again when it flushes.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _say("output was closed before the end")
    except usage_error as error:
        where = error.ctx.command_path if error.ctx else "fp4"
        _say(f"{error.format_message()} Try: {where} --help")
    except click_exception as error:
        _say(error.format_message())
    except (KeyboardInterrupt, typer.Abort):
        _say("interrupted")
    except Fp4Error as error:
        _say(str(error))
    except OSError as error:
        named = f"{error.filename}: " if error.filename else ""
        _say(f"{named}{error.strerror or error}")
    except ImportError as error:
        _say(f"this command needs the package {error.name or error!r}, which cannot be imported: {error}")
    return 2
