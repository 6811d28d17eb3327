"""Backends: discovery, probing and choice. A backend is one module with the names below; ``docs/backends.md`` is the guide.

::

    name: str
    probe() -> Ok | No                     # is the library here and usable? cached, must not raise; no device work
    supports(problem) -> Ok(rank) | No     # pure: looks at the Problem only
    layouts(problem) -> dict[str, Stored]  # how codes and scales are stored ("codes", "scale" or "w13.codes", "w2.scale" ...)
    run(prepared) -> callable              # binds everything once; the callable only launches

    prepare(problem, weights) -> Packed    # optional: arrays beyond what ``layouts`` derives
    restore(prepared) -> ...               # optional: when ``layouts`` alone cannot invert
    warmup(prepared, m_max) -> None        # optional: compile and allocate
    exact_scale_range(problem) -> (a, b)   # optional: block-scale bytes that the kernel reads as the format means them; default: all
    assumed(problem) -> Ok | No            # optional: ``supports`` as if the library were here, for ``explain(assume_installed=True)``

The lowest rank wins: 10 a vendor library on the hardware it was made for, 20 fused vendor paths, 30 our tuned kernels,
40 our plain kernels, 60 correct but slow, 90 the torch reference. ``FP4_BACKEND`` forces, ``FP4_DISABLE`` excludes.
Modules of ``fp4/gpu/backends`` whose file name starts with ``_`` are helpers; other distributions add backends through the
entry-point group ``fp4.backends`` (the entry point is the module).
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from fp4 import env
from fp4.errors import BackendUnavailable, FormatMismatch, Fp4Error, Unsupported, shown, unknown
from fp4.gpu.problem import Problem
from fp4.gpu.storage import Stored

__all__ = ["Choice", "No", "Ok", "Ranking", "backends", "choose", "get", "probe", "rank", "reset"]

log = logging.getLogger("fp4")
#: of a backend: FP4_DISABLE separates with commas, messages end with a line
_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class Ok:
    """Yes. ``rank``: lowest first. ``note``: what will run, in a few words (version, generation, kernel)."""

    rank: int = 0
    note: str = ""

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True)
class No:
    """No, and a reason that tells the user the way out."""

    reason: str

    def __bool__(self) -> bool:
        return False


@dataclass(frozen=True)
class Choice:
    """One line of a ranking."""

    name: str
    verdict: Ok | No

    def __str__(self) -> str:
        if isinstance(self.verdict, Ok):
            return f"{self.name:18s} rank {self.verdict.rank:<3d} {self.verdict.note}".rstrip()
        return f"{self.name:18s} no       {self.verdict.reason}"


class Ranking(list[Choice]):
    """Every backend, usable ones first, lowest rank first."""

    problem: Problem
    #: vendor libraries that are missing were taken as installed; each line says which
    assumed: bool = False
    #: what FP4_BACKEND names: ``prepare`` takes that one or fails
    forced: str | None = None

    @property
    def best(self) -> str | None:
        """The backend that ``prepare`` would take; None when there is none, or when FP4_BACKEND names one that cannot serve."""
        return next((c.name for c in self if c.verdict and self.forced in (None, c.name)), None)

    @property
    def why(self) -> str:
        """The note of the best one, or why there is none."""
        notes = [c.verdict.note for c in self if isinstance(c.verdict, Ok) and c.name == self.best]
        if notes or self.forced is None:
            return notes[0] if notes else "no backend"
        reason = self.reasons.get(self.forced) or unknown(self.forced, backends(), "fp4 doctor")
        return f"FP4_BACKEND={shown(self.forced)} cannot be used: {reason}"

    @property
    def reasons(self) -> dict[str, str]:
        """Backend name -> why not."""
        return {c.name: c.verdict.reason for c in self if isinstance(c.verdict, No)}

    def __repr__(self) -> str:  # explain prints the table; a prompt that echoes the result need not say it again
        return f"Ranking({self.problem} -> {self.best or 'none'}, {len(self)} backends)"

    def __str__(self) -> str:
        head = f"{self.problem}, vendor libraries assumed installed" if self.assumed else str(self.problem)
        lines = [head, *(f"  {c}" for c in self)]
        if self.forced is not None:
            lines.append(f"  FP4_BACKEND is set: prepare takes {self.best}" if self.best else f"  {self.why}; prepare raises this")
        return "\n".join(lines)


def _discover() -> Iterator[tuple[str, ModuleType | No]]:
    package = importlib.import_module("fp4.gpu.backends")
    for info in pkgutil.iter_modules(package.__path__):
        if info.name.startswith("_"):
            continue
        try:
            module = importlib.import_module(f"{package.__name__}.{info.name}")
        except (Exception, SystemExit) as e:  # a broken backend must not take the others with it
            yield info.name, No(f"its module fails to import: {type(e).__name__}: {e}")
            continue
        if hasattr(module, "name") and hasattr(module, "supports"):
            yield module.name, module
    try:
        entries = list(importlib.metadata.entry_points(group="fp4.backends"))
    except Exception as e:  # one broken distribution
        yield "fp4.backends", No(f"the entry points of other distributions cannot be read: {type(e).__name__}: {e}")
        return
    for entry in entries:
        try:
            module = entry.load()
        except (Exception, SystemExit) as e:
            yield entry.name, No(f"entry point {entry.value} fails to load: {type(e).__name__}: {e}; reinstall or remove its distribution")
            continue
        missing = [n for n in ("name", "probe", "supports", "layouts", "run") if not hasattr(module, n)]
        if missing:
            yield (
                entry.name,
                No(f"entry point {entry.value} is no backend: it has no {', '.join(missing)}; docs/backends.md has the protocol"),
            )
        elif not isinstance(module.name, str) or not _NAME.fullmatch(module.name):
            yield entry.name, No(f"entry point {entry.value} calls itself {shown(module.name)}; need letters, digits, '_', '-' and '.'")
        else:
            yield module.name, module


@functools.lru_cache(maxsize=1)
def _all() -> dict[str, ModuleType | No]:
    found: dict[str, ModuleType | No] = {}
    for name, module in _discover():
        if name in found:  # an outside distribution must not take the place of a backend without a word
            found[f"{name} (second)"] = No(f"the name {name!r} is taken by {getattr(found[name], '__name__', 'another')}; rename this one")
        else:
            found[name] = module
    return found


def backends() -> list[str]:
    """Names of all backends, usable or not."""
    return sorted(_all())


@functools.lru_cache(maxsize=64)
def probe(name: str) -> Ok | No:
    """Whether a backend's library is here; cached until ``reset``. A probe that raises is a No with the exception's text."""
    module = _all().get(name)
    if module is None:
        return No(unknown(name, backends(), "fp4 doctor"))
    if isinstance(module, No):
        return module
    return _asked(name, "probe", module.probe)


def _asked(name: str, what: str, ask: Any, *args: Any) -> Ok | No:
    """A backend's answer. One that raises, or answers something else, is a No: it must not take the others with it."""
    try:
        answer = ask(*args)
    except (Exception, SystemExit) as e:
        return No(f"{what} failed: {type(e).__name__}: {e}; a fault of backend {name!r}, FP4_DISABLE={name} hides it")
    if isinstance(answer, Ok) and type(answer.rank) is int and isinstance(answer.note, str):
        return answer
    if isinstance(answer, No) and isinstance(answer.reason, str):
        return answer
    return No(f"{what} answered {shown(answer)}, which is neither Ok nor No, with a whole rank and text; a fault of backend {name!r}")


