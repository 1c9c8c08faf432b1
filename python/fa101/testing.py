"""What every test compares with: attention in float64 as params.h defines it, and the error bound.

The bound: at most twice the error that torch makes with the same maths in the same dtype, plus
EPSILON times the largest value. What is not finite must be the same, place by place; torch's error
is then that on the same inputs with zeros instead.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# One rounding of a 1. In float32 logits are rounded as often as the result: ten roundings, and more
# for sums of more than 64 products, whose error grows with the square root of their number.
EPSILON = {"float32": 6e-7, "float16": 2.0**-11, "bfloat16": 2.0**-8}

# The lse comes from float32 logits whatever the dtype, so it has a bound of its own.
LSE_EPSILON = 1e-5


def to_float64(x: Any) -> Any:
    """Any framework's array as float64 in NumPy."""
    if hasattr(x, "detach"):
        return x.detach().double().cpu().numpy()
    if hasattr(x, "get"):
        x = x.get()
    return np.asarray(x).astype(np.float64)


def dtype_name(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")


def reference_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    align: str = "top_left",
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    bias: Any = None,
    mask: Any = None,
    seqlens_k: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    layout: str = "bhsd",
) -> tuple[Any, Any]:
    """(out, lse) in float64, from the definition; keys a query may not see are not touched."""
    q, k, v = (to_float64(x) for x in (q, k, v))
    if layout == "bshd":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    k, v = _scaled(k, k_descale), _scaled(v, v_descale)
    batch, heads, seqlen_q, head_dim = q.shape
    seqlen_k = k.shape[2]
    group = heads // k.shape[1] if k.shape[1] else 1
    scale = (
        1 / np.sqrt(head_dim) if softmax_scale is None else np.float64(np.float32(softmax_scale))
    )
    out = np.zeros((batch, heads, seqlen_q, v.shape[3]))
    lse = np.full((batch, heads, seqlen_q), -np.inf)
    visible = visible_pairs(
        (batch, heads, seqlen_q, seqlen_k),
        causal=causal,
        window=window,
        align=align,
        mask=None if mask is None else to_float64(mask) != 0,
        seqlens_k=None if seqlens_k is None else to_float64(seqlens_k).astype(np.int64),
    )
    bias = np.broadcast_to(0.0 if bias is None else to_float64(bias), visible.shape)

    with np.errstate(all="ignore"):
        for b, h in np.ndindex(batch, heads):
            keys, values = k[b, h // group], v[b, h // group]
            logits = scale * (q[b, h] @ keys.T)
            if softcap > 0:
                logits = softcap * np.tanh(logits / softcap)
            logits = np.where(visible[b, h], logits + bias[b, h], -np.inf)
            if logits.size == 0:
                continue
            row_max = logits.max(axis=-1, keepdims=True)
            weights = np.exp(logits - np.where(row_max == -np.inf, 0.0, row_max))
            total = weights.sum(axis=-1, keepdims=True)
            lse[b, h] = (row_max + np.log(total))[:, 0]
            weights /= np.where(total == 0, 1.0, total)  # all logits -inf: the row is 0
            if np.isfinite(values).all():
                out[b, h] = weights @ values
            else:  # 0 * NaN is NaN: multiply only what is seen
                for row, (weight, seen) in enumerate(zip(weights, visible[b, h], strict=True)):
                    out[b, h, row] = weight[seen] @ values[seen]
    return (out.swapaxes(1, 2) if layout == "bshd" else out), lse


def _scaled(x: Any, descale: Any) -> Any:
    """x (batch, heads, seqlen, head_dim) times descale, (heads,) or (batch, heads)."""
    return x if descale is None else x * to_float64(descale)[..., None, None]


def visible_pairs(
    shape: tuple[int, int, int, int],
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    align: str = "top_left",
    mask: Any = None,
    seqlens_k: Any = None,
) -> Any:
    """Which query sees which key: a bool array of `shape`, (batch, heads, seqlen_q, seqlen_k)."""
    batch, _, seqlen_q, seqlen_k = shape
    left, right = (None, None) if window is None else window
    if causal:
        right = 0 if right is None else min(right, 0)
    lengths = np.full(batch, seqlen_k) if seqlens_k is None else np.clip(seqlens_k, 0, seqlen_k)
    i, j = np.arange(seqlen_q)[:, None], np.arange(seqlen_k)
    visible = np.ones(shape, dtype=bool) if mask is None else np.broadcast_to(mask, shape).copy()
    for b, length in enumerate(lengths):
        place: Any = i + (length - seqlen_q if align == "bottom_right" else 0)
        visible[b] &= j < length
        if left is not None:
            visible[b] &= j >= place - left
        if right is not None:
            visible[b] &= j <= place + right
    return visible


def torch_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    bias: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    layout: str = "bhsd",
    **visibility: Any,
) -> Any:
    """The same maths by torch in the dtype of q, without fusion: the yardstick of errors. Keys and
    values in fp8 are scaled and rounded to that dtype first."""
    import torch

    if dtype_name(k) == "float8_e4m3fn":
        heads_first = layout == "bhsd"
        k, v = (
            _widened(x, descale, heads_first, _as_torch(q))
            for x, descale in ((k, k_descale), (v, v_descale))
        )
    q, k, v = (_as_torch(x) for x in (q, k, v))
    if layout == "bshd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale

    def matmul(a: Any, b: Any) -> Any:
        # On the CPU torch's own 16-bit product sums in float32 too, but a hundred times slower.
        return a @ b if a.is_cuda else (a.float() @ b.float()).to(a.dtype)

    logits = scale * matmul(q, k.transpose(-1, -2))
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + torch.from_numpy(to_float64(bias)).to(logits)
    for name, dtype in (("mask", np.bool_), ("seqlens_k", np.int64)):
        if visibility.get(name) is not None:
            visibility[name] = to_float64(visibility[name]).astype(dtype)
    if any(x is not None and x is not False for x in visibility.values()):
        visible = torch.from_numpy(visible_pairs(tuple(logits.shape), **visibility))
        logits = logits.masked_fill(~visible.to(logits.device), -torch.inf)
    out = matmul(torch.nan_to_num(logits.softmax(dim=-1)), v)
    return out.transpose(1, 2) if layout == "bshd" else out


