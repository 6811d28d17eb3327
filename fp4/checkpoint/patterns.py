"""Matching module names with the patterns that producers write: one class a producer's rule, never a shared matcher.

All of them count their matches, so that a pattern which matches nothing can be reported (Quark#25: 0 of 1550 entries
matched and excluded layers were read as FP4).
"""

from __future__ import annotations

import fnmatch
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from fp4.errors import CheckpointError

__all__ = ["Matches", "Names", "match_exact_or_prefix", "match_fnmatch", "match_path_prefix", "match_regex_or_exact"]

#: leading segments that engines add, drop or reorder: lm_head must match language_model.lm_head
_WRAPPERS = frozenset({"model", "language_model"})


def canonical(name: str) -> str:
    """The name without leading ``model`` and ``language_model`` segments."""
    if not name.startswith(("model.", "language_model.")):
        return name
    parts = name.split(".")
    i = 0
    while i < len(parts) - 1 and parts[i] in _WRAPPERS:
        i += 1
    return ".".join(parts[i:])


class Names:
    """Module names of a checkpoint, spelled as its config spells them, sorted for prefix search.

    ``rename`` maps the config's spelling to the checkpoint's, by whole dotted segments (``{"visual": "vision"}``).
    """

    def __init__(self, modules: Iterable[str], rename: Mapping[str, str] | None = None) -> None:
        back = sorted(((v.strip("."), k.strip(".")) for k, v in (rename or {}).items()), key=lambda p: -len(p[0]))
        self.spelled: dict[str, str] = {m: self._back(m, back) for m in modules} if back else {m: m for m in modules}
        self.by_spelling: dict[str, list[str]] = {}
        for module, spelling in self.spelled.items():
            self.by_spelling.setdefault(spelling, []).append(module)
        self.sorted = sorted(self.by_spelling)
        self._canonical: Names | None = None

    @staticmethod
    def _back(module: str, back: list[tuple[str, str]]) -> str:
        padded = f".{module}."
        for new, old in back:
            if f".{new}." in padded:
                padded = padded.replace(f".{new}.", f".{old}.", 1)
                break
        return padded.strip(".")

    def canonical(self) -> Names:
        """The same names without wrapper segments."""
        if self._canonical is None:
            self._canonical = Names(())
            self._canonical.spelled = {m: canonical(s) for m, s in self.spelled.items()}
            for module, spelling in self._canonical.spelled.items():
                self._canonical.by_spelling.setdefault(spelling, []).append(module)
            self._canonical.sorted = sorted(self._canonical.by_spelling)
        return self._canonical

    def starting(self, prefix: str) -> list[str]:
        """Spellings that start with prefix, by characters."""
        low = bisect_left(self.sorted, prefix)
        high = bisect_left(self.sorted, prefix + chr(0x10FFFF))
        return self.sorted[low:high]

    def under(self, path: str) -> list[str]:
        """The module ``path`` and all modules below it."""
        exact = [path] if path in self.by_spelling else []
        return exact + self.starting(path + ".")


class Matches:
    """Result of matching patterns: module -> first pattern that matched, and how many modules each pattern matched."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}
        self.counts: dict[str, int] = {}
        #: patterns that matched only after wrapper segments were ignored
        self.loose: dict[str, int] = {}

    def add(self, pattern: str, names: Names, spellings: Iterable[str]) -> int:
        found = 0
        for spelling in spellings:
            for module in names.by_spelling[spelling]:
                self.of.setdefault(module, pattern)
                found += 1
        return found

    def unmatched(self) -> list[str]:
        return [p for p, n in self.counts.items() if n == 0 and not self.loose.get(p)]


def _spellings_exact_or_prefix(names: Names, pattern: str) -> list[str]:
    head = pattern[:-1]
    if pattern.endswith("*") and not any(c in head for c in "*?["):
        return names.starting(head)
    if any(c in pattern for c in "*?["):
        rule = re.compile(fnmatch.translate(pattern))
        return [s for s in names.sorted if rule.match(s)]
    return names.under(pattern)


def match_exact_or_prefix(patterns: Sequence[str], names: Names) -> Matches:
    """ModelOpt: a name (with the modules below it), or ``p*`` = whatever starts with p by characters.

    ``*`` elsewhere is fnmatch, as TensorRT-LLM reads these lists. A pattern that matches nothing is tried again with the
    wrapper segments ``model`` and ``language_model`` ignored on both sides, and is then reported as a loose match.
    """
    matches = Matches()
    for pattern in patterns:
        matches.counts[pattern] = matches.add(pattern, names, _spellings_exact_or_prefix(names, pattern))
        if not matches.counts[pattern]:
            loose = names.canonical()
            found = matches.add(pattern, loose, _spellings_exact_or_prefix(loose, canonical(pattern)))
            if found:
                matches.loose[pattern] = found
    return matches


def _compiled(pattern: str, where: str) -> re.Pattern[str]:
    """The expression of a ``re:`` pattern. Raises CheckpointError when it is not one."""
    try:
        return re.compile(pattern[3:])
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{where}: {pattern!r} is not a regular expression: {error}") from None


def match_regex_or_exact(patterns: Sequence[str], names: Names, where: str) -> Matches:
    """compressed-tensors: ``re:`` is a regular expression matched from the start (not a full match), else an exact name.

    Class names (``Linear``) cannot be seen in a file; the caller deals with them. Raises CheckpointError for a bad expression.
    """
    matches = Matches()
    for pattern in patterns:
        if pattern.startswith("re:"):
            rule = _compiled(pattern, where)
            matches.counts[pattern] = matches.add(pattern, names, [s for s in names.sorted if rule.match(s)])
            continue
        matches.counts[pattern] = matches.add(pattern, names, [pattern] if pattern in names.by_spelling else [])
        if not matches.counts[pattern]:
            loose, bare = names.canonical(), canonical(pattern)
            found = matches.add(pattern, loose, [bare] if bare in loose.by_spelling else [])
            if found:
                matches.loose[pattern] = found
    return matches


def match_fnmatch(patterns: Sequence[str], names: Names, where: str) -> Matches:
    """Quark: fnmatch on the module path; ``re:`` is a regular expression, as engines read such lists."""
    matches = Matches()
    for pattern in patterns:
        if pattern.startswith("re:"):
            rule = _compiled(pattern, where)
            spellings = [s for s in names.sorted if rule.match(s)]
        elif any(c in pattern for c in "*?["):
            rule = re.compile(fnmatch.translate(pattern))
            spellings = [s for s in names.sorted if rule.match(s)]
        else:
            spellings = [pattern] if pattern in names.by_spelling else []
        matches.counts[pattern] = matches.add(pattern, names, spellings)
        if not matches.counts[pattern] and not any(c in pattern for c in "*?["):
            loose, bare = names.canonical(), canonical(pattern)
            found = matches.add(pattern, loose, [bare] if bare in loose.by_spelling else [])
            if found:
                matches.loose[pattern] = found
    return matches


def match_path_prefix(patterns: Sequence[str], names: Names) -> Matches:
    """transformers mxfp4: a module path that also covers what lies below it; ``*`` stands for one or more segments."""
    matches = Matches()
    for pattern in patterns:
        if "*" in pattern:
            rule = re.compile(
                r"\.".join(re.escape(p).replace(r"\*", r"[^.]*" if p != "*" else ".+?") for p in pattern.split(".")) + r"(\.|$)"
            )
            spellings = [s for s in names.sorted if rule.match(s)]
        else:
            spellings = names.under(pattern)
        matches.counts[pattern] = matches.add(pattern, names, spellings)
    return matches