def reset() -> None:
    """Forget discovered modules and probe results (after installing something, and in tests)."""
    _all.cache_clear()
    probe.cache_clear()


def get(name: str) -> Any:
    """The module of a backend. Raises BackendUnavailable with the reason when it cannot be used."""
    verdict = probe(name)
    if isinstance(verdict, No):
        raise BackendUnavailable(f"backend {shown(name)}: {verdict.reason}")
    return _all()[name]


def layouts(name: str, problem: Problem) -> dict[str, Any]:
    """A backend's ``layouts(problem)``. One that raises, or names no storage for the codes and scales, is a fault of that backend."""
    prefixes = ("",) if problem.op == "matmul" else ("w13.", "w2.")
    found: Any = None
    module = get(name)
    try:
        found = module.layouts(problem)
    except Fp4Error:
        raise
    except Exception as e:
        fault = f"layouts failed: {type(e).__name__}: {e}"
    else:
        known = found if isinstance(found, dict) else {}
        missing = [p + part for p in prefixes for part in ("codes", "scale") if p + part not in known]
        missing += [f"{shown(part)} (need a Stored)" for part, stored in known.items() if not isinstance(stored, Stored)]
        if not missing or (isinstance(found, dict) and hasattr(module, "prepare")):
            kept: dict[str, Any] = found
            return kept
        fault = f"layouts names no storage for {', '.join(missing)}"
    raise BackendUnavailable(f"backend {name!r}: {fault}; a fault of that backend, FP4_DISABLE={name} hides it")


