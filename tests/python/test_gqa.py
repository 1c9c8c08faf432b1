"""Grouped-query attention: which key/value head a query head reads."""

import pytest
import torch

import fa101
from fa101.testing import assert_attention
from helpers import DEVICES, attend, kernel_params, qkv


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(("heads", "heads_kv"), [(4, 2), (6, 2), (8, 1), (12, 4)])
@pytest.mark.parametrize("kernel", kernel_params())
def test_head_map(kernel, heads, heads_kv, layout):
    """FA-077: with k = 0 and v head h full of h, query head i returns i // (heads / heads_kv)."""
    q, k, v = qkv(2, heads, 9, 21, 16, heads_kv=heads_kv, layout=layout, kernel=kernel)
    axis = 1 if layout == "bhsd" else 2
    k.zero_()
    for h in range(heads_kv):
        v.select(axis, h).fill_(h)
    out, _ = attend(q, k, v, kernel=kernel, layout=layout)
    for i in range(heads):
        expected = torch.full_like(out.select(axis, i), i // (heads // heads_kv))
        torch.testing.assert_close(out.select(axis, i), expected)


@pytest.mark.parametrize("kernel", kernel_params())
def test_same_bits_as_repeated_heads(kernel):
    """FA-077: equal to repeat_interleave of k and v."""
    q, k, v = qkv(1, 6, 70, 70, 32, heads_kv=2, kernel=kernel)
    out, lse = attend(q, k, v, kernel=kernel)
    repeated = [x.repeat_interleave(3, dim=1) for x in (k, v)]
    full, full_lse = attend(q, *repeated, kernel=kernel)
    assert_attention(out, q, k, v, lse=lse)
    if kernel.endswith(":split_kv"):  # where the keys are split depends on the number of heads
        torch.testing.assert_close(out, full, rtol=0, atol=2e-3)
        torch.testing.assert_close(lse, full_lse, rtol=0, atol=1e-5)
    else:
        assert torch.equal(out, full)
        assert torch.equal(lse, full_lse)


@pytest.mark.parametrize(("heads", "heads_kv"), [(3, 2), (33, 2), (2, 4), (4, 0), (1, 3)])
def test_heads_that_do_not_divide(heads, heads_kv):
    """FA-055: names k, both counts and the rule."""
    q, k, v = qkv(2, heads, 5, 7, 8, heads_kv=heads_kv)
    rule = rf"k has {heads_kv} heads and q has {heads}.*must be a multiple"
    with pytest.raises(ValueError, match=rule):
        fa101.flash_attention(q, k, v)


@pytest.mark.parametrize("device", DEVICES)
def test_k_and_v_with_different_heads(device):
    """FA-055: the same words on the CPU and on CUDA."""
    q, k, _ = qkv(1, 4, 5, 5, 8, device=device)
    with pytest.raises(ValueError, match=r"v has heads 2 but k has 4; they must be equal"):
        fa101.flash_attention(q, k, k[:, :2])
