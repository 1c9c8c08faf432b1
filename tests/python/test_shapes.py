"""Head dims, sequence lengths around the tiles, empty problems."""

import ctypes
import mmap

import numpy as np
import pytest
import torch

import fa101
from fa101.testing import assert_attention
from helpers import (
    DEVICES,
    answers,
    attend,
    bits,
    kernel_params,
    on,
    poisoned_memory,
    qkv,
    variants,
    wider,
)

HEAD_DIMS = [
    *(1, 2, 3, 7, 8, 16, 24, 33, 40, 63, 64, 65, 72, 80, 96, 112, 127, 128, 129),
    *(160, 192, 200, 224, 256, 257, 320, 512, 1024, 1025),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", kernel_params())
def test_head_dims(kernel, dtype):
    """FA-014: advertised sizes work, twice with the same bits; others say what there is."""
    for head_dim in HEAD_DIMS:
        q, k, v = qkv(1, 2, 130, 130, head_dim, dtype=dtype, kernel=kernel)
        if not answers(kernel, dtype, head_dim):
            with pytest.raises(ValueError, match=rf"{q.shape[-1]}|float32") as error:
                fa101.flash_attention(q, k, v, **on(kernel))
            assert f"kernel '{on(kernel)['kernel']}' with strategy" in str(error.value)
            continue
        causal = head_dim % 3 == 1
        out, lse = attend(q, k, v, causal=causal, kernel=kernel)
        assert_attention(out, q, k, v, lse=lse, causal=causal)
        again, _ = attend(q, k, v, causal=causal, kernel=kernel)
        assert torch.equal(bits(out), bits(again))


@pytest.mark.gpu
def test_head_dim_no_kernel_answers():
    """FA-014: NotImplementedError names head_dim, the value and the limit of each kernel."""
    q, k, v = qkv(1, 1, 2, 2, 2000, device="cuda")
    with pytest.raises(NotImplementedError, match=r"head_dim.*2000.*1024"):
        fa101.flash_attention(q, k, v)


@pytest.mark.parametrize("kernel", kernel_params())
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    [(8, 16), (16, 8), (64, 128), (128, 64), (192, 128), (192, 64), (128, 1), (3, 5), (16, 256)],
)
def test_value_head_dim(kernel, head_dim, head_dim_v):
    """FA-052: the result is head_dim_v wide, the default scale comes from head_dim."""
    dtype = torch.float16
    if not answers(kernel, dtype, head_dim) or not answers(kernel, dtype, head_dim_v):
        pytest.skip(f"{kernel} does not answer this head_dim")
    q, k, v = qkv(
        2,
        4,
        33,
        70,
        head_dim,
        heads_kv=2,
        head_dim_v=head_dim_v,
        dtype=dtype,
        kernel=kernel,
    )
    out, lse = attend(q, k, v, kernel=kernel)
    assert out.shape == (2, 4, 33, wider(kernel, head_dim_v))
    assert_attention(out, q, k, v, lse=lse)


LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 192]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kernel", kernel_params())
def test_lengths_around_tiles(kernel, dtype):
    """FA-035: every seqlen_q with every seqlen_k (half of them in each dtype), and 1025."""
    if not answers(kernel, dtype, 32):
        pytest.skip(f"{kernel} has no {dtype}")
    pairs = [(a, b) for a in LENGTHS for b in LENGTHS] + [(1025, 130), (130, 1025)] * 2
    pairs = pairs[dtype == torch.float16 :: 2] if answers(kernel, torch.float32, 32) else pairs
    for i, (seqlen_q, seqlen_k) in enumerate(pairs):
        q, k, v = qkv(1, 1, seqlen_q, seqlen_k, 32, dtype=dtype, kernel=kernel, seed=i)
        options = {"causal": i % 3 > 0, "align": ("top_left", "bottom_right")[i % 2]}
        out, lse = attend(q, k, v, kernel=kernel, **options)
        assert_attention(out, q, k, v, lse=lse, **options)


