"""The front door: every kernel against attention in float64 and against torch's own.

    pytest tests/test_correctness.py -v

CPU kernels always run; GPU kernels where there is a GPU. The error bound and what is printed are in
fa101.testing.
"""

import pytest
import torch

import fa101
from fa101.testing import assert_attention, reference_attention, to_float64
from helpers import DTYPES, answers, attend, kernel_params, on, qkv

# batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v
SHAPES = {
    "square": (2, 2, 2, 128, 128, 64, 64),
    "ragged": (1, 3, 3, 97, 203, 40, 40),
    "grouped heads": (2, 8, 2, 65, 130, 128, 128),
    "one query": (3, 4, 1, 1, 300, 64, 64),
    "one key": (1, 2, 2, 33, 1, 32, 32),
    "wide": (1, 2, 1, 70, 90, 256, 256),
    "narrow values": (1, 2, 2, 50, 66, 96, 32),
    "long": (1, 1, 1, 1025, 1025, 64, 64),
}


@pytest.mark.parametrize("align", ["top_left", "bottom_right", None], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("kernel", kernel_params())
def test_float64(kernel, shape, dtype, align):
    """Out and lse, causal from either corner or not, within the bound of the float64 reference."""
    batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v = shape
    q, k, v = qkv(
        batch,
        heads,
        seqlen_q,
        seqlen_k,
        head_dim,
        heads_kv=heads_kv,
        head_dim_v=head_dim_v,
        dtype=dtype,
        kernel=kernel,
    )
    options = {"causal": align is not None, "align": align or "top_left"}
    if not answers(kernel, dtype, head_dim):
        with pytest.raises(ValueError, match=f"kernel '{on(kernel)['kernel']}' .*does not fit"):
            fa101.flash_attention(q, k, v, **on(kernel), **options)
        return
    out, lse = attend(q, k, v, kernel=kernel, **options)
    assert_attention(out, q, k, v, lse=lse, **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", kernel_params())
def test_torch_sdpa(kernel, dtype, causal):
    """What torch's scaled_dot_product_attention gives, to twice its own error and one rounding."""
    if not answers(kernel, dtype, 64):
        pytest.skip(f"{kernel} has no {dtype}; test_float64 checks that it says so")
    q, k, v = qkv(2, 8, 192, 192, 64, heads_kv=2, dtype=dtype, kernel=kernel)
    out = fa101.flash_attention(q, k, v, causal=causal, **on(kernel))
    theirs = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=True
    )
    expected, _ = reference_attention(q, k, v, causal=causal)
    their_error = abs(to_float64(theirs) - expected).max()
    rounding = torch.finfo(dtype).eps * abs(expected).max()
    assert abs(to_float64(out) - to_float64(theirs)).max() <= 3 * their_error + rounding


@pytest.mark.parametrize("kernel", kernel_params())
def test_same_bits_every_time(kernel):
    q, k, v = qkv(2, 4, 130, 257, 64, dtype=torch.float16, kernel=kernel)
    first = attend(q, k, v, causal=True, kernel=kernel)
    for _ in range(3):
        for a, b in zip(attend(q, k, v, causal=True, kernel=kernel), first, strict=True):
            assert torch.equal(a, b)


def test_every_kernel_is_here():
    cuda = {"naive", "fa1", "fa2", "fa2_cute", "sm90"}
    cpu = {"cpu_naive", "cpu_fa1", "cpu_fa2"}
    assert {(k["name"], k["device"]) for k in fa101.kernels()} == {
        *((name, "cuda") for name in cuda),
        *((name, "cpu") for name in cpu),
    }
