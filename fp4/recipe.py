"""Every numeric choice of a quantiser, as one frozen value, and the named presets.

A Recipe answers, for one block of a tensor: how amax becomes a scale byte, how the scale byte becomes a multiplier, how a
scaled value becomes a code, and what happens to zeros, NaN and infinity. Two libraries that agree on a Recipe agree on bytes.

Notation: ``amax`` = max |x| of a block (float32, exact), ``g`` = global_scale, the multiplier of the tensor, ``gs`` = 1/g, the
encode scale, ``d`` = the decoded scale byte, ``RN`` = rounding to nearest even in float32. Every product and quotient below is
one float32 operation, rounded by itself, never fused.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from fp4.errors import Fp4Error
from fp4.errors import unknown as unknown_name
from fp4.presets import COMPARED, PRESETS

__all__ = ["CHOICES", "Recipe", "get", "recipes"]

#: what each field decides, for help() and docs/recipes.md; values of a choice in the order of its annotation, separated by bars
MEANING: dict[str, str] = {
    "name": "a label; takes no part in equality",
    "tie": "a scaled value half way between two codes: code with even mantissa | larger magnitude | smaller magnitude",
    "zero_sign": "sign of a code of magnitude zero: the sign bit of x, -0.0 included | minus only if x < 0 | plus | minus if x <= 0",
    "nan_code": "code of an element that is NaN after scaling (e2m1 has no NaN): +max | max with the sign bit of x | +0",
    "nan": "block that holds a NaN: NaN scale byte, the whole block reads NaN | amax ignores it | Fp4Error before anything is written",
    "inf": "block that holds an infinity: as for NaN | the scale rule applied to amax = infinity, saturated | Fp4Error",
    "scale_rule": "ue8m0 exponent for amax, emax and max of the element: floor(log2(amax)) - emax, as OCP MX v1.0 section 6.3 | "
    "ceil(log2(amax / max)) | ceil(log2(amax)) - emax | floor(log2(amax rounded to the element's mantissa)) - emax | "
    "floor(log2(amax / max))",
    "ue8m0_floor": "rceil: smallest byte of a block with amax / max > 0 (1: byte 0 is kept for zero blocks)",
    "ue8m0_zero": "True: byte 0 means scale 0, so its block gets codes of magnitude 0; False: 2^-127",
    "scale_order": "e4m3 and ue5m3 scale before rounding, operation by operation",
    "encode_order": "scaled element, operation by operation; R is ``reciprocal``",
    "elem_max": "what amax is scaled to, times ``scale_max`` for the largest block: 6 (largest e2m1) or 4",
    "scale_max": "what the largest block scale becomes: 448 (largest e4m3), or 256 for four-over-six",
    "scale_floor": "lower clamp of the scale before it is rounded to e4m3 (0: none)",
    "zero_byte": "scale byte of a block with amax == 0",
    "underflow_byte": "scale byte that replaces a scale that rounded to 0 although amax > 0 (0: keep it)",
    "underflow": "codes of a block whose scale byte decodes to 0 although amax > 0: zero | whatever the arithmetic gives (saturated)",
    "reciprocal": "R(): correctly rounded | the SM90 instruction, from the measured table",
    "global_rule": "default global scale from amax of the tensor, with L = 6 scale_max: g = amax/L | gs = L/amax and g = 1/gs | "
    "gs = L*(1/amax) and g = 1/gs",
    "global_zero": "default global scale of an all-zero tensor",
    "global_floor": "smallest default global scale; 2^-117 = 2^-126 / 2^-9 keeps d * g from being subnormal and 1/(d * g) finite",
    "four_over_six": "choose, per block, between scaling amax to 6 and to 4 by the error of the result: no | squared | absolute | largest",
    "amax_floor": "amax is at least this (DeepGEMM: 1e-4)",
    "flush": "float32 subnormals of x (and of amax * (1/max)) are zero: CUDA's -use_fast_math",
    "scale_dtype": "precision of amax/max and of the default gs: float32 | x's dtype (compressed-tensors)",
}


@dataclass(frozen=True)
class Recipe:
    """All numeric choices of one quantiser. Frozen, hashable, printable; ``replace(**changes)`` makes a variant.

    Raises Fp4Error for a value that a field does not have. ``name`` is a label and takes no part in equality.

    >>> Recipe(tie="away") == Recipe(tie="away", name="mine")
    """

    name: str = "custom"
    tie: Literal["even", "away", "toward_zero"] = "even"
    zero_sign: Literal["keep", "of_value", "positive", "negative"] = "keep"
    nan_code: Literal["max", "signed_max", "zero"] = "signed_max"
    nan: Literal["propagate", "ignore", "error"] = "propagate"
    inf: Literal["propagate", "saturate", "error"] = "propagate"
    # -- ue8m0 ---------------------------------------------------------------
    scale_rule: Literal["ocp_floor", "rceil", "ceil", "even", "floor_amax_over_6"] = "rceil"
    ue8m0_floor: int = 0
    ue8m0_zero: bool = False
    # -- e4m3, ue5m3 ----------------------------------------------------------
    scale_order: Literal["amax/(max*g)", "(amax/max)/g", "(amax/max)*gs", "amax*(gs*(1/max))", "gs*(amax*(1/max))"] = "amax*(gs*(1/max))"
    encode_order: Literal["x*min(1/(d*g),FLT_MAX)", "x/(d*g)", "x*(gs/d)", "x/(d/gs)", "x*R(d*R(gs))"] = "x*min(1/(d*g),FLT_MAX)"
    elem_max: float = 6.0
    scale_max: float = 448.0
    scale_floor: float = 0.0
    zero_byte: int = 0
    underflow_byte: int = 0
    underflow: Literal["zero", "saturate"] = "zero"
    reciprocal: Literal["exact", "rcp_approx_sm90"] = "exact"
    global_rule: Literal["amax/L", "L/amax", "L*(1/amax)"] = "amax/L"
    global_zero: float = 1.0
    global_floor: float = 2.0**-117
    four_over_six: Literal["off", "mse", "mae", "abs_max"] = "off"
    # -- both ------------------------------------------------------------------
    amax_floor: float = 0.0
    flush: bool = False
    scale_dtype: Literal["float32", "input"] = "float32"

    def __post_init__(self) -> None:
        for name, legal in CHOICES.items():
            value = getattr(self, name)
            if value not in legal:
                raise Fp4Error(f"Recipe {self.name}: {name} is {value!r}; need one of {', '.join(legal)}")
        if not isinstance(self.name, str):
            raise Fp4Error(f"Recipe: name is {self.name!r}; need a string")
        for name in ("zero_byte", "underflow_byte", "ue8m0_floor"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= 254:
                raise Fp4Error(f"Recipe {self.name}: {name} is {value!r}; need an integer from 0 to 254")
        for name in ("flush", "ue8m0_zero"):
            if not isinstance(getattr(self, name), bool):
                raise Fp4Error(f"Recipe {self.name}: {name} is {getattr(self, name)!r}; need True or False")
        for name in ("elem_max", "scale_max", "global_zero", "scale_floor", "global_floor", "amax_floor"):
            value, floor = getattr(self, name), name.endswith("_floor")
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if not number or value < 0 or (value == 0 and not floor):
                need = "zero or a positive finite number" if floor else "a positive finite number"
                raise Fp4Error(f"Recipe {self.name}: {name} is {value!r}; need {need}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, f.name) for f in fields(self) if f.name != "name")

    def code(self, field: str) -> int:
        """Position of a field's value in CHOICES, the integer form that kernels receive."""
        return CHOICES[field].index(getattr(self, field))

    def replace(self, **changes: Any) -> Recipe:
        """A variant; its name is ``custom`` unless given. Raises Fp4Error for an unknown field."""
        known = {f.name for f in fields(self)}
        if unknown := set(changes) - known:
            raise Fp4Error(f"Recipe.replace: no field {', '.join(sorted(unknown))}; need one of {', '.join(sorted(known))}")
        return replace(self, **{"name": "custom", **changes})

    @property
    def key(self) -> str:
        """Text from which ``get`` rebuilds the recipe: the preset's name, or JSON. It crosses torch.library ops."""
        return self.name if _PRESETS.get(self.name) == self else json.dumps(asdict(self))

    def __str__(self) -> str:
        default = Recipe()
        changed = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != getattr(default, f.name)]
        return f"Recipe({', '.join(changed)})"


