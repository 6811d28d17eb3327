"""A decoder model's forward pass in 150 lines: attention in torch, every quantised linear and MoE layer through fp4.

It reads the architecture from ``config.json`` (Llama, Qwen3-MoE, GPT-OSS, DeepSeek-V3) and runs in float32, so that its logits can be
compared with those of the library that defined the model. It is an example of how an engine uses fp4, not an engine: no cache, batch 1.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import fp4
from fp4.tensor import QuantizedTensor


class TinyModel:
    """``TinyModel(folder)(input_ids [t]) -> logits f32 [t, vocab]``. ``backend`` goes to fp4.prepare and fp4.prepare_moe."""

    def __init__(self, folder: Path, backend: str | None = None) -> None:
        self.ck = fp4.open_checkpoint(folder)
        self.c: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.backend = backend
        self._ready: dict[str, Any] = {}
        self.quantized: set[str] = set()

    # ---------------------------------------------------------------- layers through fp4

    def plain(self, name: str) -> torch.Tensor:
        return self.ck.dequantize(name)

    def linear(self, x: torch.Tensor, module: str) -> torch.Tensor:
        """``x @ W^T + b``: fp4.matmul where the checkpoint holds 4-bit codes, torch elsewhere."""
        bias = self.plain(f"{module}.bias") if f"{module}.bias" in self.ck else None
        name = f"{module}.weight"
        if name not in self._ready:
            w = self.ck[name]
            # weights with a smoothing vector or a low-rank branch are more than codes and scales: fold them
            if isinstance(w, QuantizedTensor) and not w.extras:
                self._ready[name] = fp4.prepare(w, backend=self.backend, act_dtype=torch.float32, act="keep")
                self.quantized.add(name)
            else:
                self._ready[name] = self.ck.dequantize(name, fold=True)
        w = self._ready[name]
        return F.linear(x, w, bias) if isinstance(w, torch.Tensor) else fp4.matmul(x, w, bias)

    def experts(self, module: str) -> Any:
        """The prepared experts of one MoE layer, stacked or one tensor an expert."""
        if module in self._ready:
            return self._ready[module]
        keep: dict[str, Any] = {"backend": self.backend, "act_dtype": torch.float32, "act": "keep"}
        if f"{module}.gate_up_proj" in self.ck:  # GPT-OSS
            act = fp4.SwiGLU(alpha=self.c.get("swiglu_alpha", 1.702), beta=1.0, limit=self.c.get("swiglu_limit", 7.0))
            w13, w2 = self.ck[f"{module}.gate_up_proj"], self.ck[f"{module}.down_proj"]
            biases = {"bias13": self.plain(f"{module}.gate_up_proj_bias"), "bias2": self.plain(f"{module}.down_proj_bias")}
            ready = fp4.prepare_moe(w13, w2, gate_up=w13.gate_up, activation=act, **biases, **keep)
            self.quantized |= {f"{module}.gate_up_proj", f"{module}.down_proj"}
        else:
            count = next(self.c[k] for k in ("num_experts", "num_local_experts", "n_routed_experts") if k in self.c)
            each = {}
            for part in ("gate_proj", "up_proj", "down_proj"):
                names = [f"{module}.{e}.{part}.weight" for e in range(count)]
                each[part] = fp4.fuse.stack([self.ck[n] for n in names])
                self.quantized |= set(names)
            pair = (each["gate_proj"], each["up_proj"])
            ready = fp4.prepare_moe(pair, each["down_proj"], gate_up="gate_up", activation=fp4.SiLU(), **keep)
        self._ready[module] = ready
        return ready

    # ---------------------------------------------------------------- the model

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.plain("model.embed_tokens.weight")[input_ids]
        eps = self.c["rms_norm_eps"]
        for i in range(self.c["num_hidden_layers"]):
            at = f"model.layers.{i}"
            attention = self.latent_attention if "kv_lora_rank" in self.c else self.attention
            x = x + attention(self.norm(x, f"{at}.input_layernorm", eps), f"{at}.self_attn")
            h = self.norm(x, f"{at}.post_attention_layernorm", eps)
            dense = f"{at}.mlp.gate_proj.weight" in self.ck
            x = x + (self.mlp(h, f"{at}.mlp") if dense else self.moe(h, f"{at}.mlp"))
        return self.linear(self.norm(x, "model.norm", eps), "lm_head")

    def norm(self, x: torch.Tensor, module: str, eps: float) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.plain(f"{module}.weight"), eps)

    def mlp(self, x: torch.Tensor, at: str) -> torch.Tensor:
        return self.linear(F.silu(self.linear(x, f"{at}.gate_proj")) * self.linear(x, f"{at}.up_proj"), f"{at}.down_proj")

    def route(self, x: torch.Tensor, at: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Top-k ids [t, k] and weights [t, k] of the family's router."""
        k = self.c["num_experts_per_tok"]
        if f"{at}.router.weight" in self.ck:  # GPT-OSS: softmax over the chosen logits
            values, ids = self.linear(x, f"{at}.router").topk(k)
            return ids, values.softmax(-1)
        logits = self.linear(x, f"{at}.gate")
        if "routed_scaling_factor" in self.c:  # DeepSeek-V3: sigmoid, a bias for the choice only
            scores = logits.sigmoid()
            ids = (scores + self.plain(f"{at}.gate.e_score_correction_bias")).topk(k).indices
            weights = scores.gather(-1, ids)
            return ids, weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.c["routed_scaling_factor"]
        weights, ids = logits.softmax(-1).topk(k)
        return ids, weights / weights.sum(-1, keepdim=True) if self.c.get("norm_topk_prob") else weights

    def moe(self, x: torch.Tensor, at: str) -> torch.Tensor:
        y = fp4.moe(x, self.experts(f"{at}.experts"), *self.route(x, at))
        return y + self.mlp(x, f"{at}.shared_experts") if f"{at}.shared_experts.up_proj.weight" in self.ck else y

    # ---------------------------------------------------------------- attention, in torch

    def rope(self, t: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [t, dim] of the rotary embedding, plain or YaRN."""
        p = self.c.get("rope_parameters") or {"rope_theta": self.c.get("rope_theta", 10000.0), "rope_type": "default"}
        base, gain = p["rope_theta"], 1.0
        freq = 1.0 / base ** (torch.arange(0, dim, 2).float() / dim)
        if p["rope_type"] == "yarn":
            low, high = (dim * math.log(p["original_max_position_embeddings"] / (b * 2 * math.pi)) / (2 * math.log(base)) for b in
                         (p["beta_fast"], p["beta_slow"]))  # fmt: skip
            if p.get("truncate", True):
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, dim - 1)
            ramp = ((torch.arange(dim // 2).float() - low) / (high - low)).clamp(0, 1)
            freq = freq / p["factor"] * ramp + freq * (1 - ramp)
            gain = 0.1 * math.log(p["factor"]) + 1.0
        angle = torch.arange(t).float()[:, None] * freq
        return (torch.cat((angle, angle), -1).cos() * gain, torch.cat((angle, angle), -1).sin() * gain)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Causal attention, q k v [heads, t, d] -> [t, heads * d_v]. A sink is one more logit a head, with no value."""
        logits = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
        logits = logits + torch.full(logits.shape[1:], -torch.inf).triu(1)
        if sinks is not None:
            logits = torch.cat((logits, sinks[:, None, None].expand(-1, logits.shape[1], 1)), -1)
        weights = logits.softmax(-1)[..., : k.shape[1]]
        return (weights @ v).transpose(0, 1).flatten(1)

    def attention(self, x: torch.Tensor, at: str) -> torch.Tensor:
        heads, kv, t = self.c["num_attention_heads"], self.c["num_key_value_heads"], x.shape[0]
        q, k, v = (self.linear(x, f"{at}.{n}_proj").view(t, -1, self.c["head_dim"]) for n in "qkv")
        if f"{at}.q_norm.weight" in self.ck:
            q, k = self.norm(q, f"{at}.q_norm", self.c["rms_norm_eps"]), self.norm(k, f"{at}.k_norm", self.c["rms_norm_eps"])
        cos, sin = self.rope(t, self.c["head_dim"])
        q, k, v = rotate(q.transpose(0, 1), cos, sin), rotate(k.transpose(0, 1), cos, sin), v.transpose(0, 1)
        k, v = (m.repeat_interleave(heads // kv, 0) for m in (k, v))
        sinks = self.plain(f"{at}.sinks") if f"{at}.sinks" in self.ck else None
        return self.linear(self.attend(q, k, v, sinks), f"{at}.o_proj")

    def latent_attention(self, x: torch.Tensor, at: str) -> torch.Tensor:
        """DeepSeek's multi-head latent attention; rotary pairs are neighbours."""
        heads, t, eps = self.c["num_attention_heads"], x.shape[0], 1e-6
        nope, rot = self.c["qk_nope_head_dim"], self.c["qk_rope_head_dim"]
        q = self.linear(self.norm(self.linear(x, f"{at}.q_a_proj"), f"{at}.q_a_layernorm", eps), f"{at}.q_b_proj")
        q = q.view(t, heads, nope + rot).transpose(0, 1)
        low, k_rot = self.linear(x, f"{at}.kv_a_proj_with_mqa").split((self.c["kv_lora_rank"], rot), -1)
        kv = self.linear(self.norm(low, f"{at}.kv_a_layernorm", eps), f"{at}.kv_b_proj").view(t, heads, -1).transpose(0, 1)
        cos, sin = self.rope(t, rot)
        q_rot, k_rot = (rotate(pairs_to_halves(m), cos, sin) for m in (q[..., nope:], k_rot[None]))
        q = torch.cat((q[..., :nope], q_rot), -1)
        k = torch.cat((kv[..., :nope], k_rot.expand(heads, -1, -1)), -1)
        return self.linear(self.attend(q, k, kv[..., nope:]), f"{at}.o_proj")


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def pairs_to_halves(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
