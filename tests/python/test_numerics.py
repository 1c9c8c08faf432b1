"""NaN, infinities, scales and large logits."""

import math

import numpy as np
import pytest
import torch

import fa101
from fa101.testing import assert_attention
from helpers import DTYPES, REDONE, answers, attend, kernel_params, qkv


@pytest.mark.parametrize("kernel", kernel_params())
@pytest.mark.parametrize("causal", [False, True])
def test_nan_and_inf_that_are_seen(kernel, causal):
    """FA-050: they propagate to the rows (and channels) that see them, and to no others."""
    seqlen, head_dim, options = 70, 16, {"causal": causal, "kernel": kernel}
    q, k, v = qkv(1, 2, seqlen, seqlen, head_dim, kernel=kernel)
    clean, _ = attend(q, k, v, **options)
    row = torch.arange(seqlen, device=q.device)

    def check(*tensors, rows):
        out, lse = attend(*tensors, **options)
        assert_attention(out, *tensors, lse=lse, causal=causal)
        torch.testing.assert_close(out[:, :, ~rows], clean[:, :, ~rows], **REDONE[out.dtype])
        return out[:, :, rows]

    def changed(x, value, *where):
        x = x.clone()
        x[:, :, where[0], where[1]] = value
        return x

    sees_40 = row >= 40 if causal else row >= 0
    # (a) one query, (b) one element of a key, (c) one element of a value, (d) an infinite query
    assert check(changed(q, math.nan, 3, slice(None)), k, v, rows=row == 3).isnan().all()
    assert check(q, changed(k, math.nan, 40, 5), v, rows=sees_40).isnan().all()
    seen = check(q, k, changed(v, math.nan, 40, 5), rows=sees_40)
    assert seen[..., 5].isnan().all()
    assert not seen[..., :5].isnan().any()
    check(changed(q, math.inf, 3, 0), k, v, rows=row == 3)
    # (e) a logit of +inf, (f) one of -inf: that key weighs nothing, the rest is finite
    ones = torch.ones_like(q)
    clean, _ = attend(ones, k, v, **options)
    assert check(ones, changed(k, math.inf, 40, 5), v, rows=sees_40).isnan().all()
    assert check(ones, changed(k, -math.inf, 40, 5), v, rows=sees_40).isfinite().all()


@pytest.mark.parametrize("scale", [0.0, -0.7, 1e-30, 3.0, 1, np.float32(0.25)])
@pytest.mark.parametrize("kernel", kernel_params())
def test_scales(kernel, scale):
    """Zero, negative and tiny scales are exact."""
    q, k, v = qkv(1, 2, 65, 97, 32, kernel=kernel)
    out, lse = attend(q, k, v, softmax_scale=scale, causal=True, kernel=kernel)
    assert_attention(out, q, k, v, lse=lse, softmax_scale=float(scale), causal=True)
    if scale == 0:
        means = v.double().cumsum(2) / torch.arange(1, 98, device=v.device)[:, None]
        torch.testing.assert_close(out.double(), means[:, :, :65], rtol=0, atol=2e-3)


@pytest.mark.parametrize("size", [30.0, 1e-3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", kernel_params())
def test_large_and_small_logits(kernel, dtype, size):
    """One key takes all the weight, or all keys share it."""
    if not answers(kernel, dtype, 64):
        pytest.skip(f"{kernel} has no {dtype}")
    q, k, v = qkv(1, 2, 50, 130, 64, dtype=dtype, kernel=kernel)
    q, k = q * size, k * 3
    out, lse = attend(q, k, v, kernel=kernel)
    assert_attention(out, q, k, v, lse=lse)


@pytest.mark.parametrize("kernel", kernel_params())
def test_maximum_that_keeps_growing(kernel):
    """Every key block raises the running maximum; or the first holds it."""
    q, k, v = qkv(1, 1, 33, 300, 16, kernel=kernel)
    q, k = q.abs(), k.abs() * torch.linspace(0.1, 3, 300, device=k.device)[:, None].to(k.dtype)
    for keys in (k, k.flip(2)):
        out, lse = attend(q, keys, v, kernel=kernel)
        assert_attention(out, q, keys, v, lse=lse)


@pytest.mark.parametrize("kernel", kernel_params())
def test_repeats_agree(kernel):
    """FA-070: races show only at times, so the same call many times."""
    q, k, v = qkv(30, 1, 256, 128, 128, dtype=torch.float16, kernel=kernel)
    q, k, v = 3 * q, 3 * k, 3 * v
    first, first_lse = attend(q, k, v, causal=True, kernel=kernel)
    assert_attention(first, q, k, v, lse=first_lse, causal=True)
    for _ in range(100 if q.is_cuda else 2):
        out, lse = attend(q, k, v, causal=True, kernel=kernel)
        assert torch.equal(out, first)
        assert torch.equal(lse, first_lse)


def test_lse_joins_two_halves():
    """Two calls over half the keys each, joined by their lse, are the call over all."""
    q, k, v = qkv(2, 2, 20, 60, 16)
    whole, whole_lse = fa101.flash_attention(q, k, v, return_lse=True)
    parts = [
        fa101.flash_attention(q, k[:, :, s], v[:, :, s], return_lse=True)
        for s in (slice(0, 23), slice(23, None))
    ]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    joined = sum((out * (part - lse).exp()[..., None] for out, part in parts))
    torch.testing.assert_close(lse, whole_lse)
    torch.testing.assert_close(joined, whole)