#: field -> legal values, from its annotation. The position of a value is the integer that kernels receive.
CHOICES: dict[str, tuple[str, ...]] = {n: get_args(hint) for n, hint in get_type_hints(Recipe).items() if get_origin(hint) is Literal}
Recipe.__doc__ = "\n".join(
    [f"{inspect.cleandoc(Recipe.__doc__ or '')}\n\nFields::\n"]
    + [f"    {n}: {text}" + (f"\n        {' | '.join(CHOICES[n])}" if n in CHOICES else "") for n, text in MEANING.items()]
)


class _Recipes(Mapping[str, Recipe]):
    """The presets by name: ``fp4.recipes["te"]``, ``fp4.recipes.names()``, ``print(fp4.recipes.describe("te"))``."""

    def names(self) -> list[str]:
        return list(_PRESETS)

    def __getitem__(self, name: str) -> Recipe:
        if not isinstance(name, str) or name not in _PRESETS:
            raise Fp4Error(f"recipes: {unknown_name(name, _PRESETS, 'fp4.recipes.names()')}; a Recipe is taken too")
        return _PRESETS[name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in _PRESETS

    def get(self, name: str, default: Any = None) -> Any:
        """The preset, or ``default`` for an unknown name, as of any mapping."""
        return _PRESETS.get(name, default) if isinstance(name, str) else default

    def __iter__(self) -> Iterator[str]:
        return iter(_PRESETS)

    def __len__(self) -> int:
        return len(_PRESETS)

    def describe(self, name: str) -> str:
        """What the preset was compared with, byte for byte, and for which formats."""
        formats = "; ".join(f"{fmt}: {what}" for fmt, what in self.compared(name).items()) or "no library"
        return f"{self[name]}\n{PRESETS[name][0]}\nCompared: {formats}."

    def compared(self, name: str) -> dict[str, str]:
        """Format name -> "bytes" (the library's own, all equal), "values", or how the two are related. A format that is not named was
        not compared: the recipe runs there, and no library is known to write those bytes."""
        return dict(COMPARED.get(self[name].name, {}))

    def _ipython_key_completions_(self) -> list[str]:
        return list(_PRESETS)

    def __repr__(self) -> str:
        return f"recipes({', '.join(_PRESETS)})"


recipes = _Recipes()
_PRESETS = {name: Recipe(name=name, **choices) for name, (_, choices) in PRESETS.items()}


def get(recipe: str | Recipe, format: str = "") -> Recipe:
    """The Recipe of a preset name, of a Recipe or of a ``Recipe.key``.

    A library may use other choices for one format: with ``format`` "mxfp4", the name "modelopt" is ``recipes["modelopt_mxfp4"]``. Raises
    Fp4Error for an unknown name.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str):
        if recipe.startswith("{"):
            return _from_json(recipe)
        return _PRESETS.get(f"{recipe}_{format}") or recipes[recipe]
    raise Fp4Error(f"recipe: got {type(recipe).__name__}; need a Recipe or one of {', '.join(_PRESETS)}")


@lru_cache(maxsize=256)
def _from_json(text: str) -> Recipe:
    try:
        return Recipe(**json.loads(text))
    except Fp4Error:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise Fp4Error(f"recipe: {text[:200]!r} is no Recipe.key ({error}); need a preset's name or a Recipe") from None
