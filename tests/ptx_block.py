"""Runs the PTX of a compiled kernel, one block at a time, over numpy: one array element a thread, warps and barriers in step.

For kernels whose threads all take the same branches. What it knows is what Triton 3.6 and 3.9 emit for the decode kernels; anything
else raises. Asynchronous copies land at once, so waits are not checked (compute-sanitizer does that on a GPU).
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

U64 = np.uint64
M32, M16 = U64(0xFFFFFFFF), U64(0xFFFF)


def _split(text: str) -> list[str]:
    """Operands, split at commas outside brackets and braces."""
    out, depth, current = [], 0, ""
    for c in text:
        depth += (c in "{[") - (c in "}]")
        if c == "," and not depth:
            out.append(current.strip())
            current = ""
        else:
            current += c
    return [*out, current.strip()] if current.strip() else out


def _bf16(v: Any) -> Any:
    return ((v & M16) << U64(16)).astype(np.uint32).view(np.float32)


def _to_bf16(f: Any) -> Any:
    """float32 -> bits, to nearest even."""
    b = f.astype(np.float32).view(np.uint32).astype(U64)
    rounded = (b + U64(0x7FFF) + ((b >> U64(16)) & U64(1))) >> U64(16)
    return np.where(np.isnan(f), U64(0x7FFF), rounded & M16)


def _f16(v: Any) -> Any:
    return (v & M16).astype(np.uint16).view(np.float16).astype(np.float32)


def _to_f16(f: Any) -> Any:
    return f.astype(np.float16).view(np.uint16).astype(U64)


def _f32(v: Any) -> Any:
    return (v & M32).astype(np.uint32).view(np.float32)


def _to_f32(f: Any) -> Any:
    return f.astype(np.float32).view(np.uint32).astype(U64)


class Block:
    """One block of a kernel: ``Block(ptx, threads, shared_bytes).run(memory, params, ctaid, nctaid)``."""

    def __init__(self, ptx: str, threads: int, shared: int) -> None:
        self.threads, self.shared = threads, np.zeros(max(shared, 16), np.uint8)
        body = re.sub(r"//[^\n]*", "", ptx)
        name = re.search(r"\.entry\s+(\w+)", body)
        assert name, "no kernel"
        self.name = name[1]
        body = body[body.index("{", body.index(")", name.end())) + 1 :]
        body = body[: re.search(r"^}", body, re.MULTILINE).start()]  # type: ignore[union-attr]
        self.code: list[tuple[str | None, str, list[str]]] = []
        self.labels: dict[str, int] = {}
        for raw in re.split(r";|(?<=:)\n", body):
            text = re.sub(r"^\s*\.(loc|pragma|reg)\b[^\n]*(\n|$)", "", raw.strip(), flags=re.MULTILINE).strip()
            while True:
                text = re.sub(r"^\s*\.(loc|pragma)\b[^\n]*(\n|$)", "", text).strip()
                if m := re.match(r"(\$\w+):\s*", text):
                    self.labels[m[1]] = len(self.code)
                    text = text[m.end() :]
                elif re.match(r"[{}](\s|$)", text):
                    text = text[1:].strip()
                else:
                    break
            if not text or text.startswith((".reg", ".loc", ".pragma", ".maxn", ".section")):
                continue
            pred = None
            if m := re.match(r"@(!?%?\w+)\s+", text):
                pred, text = m[1], text[m.end() :]
            op, _, rest = text.partition(" ") if " " in text or "\t" not in text else text.partition("\t")
            op, _, rest = re.split(r"(\s)", text, maxsplit=1) if re.search(r"\s", text) else (text, "", "")
            if op.endswith(".global.") or op.endswith("fractional."):
                continue
            self.code.append((pred, op, _split(rest)))

    # ---- operands ------------------------------------------------------------------------------------------------------------

    def value(self, token: str) -> Any:
        if token in self.regs:
            return self.regs[token]
        if re.fullmatch(r"-?\d+|-?0x[0-9a-fA-F]+", token):
            return np.full(self.threads, int(token, 0) & 0xFFFFFFFFFFFFFFFF, U64)
        if re.fullmatch(r"0f[0-9a-fA-F]{8}", token):
            return np.full(self.threads, int(token[2:], 16), U64)
        t = np.arange(self.threads, dtype=U64)
        special = {
            "%tid.x": t, "%laneid": t % U64(32), "%ctaid.x": self.ctaid[0], "%ctaid.y": self.ctaid[1], "%nctaid.x": self.nctaid[0],
            "%nctaid.y": self.nctaid[1], "%ctaid.z": 0, "global_smem": 0, "%warpid": t // U64(32), "%cluster_ctarank": 0,
        }  # fmt: skip
        return np.broadcast_to(np.asarray(special[token], U64), (self.threads,)).copy()

    def predicate(self, token: str | None) -> Any:
        if token is None:
            return np.ones(self.threads, bool)
        return ~self.regs[token[1:]].astype(bool) if token.startswith("!") else self.regs[token].astype(bool)

    def set(self, token: str, value: Any, on: Any) -> None:
        if token == "_":
            return
        old = self.regs.get(token)
        new = np.asarray(value).astype(U64)
        self.regs[token] = new if old is None or on.all() else np.where(on, new, old)

    def address(self, token: str) -> Any:
        base, _, offset = token.strip("[] ").partition("+")
        v = self.value(base.strip())
        return v + self.value(offset.strip()) if offset else v

    @staticmethod
    def names(token: str) -> list[str]:
        return _split(token.strip("{} ")) if token.startswith("{") else [token]

    @staticmethod
    def signed(v: Any, bits: int) -> Any:
        return (v & M32).astype(np.uint32).view(np.int32).astype(np.int64) if bits == 32 else v.view(np.int64)

    # ---- memory --------------------------------------------------------------------------------------------------------------

    @staticmethod
    def read(space: Any, at: Any, size: int, on: Any) -> Any:
        at = np.where(on, at, 0).astype(np.int64)
        assert not on.any() or (at[on].min() >= 0 and at[on].max() + size <= len(space)), "read outside memory"
        assert not (at[on] % size).any(), "misaligned read"
        return sum(space[at + i].astype(U64) << U64(8 * i) for i in range(size))

    @staticmethod
    def write(space: Any, at: Any, size: int, value: Any, on: Any) -> None:
        at = at[on].astype(np.int64)
        assert not len(at) or (at.min() >= 0 and at.max() + size <= len(space)), "write outside memory"
        for i in range(size):
            space[at + i] = ((value[on] >> U64(8 * i)) & U64(0xFF)).astype(np.uint8)

    # ---- execution -----------------------------------------------------------------------------------------------------------

    def run(self, memory: Any, params: list[int], ctaid: tuple[int, int] = (0, 0), nctaid: tuple[int, int] = (1, 1)) -> None:
        """memory: u8 array, addresses are offsets into it; it is written in place."""
        self.memory, self.params, self.ctaid, self.nctaid = memory, params, ctaid, nctaid
        self.regs: dict[str, Any] = {}
        self.shared[:] = 0xFF
        at = 0
        with np.errstate(all="ignore"):
            while at < len(self.code):
                pred, op, args = self.code[at]
                at += 1
                if op == "ret":
                    return
                if op.startswith("bra"):
                    taken = self.predicate(pred)
                    assert taken.all() or not taken.any(), "threads part"
                    if taken.all():
                        at = self.labels[args[0]]
                    continue
                self.step(op, args, self.predicate(pred))

    def step(self, op: str, args: list[str], on: Any) -> None:
        kind, *parts = op.split(".")
        bits = 64 if re.search(r"64$", parts[-1] if parts else "") else 16 if parts and parts[-1] in ("b16", "u16") else 32
        if kind in ("bar", "createpolicy", "griddepcontrol", "prefetch", "barrier", "fence", "membar"):
            return
        if kind == "cp":
            if "prefetch" in parts:
                where = self.address(args[0])[on]
                assert not len(where) or (where + self.value(args[1])[on]).max() <= len(self.memory), "prefetch outside memory"
            elif "global" in parts:
                size = int(args[2], 0)
                live = self.value(args[3]) if len(args) > 3 else np.full(self.threads, size, U64)
                to, source = self.address(args[0]), self.address(args[1])
                for i in range(0, size, 4):
                    v = self.read(self.memory, source + U64(i), 4, on & (live > i))
                    self.write(self.shared, to + U64(i), 4, np.where(live > i, v, U64(0)), on)
            return
        if kind == "ld":
            names = self.names(args[0])
            if "param" in parts:
                self.set(names[0], np.full(self.threads, self.params[int(re.search(r"param_(\d+)", args[1])[1])], U64), on)  # type: ignore[index]
                return
            space = self.shared if "shared" in parts else self.memory
            where = self.address(args[1])
            for i, n in enumerate(names):
                self.set(n, self.read(space, where + U64(i * bits // 8), bits // 8, on), on)
            return
        if kind == "st":
            space = self.shared if "shared" in parts else self.memory
            for i, n in enumerate(self.names(args[1])):
                self.write(space, self.address(args[0]) + U64(i * bits // 8), bits // 8, self.value(n), on)
            return
        if kind == "ldmatrix":  # lanes 8 i to 8 i + 7 have the addresses of the rows of matrix i; a lane gets 4 bytes of one row
            assert "trans" not in parts, op
            lane = np.arange(self.threads)
            where = self.address(args[1])
            for i, n in enumerate(self.names(args[0])):
                row = where[(lane & ~31) + 8 * i + (lane & 31) // 4]
                assert not (row % 16).any(), "misaligned row"
                self.set(n, self.read(self.shared, row + U64(4) * (lane & 3).astype(U64), 4, on), on)
            return
        if kind == "mma":
            self.mma(op, args)
            return
        if kind == "shfl":
            d = self.names(args[0].split("|")[0])[0]
            lane = np.arange(self.threads)
            other = (
                lane ^ self.value(args[2]).astype(np.int64)
                if "bfly" in parts
                else (lane & ~31) | (self.value(args[2]) & U64(31)).astype(np.int64)
            )
            self.set(d, self.value(args[1])[other], on)
            return
        if kind == "mov" and (args[0].startswith("{") or args[1].startswith("{")):
            half = U64(bits // 2)
            mask = M16 if bits == 32 else M32
            if args[0].startswith("{"):
                lo, hi = self.names(args[0])
                v = self.value(args[1])
                self.set(lo, v & mask, on)
                self.set(hi, (v >> half) & mask, on)
            else:
                lo, hi = (self.value(t) for t in self.names(args[1]))
                self.set(args[0], (lo & mask) | ((hi & mask) << half), on)
            return
        v = [self.value(a) for a in args[1:]]
        self.set(args[0], self.compute(op, kind, parts, bits, v), on)

    def compute(self, op: str, kind: str, parts: list[str], bits: int, v: list[Any]) -> Any:
        mask = {64: U64(0xFFFFFFFFFFFFFFFF), 32: M32, 16: M16}[bits]
        last = parts[-1] if parts else ""
        if last in ("bf16x2", "f16x2"):
            a, b = (_bf16, _to_bf16) if last == "bf16x2" else (_f16, _to_f16)
            halves = [[a(x >> U64(s)).astype(np.float64) for x in v] for s in (0, 16)]
            done = [h[0] * h[1] + (h[2] if kind == "fma" else 0) for h in halves]
            return b(done[0].astype(np.float32)) | (b(done[1].astype(np.float32)) << U64(16))
        if last == "f32" and kind in ("add", "mul", "fma", "sub"):
            f = [_f32(x) for x in v]
            return _to_f32(
                f[0] + f[1] if kind == "add" else f[0] - f[1] if kind == "sub" else f[0] * f[1] + (f[2] if kind == "fma" else np.float32(0))
            )
        s = [self.signed(x, bits) for x in v]
        if kind == "cvt":
            to, source = parts[-2], parts[-1]
            if (to, source) == ("bf16", "f32"):
                return _to_bf16(_f32(v[0]))
            if (to, source) == ("bf16x2", "f32"):
                return (_to_bf16(_f32(v[0])) << U64(16)) | _to_bf16(_f32(v[1]))
            if (to, source) == ("f16", "f32"):
                return _to_f16(_f32(v[0]))
            if (to, source) == ("f32", "f16"):
                return _to_f32(_f16(v[0]))
            if (to, source) == ("f32", "bf16"):
                return _to_f32(_bf16(v[0]))
            if to in ("s64", "u64", "s32", "u32") and source == "s32":
                return self.signed(v[0], 32).view(U64) & (M32 if to.endswith("32") else U64(0xFFFFFFFFFFFFFFFF))
            if to in ("u64", "s64", "u32", "s32", "u16", "b16") and source in ("u32", "u64", "s64", "u16"):
                return (
                    v[0]
                    & {"2": M32, "4": U64(0xFFFFFFFFFFFFFFFF), "6": M16}[to[-1]]
                    & {"2": M32, "4": U64(0xFFFFFFFFFFFFFFFF), "6": M16}[source[-1]]
                )
            raise AssertionError(op)
        if kind == "setp":
            if last.startswith("s"):
                a, b = s[0], s[1]
            else:
                a, b = v[0] & mask, v[1] & mask
            return {"lt": a < b, "gt": a > b, "le": a <= b, "ge": a >= b, "eq": a == b, "ne": a != b}[parts[0]]
        if kind == "selp":
            return np.where(v[2].astype(bool), v[0], v[1])
        if kind in ("and", "or", "xor") and last == "pred":
            return {"and": v[0] & v[1], "or": v[0] | v[1], "xor": v[0] ^ v[1]}[kind]
        if kind == "not":
            return (v[0] ^ U64(1)) if last == "pred" else ~v[0] & mask
        if kind in ("mul", "mad") and parts[0] == "wide":
            a, b = (self.signed(x, 32) if last == "s32" else (x & M32).view(np.int64) for x in v[:2])
            return (a * b).view(U64) + (v[2] if kind == "mad" else U64(0))
        if kind == "mul" and parts[0] == "hi":
            return ((v[0] & M32) * (v[1] & M32)) >> U64(32)
        simple = {
            "mov": lambda: v[0], "add": lambda: v[0] + v[1], "sub": lambda: v[0] - v[1], "mul": lambda: v[0] * v[1],
            "mad": lambda: v[0] * v[1] + v[2], "and": lambda: v[0] & v[1], "or": lambda: v[0] | v[1], "xor": lambda: v[0] ^ v[1],
            "shl": lambda: v[0] << v[1], "neg": lambda: U64(0) - v[0],
            "min": lambda: np.where(s[0] < s[1], v[0], v[1]), "max": lambda: np.where(s[0] > s[1], v[0], v[1]),
            "cvta": lambda: v[0],
        }  # fmt: skip
        if kind in simple:
            return simple[kind]() & mask
        if kind == "shr":
            return (s[0] >> v[1].astype(np.int64)).view(U64) & mask if last.startswith("s") else (v[0] & mask) >> v[1]
        if kind in ("div", "rem"):
            a, b = (s[0], s[1]) if last.startswith("s") else ((v[0] & mask).view(np.int64), (v[1] & mask).view(np.int64))
            q = np.abs(a) // np.abs(b) * np.sign(a) * np.sign(b)
            return (q if kind == "div" else a - q * b).astype(np.int64).view(U64) & mask
        if kind == "bfe":
            field = ((v[0] & M32) >> v[1]) & ((U64(1) << v[2]) - U64(1))
            sign = field >> (v[2] - U64(1)) & U64(1) if last == "s32" else U64(0)
            return np.where(sign == 1, field | ~((U64(1) << v[2]) - U64(1)), field) & mask
        if kind == "shf":
            assert parts[:2] == ["l", "wrap"], op
            both = (v[0] & M32) | ((v[1] & M32) << U64(32))
            return (both << (v[2] & U64(31))) >> U64(32)
        if kind == "prmt":
            both = (v[0] & M32) | ((v[1] & M32) << U64(32))
            picks = [((both >> (U64(8) * ((v[2] >> U64(4 * i)) & U64(7)))) & U64(0xFF)) << U64(8 * i) for i in range(4)]
            return picks[0] | picks[1] | picks[2] | picks[3]
        raise AssertionError(f"unknown instruction {op}")

    def mma(self, op: str, args: list[str]) -> None:
        """m16n8k16 with packed 16-bit operands and fp32 sums."""
        assert "m16n8k16" in op, op
        half = "f16.f16" in op and "bf16" not in op
        value = _f16 if half else _bf16
        d, a, b, c = (self.names(t) for t in args)
        warps = self.threads // 32
        g, t = np.arange(32) // 4, np.arange(32) % 4
        am, bm, cm = np.zeros((warps, 16, 16)), np.zeros((warps, 16, 8)), np.zeros((warps, 16, 8))
        for i, n in enumerate(a):
            v = self.value(n).reshape(warps, 32)
            for h in (0, 1):
                am[:, g + 8 * (i % 2), 2 * t + h + 8 * (i // 2)] = value(v >> U64(16 * h))
        for i, n in enumerate(b):
            v = self.value(n).reshape(warps, 32)
            for h in (0, 1):
                bm[:, 2 * t + h + 8 * i, g] = value(v >> U64(16 * h))
        places = [(g + 8 * (i // 2), 2 * t + i % 2) for i in range(4)]
        for (r, col), n in zip(places, c, strict=True):
            cm[:, r, col] = _f32(self.value(n)).reshape(warps, 32)
        out = cm + am @ bm
        for (r, col), n in zip(places, d, strict=True):
            self.regs[n] = _to_f32(out[:, r, col].reshape(-1))
