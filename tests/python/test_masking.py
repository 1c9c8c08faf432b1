"""Which keys a query sees, and that the others have no effect at all."""

import math

import pytest
import torch

from fa101.testing import assert_attention
from helpers import REDONE, attend, kernel_params, qkv


def ramp(kernel, seqlen_q, seqlen_k):
    """q of zeros, so that every visible key weighs the same; v[j] is j + 1."""
    q, k, v = qkv(1, 1, seqlen_q, seqlen_k, 8, kernel=kernel)
    v[...] = torch.arange(1, seqlen_k + 1)[:, None]
    return torch.zeros_like(q), k, v


@pytest.mark.parametrize("kernel", kernel_params())
def test_fewer_queries_than_keys(kernel):
    """FA-023: both corners, by the small examples of the docstring."""
    q, k, v = ramp(kernel, 2, 5)
    for align, means, counts in [
        ("bottom_right", [2.5, 3.0], [4, 5]),
        ("top_left", [1.0, 1.5], [1, 2]),
    ]:
        out, lse = attend(q, k, v, causal=True, align=align, kernel=kernel)
        assert out[0, 0, :, 0].tolist() == pytest.approx(means)
        assert (out == out[..., :1]).all()
        assert lse.flatten().tolist() == pytest.approx([math.log(n) for n in counts])


@pytest.mark.parametrize("kernel", kernel_params())
def test_rows_that_see_nothing(kernel):
    """FA-017: zeros and -inf, no NaN, and the rows below are exact."""
    q, k, v = ramp(kernel, 5, 2)
    out, lse = attend(q, k, v, causal=True, align="bottom_right", kernel=kernel)
    assert out[0, 0, :, 0].tolist() == pytest.approx([0, 0, 0, 1, 1.5])
    assert lse.flatten().tolist() == pytest.approx([-math.inf] * 3 + [0, math.log(2)])


@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
@pytest.mark.parametrize("kernel", kernel_params())
def test_lengths_that_differ(kernel, align):
    """FA-017 and FA-023 on random data, around the tiles."""
    longer_q = [(2048, 1024), (130, 2), (129, 128), (64, 1)]
    longer_k = [(3, 128), (1, 300), (64, 65), (127, 129), (128, 256), (129, 300)]
    for seqlen_q, seqlen_k in longer_q + longer_k:
        q, k, v = qkv(1, 1, seqlen_q, seqlen_k, 32, kernel=kernel)
        out, lse = attend(q, k, v, causal=True, align=align, kernel=kernel)
        assert_attention(out, q, k, v, lse=lse, causal=True, align=align)


@pytest.mark.parametrize("kernel", kernel_params())
def test_one_query_at_the_end_sees_all(kernel):
    """FA-076 (a): with one query, causal from the bottom right changes nothing."""
    q, k, v = qkv(2, 4, 1, 10, 32, heads_kv=2, kernel=kernel)
    causal, _ = attend(q, k, v, causal=True, align="bottom_right", kernel=kernel)
    full, _ = attend(q, k, v, kernel=kernel)
    assert torch.equal(causal, full)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kernel", kernel_params())
def test_hidden_keys_have_no_effect(kernel, bad):
    """FA-050: k and v that a row may not see may hold anything.

    A kernel may notice, and sum the rows of that tile in another order: close, not the same bits.
    """
    for seqlen, first_bad in [(8, 5), (130, 65), (200, 129)]:
        q, k, v = qkv(1, 2, seqlen, seqlen, 32, kernel=kernel)
        clean, clean_lse = attend(q, k, v, causal=True, kernel=kernel)
        k[:, :, first_bad:] = bad
        v[:, :, first_bad:] = bad
        out, lse = attend(q, k, v, causal=True, kernel=kernel)
        rows = slice(None, first_bad)
        torch.testing.assert_close(out[:, :, rows], clean[:, :, rows], **REDONE[out.dtype])
        torch.testing.assert_close(lse[:, :, rows], clean_lse[:, :, rows], rtol=1e-6, atol=2e-6)
        assert_attention(out, q, k, v, lse=lse, causal=True)


@pytest.mark.parametrize("kernel", kernel_params())
def test_rows_past_the_end_are_not_read(kernel):
    """FA-009, FA-035: q, k and v are the front of buffers whose tail is NaN."""
    q, k, v = qkv(2, 2, 256, 256, 64, kernel=kernel)
    for seqlen_q, seqlen_k in [(1, 1), (17, 33), (65, 100), (129, 129)]:
        parts = [x[:, :, :n] for x, n in ((q, seqlen_q), (k, seqlen_k), (v, seqlen_k))]
        expected = attend(*(x.clone() for x in parts), kernel=kernel)
        tails = [x.clone() for x in (q, k, v)]
        for x, n in zip(tails, (seqlen_q, seqlen_k, seqlen_k), strict=True):
            x[:, :, n:] = math.nan
        parts = [x[:, :, :n] for x, n in zip(tails, (seqlen_q, seqlen_k, seqlen_k), strict=True)]
        for got, want in zip(attend(*parts, kernel=kernel), expected, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("bad", ["nan", "inf", "values"])
@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
@pytest.mark.parametrize(
    ("kernel", "head_dim", "head_dim_v"),
    [
        ("cpu_fa2", 64, 64),
        *(
            pytest.param("sm90", *head_dims, marks=pytest.mark.gpu)
            for head_dims in [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
        ),
    ],
)
def test_blocks_hidden_from_a_part_of_a_tile(kernel, head_dim, head_dim_v, align, bad):
    """FA-017, FA-050: keys that the upper half of a tile, or none of it, sees may hold anything;
    rows without keys are 0. In few tiles and in many, which are of other kernels."""
    shapes = [  # heads, seqlen_q, seqlen_k, the first bad key
        (1, 128, 192, 128),  # bottom right: of two blocks the first half of the rows sees one
        (2, 200, 100, 60),  # bottom right: a hundred rows without keys
        (2, 256, 130, 129),
        (1, 130, 400, 300),
        (150, 100, 64, 40),  # more tiles than multiprocessors
    ]
    if head_dim <= 96:
        shapes.append((13, 1300, 1100, 1050))  # tiles of 192 rows
    for i, (heads, seqlen_q, seqlen_k, first_bad) in enumerate(shapes):
        dtype = (torch.float16, torch.bfloat16)[i % 2]
        q, k, v = qkv(1, heads, seqlen_q, seqlen_k, head_dim, head_dim_v=head_dim_v, dtype=dtype,
                      kernel=kernel)  # fmt: skip
        if bad == "values":
            v[:, 0, first_bad:, 5] = math.nan
        else:
            k[:, 0, first_bad:] = v[:, 0, first_bad:] = float(bad)
        out, lse = attend(q, k, v, causal=True, align=align, kernel=kernel)
        some = (x[:, ::10] for x in (out, q, k, v))
        assert_attention(*some, lse=lse[:, ::10], causal=True, align=align)
        if align == "bottom_right" and seqlen_q > seqlen_k:
            assert (out[:, :, : seqlen_q - seqlen_k] == 0).all()
            assert (lse[:, :, : seqlen_q - seqlen_k] == -math.inf).all()
