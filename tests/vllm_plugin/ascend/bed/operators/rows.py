# SPDX-License-Identifier: Apache-2.0
"""Operators on single rows in plain torch: norm, rotation, and the writes into paged caches.

A negative slot says that a row is padding and is written nowhere.
"""

from __future__ import annotations

import torch

from tests.vllm_plugin.ascend.bed.operators.rules import HALVES, need, need_tensor

_FUSED = "npu_kv_rmsnorm_rope_cache"
_SCATTER = "npu_scatter_nd_update_"


def kv_rmsnorm_rope_cache(
    kv: torch.Tensor,
    gamma: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    index: torch.Tensor,
    k_cache: torch.Tensor,
    ckv_cache: torch.Tensor,
    *,
    k_rope_scale: torch.Tensor | None = None,
    c_kv_scale: torch.Tensor | None = None,
    k_rope_offset: torch.Tensor | None = None,
    c_kv_offset: torch.Tensor | None = None,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Norm the latent of ``kv`` [B, 1, S, 576], rotate its rope, and write both to the slots ``index`` of two caches.

    ``k_cache`` [blocks, block size, 1, 64] takes the rope, ``ckv_cache`` [.., 512] the latent (paged mode).
    """
    scales = (k_rope_scale, c_kv_scale, k_rope_offset, c_kv_offset)
    need(all(each is None for each in scales), _FUSED, "the bed knows no quantised caches")
    need(cache_mode in ("PA", "PA_BNSD"), _FUSED, "the bed knows cache_mode PA only", cache_mode)
    need_tensor(_FUSED, "kv", kv, (None, 1, None, 576), HALVES)
    batch, _, length, _ = kv.shape
    same = (kv.dtype,)
    need_tensor(_FUSED, "gamma", gamma, (512,), same)
    need_tensor(_FUSED, "cos", cos, (batch, 1, length, 64), same)
    need_tensor(_FUSED, "sin", sin, (batch, 1, length, 64), same)
    need_tensor(_FUSED, "index", index, (batch * length,), (torch.int64,))
    need_tensor(_FUSED, "k_cache", k_cache, (None, None, 1, 64), same, contiguous=True)
    need_tensor(_FUSED, "ckv_cache", ckv_cache, (*k_cache.shape[:3], 512), same, contiguous=True)

    latent, rope = kv.split([512, 64], dim=-1)
    normed = rms_norm(latent, gamma, epsilon)[0]
    rotated = interleave_rope(rope, cos, sin)
    _write(_FUSED, k_cache, index, rotated)
    _write(_FUSED, ckv_cache, index, normed)
    if is_output_kv:
        return k_cache, ckv_cache, rotated, normed
    nothing = torch.empty(0, dtype=kv.dtype)
    return k_cache, ckv_cache, nothing, nothing


def _write(operator: str, cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    flat = cache.view(-1, cache.shape[-1])
    kept = slots >= 0
    where = slots[kept].long()
    need(bool((where < flat.shape[0]).all()), operator, f"a slot has to lie below {flat.shape[0]}", slots.tolist())
    need(where.unique().numel() == where.numel(), operator, "two rows must not be written to one slot")
    flat[where] = rows.reshape(-1, cache.shape[-1])[kept]


def interleave_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Put even elements before odd ones, then rotate the halves: ``x`` [B, N, S, 64], the angles [B, 1, S, 64]."""
    name = "npu_interleave_rope"
    need_tensor(name, "x", x, (None, None, None, 64), HALVES)
    for side, angles in (("cos", cos), ("sin", sin)):
        need_tensor(name, side, angles, (x.shape[0], 1, x.shape[2], 64), (x.dtype,))
    return _rotate(torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1), cos, sin)


def rotary_mul(x: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, rotary_mode: str = "half") -> torch.Tensor:
    """Rotate the halves of the last dimension; ``r1`` (cosine) and ``r2`` (sine) are broadcast over heads."""
    name = "npu_rotary_mul"
    need(rotary_mode == "half", name, "the bed knows rotary_mode half only", rotary_mode)
    need_tensor(name, "input", x, (None, None, None, None), (*HALVES, torch.float32))
    for side, angles in (("r1", r1), ("r2", r2)):
        need_tensor(name, side, angles, (x.shape[0], 1, None, x.shape[3]), (x.dtype,))
    return _rotate(x, r1, r2)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.float().chunk(2, dim=-1)
    return (x.float() * cos.float() + torch.cat([-right, left], dim=-1) * sin.float()).to(x.dtype)


def rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x`` divided by its root mean square times ``gamma``, and the reciprocal of that root."""
    need_tensor("npu_rms_norm", "gamma", gamma, (x.shape[-1],), (x.dtype, torch.float32))
    reciprocal = (x.float().square().mean(dim=-1, keepdim=True) + epsilon).rsqrt()
    return (x.float() * reciprocal * gamma.float()).to(x.dtype), reciprocal


def scatter_nd_update_(target: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    """Write ``updates`` [T, D] to the rows ``indices`` [T, 1] of ``target`` [rows, D] in place."""
    need_tensor(_SCATTER, "indices", indices, (None, 1), (torch.int32, torch.int64))
    need_tensor(_SCATTER, "input", target, (None, None), (updates.dtype,), contiguous=True)
    need_tensor(_SCATTER, "updates", updates, (indices.shape[0], target.shape[1]), (target.dtype,))
    _write(_SCATTER, target, indices[:, 0], updates)
    return target


def dynamic_quant(x: torch.Tensor, *, dst_type: torch.dtype = torch.int8) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row [T, D] to int8 by its largest element; return the rows and their scales [T], float32."""
    name = "npu_dynamic_quant"
    need(dst_type == torch.int8, name, "the bed knows dst_type int8 only", dst_type)
    need_tensor(name, "input", x, (None, None), HALVES)
    scale = x.float().abs().amax(dim=-1) / 127
    rounded = (x.float() / scale.clamp(min=1e-12)[:, None]).round()
    return rounded.clamp(-127, 127).to(torch.int8), scale
