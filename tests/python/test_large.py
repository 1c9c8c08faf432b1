"""Offsets past 2^31, on small problems with large strides or many heads."""

import numpy as np
import pytest
import torch

import fa101
from fa101.testing import assert_attention
from helpers import attend, kernel_params, on, qkv, wider


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("kernel", kernel_params("cpu"))
def test_huge_strides_cpu(kernel, axis, tmp_path):
    """FA-007, FA-026: stride times index passes 2^31 elements, in a sparse file."""
    shape = [2, 2, 2, 16]
    shape[axis] = 5
    small = [x.numpy().astype(np.float16) for x in qkv(*shape[:3], head_dim=16)]
    small = [x[:, :, : shape[2]] for x in small]
    step = 2**29 + 8
    arrays = []
    for i, values in enumerate([*small, np.full_like(small[0], np.nan)]):
        length = step * (values.shape[axis] - 1) + 4096
        path = tmp_path / f"{i}.bin"
        with path.open("wb") as file:
            file.truncate(2 * length)
        flat = np.memmap(path, np.float16, "r+")
        strides = [0, 0, 0, 2]
        dense = 32
        for other in (2, 1, 0):
            strides[other] = dense if other != axis else 2 * step
            dense *= values.shape[other] if other != axis else 1
        view = np.lib.stride_tricks.as_strided(flat, values.shape, strides)
        view[...] = values
        arrays.append(view)
    q, k, v, out = arrays
    expected = fa101.flash_attention(*small, causal=True, **on(kernel))
    fa101.flash_attention(q, k, v, causal=True, **on(kernel), out=out)
    assert (out == expected).all()


@pytest.mark.gpu
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("kernel", kernel_params("cuda"))
def test_huge_strides_cuda(kernel, axis):
    """FA-007, FA-026: the same in a buffer of 5 GB per argument, with canaries."""
    shape = [2, 2, 70, 64]
    shape[axis] = 70 if axis == 2 else 5
    small = qkv(*shape[:3], head_dim=64, dtype=torch.float16, kernel=kernel)
    head_dim = small[0].shape[-1]
    step = 2**25 + 8 if axis == 2 else 2**29 + 8
    views, buffers = [], []
    for values in [*small, torch.full_like(small[0], torch.nan)]:
        strides, dense = [0, 0, 0, 1], head_dim
        for other in (2, 1, 0):
            strides[other] = dense if other != axis else step
            dense *= values.shape[other] if other != axis else 1
        flat = torch.full(
            (step * (values.shape[axis] - 1) + 65536,),
            torch.nan,
            dtype=torch.float16,
            device="cuda",
        )
        views.append(flat.as_strided(values.shape, strides).copy_(values))
        buffers.append(flat)
    q, k, v, out = views
    expected = fa101.flash_attention(*small, causal=True, **on(kernel))
    fa101.flash_attention(q, k, v, causal=True, **on(kernel), out=out)
    assert torch.equal(out, expected)
    out.fill_(torch.nan)
    assert buffers[3].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", kernel_params("cuda"))
def test_many_heads_and_long_sequences(kernel):
    """FA-007: batch * heads past 65535, offsets past 2^31; the last heads and rows are right."""
    for shape in [(8300, 16, 1, 1, 128), (15000, 16, 8, 8, 128), (1, 2, 2**23, 40, 136)]:
        batch, heads, seqlen_q, seqlen_k, head_dim = shape
        head_dim = wider(kernel, head_dim)
        make = {"dtype": torch.float16, "device": "cuda"}
        generator = torch.Generator("cuda").manual_seed(0)
        q = torch.randn(batch, heads, seqlen_q, head_dim, generator=generator, **make)
        k = torch.randn(batch, heads, seqlen_k, head_dim, generator=generator, **make)
        v = torch.randn(batch, heads, seqlen_k, head_dim, generator=generator, **make)
        out, lse = attend(q, k, v, kernel=kernel)
        for b, rows in [(0, slice(0, 70)), (batch - 1, slice(-70, None))]:
            part = slice(b, b + 1)
            assert_attention(
                out[part, :, rows], q[part, :, rows], k[part], v[part], lse=lse[part, :, rows]
            )
        assert out.isfinite().all()
        del q, k, v, out, lse


@pytest.mark.gpu
def test_sizes_that_no_grid_holds():
    """FA-007: refused before the launch, naming the size and the limit."""
    huge = torch.zeros(1, 1, 1, 8, device="cuda", dtype=torch.float16).expand(1, 1, 2**31 - 1, 8)
    with pytest.raises(ValueError, match=r"k has sequence length 2147483647; at most"):
        fa101.flash_attention(huge[:, :, :1], huge, huge)