class Guarded:
    """An array that ends where an unmapped page begins: one element too far is a crash."""

    def __init__(self, values):
        page = mmap.PAGESIZE
        size = -(-values.nbytes // page) * page
        self.map = mmap.mmap(-1, size + page)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        if ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + size), page, 0) != 0:
            pytest.skip("mprotect is refused here")
        flat = np.frombuffer(self.map, values.dtype, values.size, size - values.nbytes)
        self.array = flat.reshape(values.shape)
        self.array[...] = values


@pytest.mark.parametrize("kernel", kernel_params("cpu"))
def test_nothing_past_the_end(kernel):
    """FA-035 on the CPU: q, k, v and out each end at an unmapped page."""
    for seqlen_q, seqlen_k, head_dim in [(17, 33, 40), (64, 129, 64), (1, 7, 3), (130, 31, 72)]:
        for dtype in (np.float32, np.float16):
            values = [x.numpy().astype(dtype) for x in qkv(2, 2, seqlen_q, seqlen_k, head_dim)]
            guarded = [Guarded(x) for x in (*values, np.full_like(values[0], np.nan))]
            q, k, v, out = (g.array for g in guarded)
            fa101.flash_attention(q, k, v, out=out, **on(kernel))
            assert_attention(out, q, k, v)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "shape", [(0, 2, 5, 7), (2, 0, 5, 7), (2, 2, 0, 7), (2, 2, 5, 0), (0, 0, 0, 0)], ids=str
)
@pytest.mark.parametrize("device", DEVICES)
def test_empty(device, shape, causal):
    """FA-016: right shapes and dtypes, no launch; without keys out is 0 and lse -inf."""
    batch, heads, seqlen_q, seqlen_k = shape
    for kernel in ["auto", *variants(device)]:
        q, k, v = qkv(batch, heads, seqlen_q, seqlen_k, 16, device=device, kernel=kernel)
        out, lse = attend(q, k, v, causal=causal, kernel=kernel)
        assert out.shape == q.shape
        assert out.dtype == q.dtype
        assert lse.shape == (batch, heads, seqlen_q)
        assert lse.dtype == torch.float32
        assert (out == 0).all()
        assert (lse == -torch.inf).all()
    # Nothing of it is left behind for the next call to trip over.
    q, k, v = qkv(1, 1, 4, 4, 8, device=device)
    assert_attention(fa101.flash_attention(q, k, v), q, k, v)


def test_empty_arrays_of_other_kinds():
    """FA-016 for NumPy, where an empty array may have any pointer and strides."""
    q, k = np.empty((2, 2, 5, 16), np.float32), np.empty((2, 2, 0, 16), np.float32)
    assert (fa101.flash_attention(q, k, k) == 0).all()
    assert fa101.flash_attention(k, q, q).shape == (2, 2, 0, 16)
    for shape in [(0, 2, 5, 16), (2, 0, 5, 16), (2, 2, 0, 16)]:
        empty = np.empty(shape, np.float32)
        out, lse = fa101.flash_attention(empty, empty, empty, return_lse=True)
        assert out.shape == shape
        assert lse.shape == shape[:3]


def test_matrix_that_no_machine_holds():
    """FA-007: cpu_naive refuses S of 2^62 floats instead of counting its bytes wrong."""
    x = torch.empty(1, dtype=torch.float16).expand(1, 1, 1_518_500_250, 1)
    with pytest.raises(ValueError, match="S of one head, 1518500250 x 1518500250"):
        fa101.flash_attention(x, x, x, kernel="cpu_naive")


@pytest.mark.parametrize("device", DEVICES)
def test_poison_is_poison(device):
    """The other tests rely on it: what torch allocates there is NaN until written."""
    with poisoned_memory():
        assert torch.empty(64, device=device).isnan().all()
