"""Command line. ``main`` turns every expected failure into one sentence on stderr and an exit status.

Status 0: good. 1: a check failed. 2: bad usage or unreadable input. 128 + n: ended by signal n, after cleaning up.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["main"]


#: arguments of ``open_checkpoint`` that are options here, as messages name them: ``trust='tensors'``, ``repair=True``
_ARGUMENT = re.compile(r"\b(trust|activations|repair|rename)=(?:'(\w+)'|True)")


def _say(text: str) -> None:
    """One line on stderr; arguments of the Python call are written as the options that the user of a command has."""
    text = _ARGUMENT.sub(lambda m: f"--{m[1]} {m[2]}" if m[2] else f"--{m[1]}", text)
    if sys.stderr is None:  # closed before the start; print would take stdout instead
        return
    with contextlib.suppress(OSError):  # or closed since
        print(f"fp4: {' '.join(text.split())}", file=sys.stderr, flush=True)


def _warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    _say(f"warning: {message}")


class _Ended(BaseException):
    """A signal that asks to end; unwinds the stack as Ctrl-C does, so that what is half written is removed."""


#: Ctrl-C, and what job schedulers, containers and closed terminals send
_ENDING = ("SIGINT", "SIGTERM", "SIGHUP", "SIGXCPU")


def _unwinding() -> bool:
    """Whether the interrupted code is already cleaning up after a signal."""
    error = sys.exc_info()[1]
    while error is not None and not isinstance(error, _Ended):
        error = error.__context__
    return error is not None


@contextlib.contextmanager
def _ending() -> Iterator[list[int]]:
    """Turn ending signals into ``_Ended``, note them in the list, and put the handlers back. One that comes while the stack unwinds is
    only noted; one after another that was swallowed (C code that imports a module clears any error) is raised. Ignored ones stay so."""
    got: list[int] = []
    before: dict[int, Any] = {}

    def end(number: int, frame: Any) -> None:
        got.append(number)
        if not _unwinding():
            raise _Ended(number)

    if threading.current_thread() is threading.main_thread():
        for number in (getattr(signal, name, None) for name in _ENDING):
            if number is not None and signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                before[number] = signal.signal(number, end)
    try:
        yield got
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Never shows a traceback for bad input."""
    status = 0
    with _ending() as got:
        try:
            status = _main(argv)
        except _Ended as error:
            got.append(error.args[0])
        except Exception:
            if not got:  # else a module that a swallowed signal left half imported, say
                raise
    if not got:
        return status
    interrupted = got[0] == signal.SIGINT
    _say("interrupted" if interrupted else f"ended by {signal.Signals(got[0]).name}; nothing is left half written")
    return 2 if interrupted else int(128 + got[0])


def _out_of_memory(error: Exception) -> bool:
    """Python's error, or torch's, which is a RuntimeError on a CPU and a subclass of it on a GPU."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "allocate memory" in str(error)


def _main(argv: Sequence[str] | None) -> int:
    try:
        import typer
        from typer.main import get_command
    except ImportError as error:
        _say(f"the command line needs the package {error.name!r}; pip install typer")
        return 2

    from fp4.cli.app import app
    from fp4.errors import Fp4Error

    if "" in (sys.argv[1:] if argv is None else argv):  # a variable of a script that is not set; as a path it would be this folder
        _say("an argument is empty; need a name or a value, or none")
        return 2

    if hasattr(sys.stdout, "reconfigure"):  # names of tensors may hold what the terminal's encoding cannot show
        sys.stdout.reconfigure(errors="backslashreplace")
    # typer uses click's classes, from the package click or from its own copy: take them from a class that it exports
    usage_error: Any = typer.BadParameter.__bases__[0]
    click_exception: Any = usage_error.__bases__[0]
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warning
            status = get_command(app).main(args=None if argv is None else list(argv), prog_name="fp4", standalone_mode=False)
        if sys.stdout is not None:  # closed before the start
            sys.stdout.flush()
        if status == 130:  # typer's status for an interrupt
            raise _Ended(signal.SIGINT)
        return status if isinstance(status, int) else 0
    except (BrokenPipeError, SystemExit):
        # The reader went away (| head); click turns that into SystemExit(1), its only one here, and 1 means a failed check to us.
        # Keep the interpreter from failing again when it flushes.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _say("output was closed before the end")
    except usage_error as error:
        where = error.ctx.command_path if error.ctx else "fp4"
        _say(f"{error.format_message().rstrip('.')}. Try: {where} --help")
    except click_exception as error:
        _say(error.format_message())
    except (KeyboardInterrupt, typer.Abort):
        raise _Ended(signal.SIGINT) from None
    except Fp4Error as error:
        _say(str(error))
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        _say("not enough memory for this; free some, or take a smaller input or an input of smaller tensors")
    except OSError as error:
        named = f"{error.filename}: " if error.filename else ""
        _say(f"{named}{error.strerror or error}")
    except ImportError as error:
        _say(f"this command needs the package {error.name or error!r}, which cannot be imported: {error}")
    return 2