def run(prepared: Any) -> Callable[..., torch.Tensor]:
    """A backend's callable for a prepared weight. What one of another distribution returns is looked at in each call: a result of
    another shape or dtype would go on as numbers."""
    name, module = prepared.backend, get(prepared.backend)
    call = module.run(prepared)
    if not callable(call):
        raise BackendUnavailable(f"backend {name!r}: run returned {shown(call)}, which cannot be called; a fault of that backend")
    if str(getattr(module, "__name__", "")).startswith("fp4.gpu.backends."):
        return call  # type: ignore[no-any-return]
    checked = _checked(name, call, prepared.shape[0] if prepared.problem.op == "matmul" else prepared.shape[1])
    if hasattr(call, "direct"):
        checked.direct = _checked(name, call.direct, prepared.shape[1])  # type: ignore[attr-defined]
    return checked


def _checked(name: str, call: Callable[..., Any], columns: int) -> Callable[..., torch.Tensor]:
    def checked(x: torch.Tensor, *args: Any) -> torch.Tensor:
        y, want = call(x, *args), ((x.shape[0], columns), args[-1], x.device)
        if not isinstance(y, torch.Tensor) or (tuple(y.shape), y.dtype, y.device) != want:
            raise BackendUnavailable(
                f"backend {name!r}: its call returned {shown(y)}; need {want[1]} {list(want[0])} on {want[2]}; a fault of that backend"
            )
        return y

    return checked


def module(name: str) -> Any:
    """The module of a backend whether or not its library is here; None when there is none."""
    found = _all().get(name)
    return None if isinstance(found, No) else found


def assumed_verdict(name: str, problem: Problem) -> Ok | No:
    """``verdict`` as if a missing vendor library were here; the words end in what was assumed."""
    found, ask = probe(name), getattr(module(name), "assumed", None)
    answer = verdict(name, problem)
    if not found and ask is not None and not _disabled(name):
        answer, tag = _asked(name, "assumed", ask, problem), "[assumed installed]"
    else:
        tag = "[installed]" if found else "[not installed]"
    return Ok(answer.rank, f"{answer.note} {tag}".strip()) if isinstance(answer, Ok) else No(f"{answer.reason} {tag}")


def _disabled(name: str) -> bool:
    disabled = env.disabled()
    return name in disabled or getattr(module(name), "family", None) in list(disabled)


def verdict(name: str, problem: Problem) -> Ok | No:
    """One backend's answer: disabled, its probe's reason, or ``supports(problem)``."""
    if _disabled(name):
        return No("disabled by FP4_DISABLE; take it out of the list")
    found = probe(name)
    if isinstance(found, No):
        return found
    answer = _asked(name, "supports", get(name).supports, problem)
    if isinstance(answer, Ok) and found.note and found.note not in answer.note:
        return Ok(answer.rank, f"{answer.note} [{found.note}]".strip())
    return answer


_logged: set[tuple[str, str]] = set()


def rank(problem: Problem, assume_installed: bool = False) -> Ranking:
    """All backends for a problem, best first, each with its rank or its reason; as if every vendor library were here, when told so."""
    ask = assumed_verdict if assume_installed else verdict
    out = Ranking(Choice(name, ask(name, problem)) for name in backends())
    out.assumed, out.forced = assume_installed, env.backend()
    out.sort(key=lambda c: (not c.verdict, c.verdict.rank if isinstance(c.verdict, Ok) else 0, c.name))
    out.problem = problem
    for name in sorted(env.disabled() - set(backends())):
        if ("FP4_DISABLE", name) not in _logged:
            _logged.add(("FP4_DISABLE", name))
            log.warning("FP4_DISABLE names %r, which is no backend; known: %s", name, ", ".join(backends()))
    return out


def choose(problem: Problem, backend: str | None = None, where: str = "prepare") -> str:
    """The backend for a problem. A forced one (argument, else ``FP4_BACKEND``) that cannot serve raises; it never falls through.

    Raises Unsupported with every backend's reason when none can, BackendUnavailable when the forced one is not usable here.
    """
    if backend is not None and not isinstance(backend, str):
        raise FormatMismatch(f"{where}: backend is {shown(backend)}; need the name of one: {', '.join(backends())}")
    forced = backend or env.backend()
    if forced is not None:
        how = "backend=" if backend else "FP4_BACKEND="
        found = probe(forced)
        if isinstance(found, No):
            raise BackendUnavailable(f"{where}: {how}{shown(forced)} cannot be used: {found.reason}")
        answer = verdict(forced, problem)
        if isinstance(answer, No):
            raise Unsupported(f"{where}: {how}{shown(forced)} cannot serve {problem}", {forced: answer.reason})
        return forced
    ranking = rank(problem)
    if ranking.best is None:
        raise Unsupported(f"{where}: no backend for {problem}", ranking.reasons)
    key = (str(problem.device), f"{problem.op}/{problem.format} -> {ranking[0]}")
    if key not in _logged:
        _logged.add(key)
        log.info("%s: %s", *key)
    return ranking.best