def _widened(x: Any, descale: Any, heads_first: bool, like: Any) -> Any:
    import torch

    x = to_float64(x)
    x = _scaled(x, descale) if heads_first else _scaled(x.swapaxes(1, 2), descale).swapaxes(1, 2)
    return torch.from_numpy(x).to(like)


def _as_torch(x: Any) -> Any:
    import torch

    if isinstance(x, torch.Tensor):
        return x.detach()
    return torch.from_numpy(to_float64(x)).to(getattr(torch, dtype_name(x)))


def assert_attention(out: Any, q: Any, k: Any, v: Any, *, lse: Any = None, **options: Any) -> None:
    """`out` (and `lse`) are attention of q, k, v with `options`, within the bound."""
    expected, expected_lse = reference_attention(q, k, v, **options)
    torch_error = _torch_error(expected, q, k, v, **options)
    epsilon = EPSILON[dtype_name(out)] * max(1.0, _largest(expected))
    if dtype_name(out) == "float32":
        epsilon *= max(1.0, (q.shape[-1] / 64) ** 0.5)
    assert dtype_name(out) == dtype_name(q), f"out has dtype {out.dtype}, q {q.dtype}"
    _assert_near("out", to_float64(out), expected, 2 * torch_error + epsilon)
    if lse is not None:
        assert dtype_name(lse) == "float32", f"lse has dtype {lse.dtype}"
        bound = LSE_EPSILON * max(1.0, _largest(expected_lse))
        _assert_near("lse", to_float64(lse), expected_lse, bound)


def _torch_error(expected: Any, q: Any, k: Any, v: Any, **options: Any) -> float:
    arrays = {"q": q, "k": k, "v": v, "bias": options.pop("bias", None)}
    finite = {name: _without_nonfinite(x) for name, x in arrays.items()}
    if any(finite[name] is not arrays[name] for name in arrays):
        expected, _ = reference_attention(**finite, **options)
    baseline = to_float64(torch_attention(**finite, **options))
    return float(np.abs(expected - baseline).max(initial=0.0, where=np.isfinite(expected)))


def _without_nonfinite(x: Any) -> Any:
    """x, or where it holds NaN or inf a torch tensor with zeros instead."""
    if x is None or np.isfinite(to_float64(x)).all():
        return x
    import torch

    x = _as_torch(x)
    return torch.nan_to_num(x.float(), nan=0.0, posinf=0.0, neginf=0.0).to(x.dtype)


def _largest(x: Any) -> float:
    return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))


def _assert_near(name: str, got: Any, expected: Any, bound: float) -> None:
    assert got.shape == expected.shape, f"{name} has shape {got.shape}, expected {expected.shape}"
    if got.size == 0:
        return
    finite = np.isfinite(got) & np.isfinite(expected)
    with np.errstate(invalid="ignore"):
        error = np.where(finite, np.abs(got - expected), 0.0)
    same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    error[~finite & ~same] = np.inf
    worst = np.unravel_index(error.argmax(), error.shape)
    where = tuple(int(i) for i in worst)
    text = (
        f"{name}: worst error {error[worst]:.3g} at {where}: got {got[worst]:.9g}, "
        f"expected {expected[worst]:.9g}; allowed {bound:.3g}"
    )
    print(text)
    assert error[worst] <= bound, text
