"""Grouped-query attention: which key/value head a query head reads."""

import math
from random import Random

import pytest
import torch

import fa101
from fa101.testing import assert_attention
from helpers import DEVICES, attend, bits, kernel_params, on, qkv


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


def picked(count, **axes):
    """`count` problems, always the same, in which the values of an axis come equally often."""
    random = Random(0)
    columns = [random.sample((values * count)[:count], count) for values in axes.values()]
    return [dict(zip(axes, row, strict=True)) for row in zip(*columns, strict=True)]


def sliced(x, before, after):
    """x, the middle of a tensor whose third axis has so much more to either side; there is NaN."""
    room = x.new_full((*x.shape[:2], before + x.shape[2] + after, x.shape[3]), math.nan)
    return room[:, :, before : before + x.shape[2]].copy_(x)


CHUNKS = picked(
    48,
    seqlen_q=[1, 3, 16, 17, 40, 64, 100, 130, 257],
    seqlen_k=[77, 130, 300, 600],
    group=[2, 3, 4, 6, 8, 16, 32],
    heads_kv=[1, 2, 3],
    tiles=[1, 140],  # at least, were the rows of a group packed; an H200 has 132 multiprocessors
    head_dims=[(64, 64), (128, 128), (256, 256), (192, 128), (96, 96)],
    dtype=[torch.float16, torch.bfloat16],
    mask=[
        {},
        {"causal": True},
        {"window": (20, 5)},
        {"causal": True, "window": (150, None)},
        {"causal": True, "softcap": 5.0},
    ],
    align=["top_left", "bottom_right"],
    how=["bhsd", "bshd", "fused"],
    out=["dense", "strided"],
    special=["nothing", "NaN", "leap"],
)


@pytest.mark.parametrize(
    ("kernel", "chunk"),
    [
        pytest.param(kernel, c, id=f"{kernel}-{c['seqlen_q']}x{c['group']}", marks=marks)
        for kernel, chunks, marks in (
            ("cpu_fa2", CHUNKS[::4], ()),
            ("sm90", CHUNKS, pytest.mark.gpu),
        )
        for c in chunks
    ],
)
def test_short_chunks_of_groups(kernel, chunk):
    """Few queries a head: a tile may hold those of several heads of a group. Few tiles and many,
    strided q and out, and rows that have to be done again."""
    seqlen_q, seqlen_k, group, heads_kv, tiles, (head_dim, head_dim_v), dtype = (
        chunk[name]
        for name in ("seqlen_q", "seqlen_k", "group", "heads_kv", "tiles", "head_dims", "dtype")
    )
    batch = 1
    if kernel == "sm90":
        batch = -(-tiles // (heads_kv * -(-seqlen_q * group // 128)))
    layout = "bhsd" if chunk["how"] == "bhsd" else "bshd"
    q, k, v = qkv(
        batch, group * heads_kv, seqlen_q, seqlen_k, head_dim, heads_kv=heads_kv,
        head_dim_v=head_dim_v, dtype=dtype, layout=layout, kernel=kernel,
    )  # fmt: skip
    if chunk["how"] == "fused":  # q is a slice of a projection, k and v are those of another
        q, k, v = sliced(q, 0, 2 * heads_kv), sliced(k, 0, heads_kv), sliced(v, heads_kv, 0)
    rows = [x if layout == "bhsd" else x.transpose(1, 2) for x in (q, k, v)]
    if chunk["special"] == "NaN":  # in a key that some rows see, of one head
        rows[1][-1, -1, -1] = rows[2][-1, -1, -1] = math.nan
    elif chunk["special"] == "leap":  # logits of 100 in some rows
        rows[0][:, :, ::5, 0], rows[1][:, :, 3, 0] = 20.0, 5 * head_dim**0.5
    options = {**chunk["mask"], "align": chunk["align"], "layout": layout}

    out, lse = attend(q, k, v, kernel=kernel, **options)
    assert_attention(out, q, k, v, lse=lse, **options)
    target = torch.full_like(out, math.nan)
    if chunk["out"] == "strided":
        target = sliced(target, 1, 1)
    fa101.flash_attention(q, k, v, out=target, **on(kernel), **options)
    assert torch.equal(bits(target), bits(out))
    if chunk["out"] == "strided":
        assert target._base[:, :, [0, -1]].isnan().all()


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
