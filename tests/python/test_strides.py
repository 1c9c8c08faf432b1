"""Layouts, strides and alignment of inputs and outputs."""

import numpy as np
import pytest
import torch

import fa101
from fa101.testing import assert_attention, dtype_name
from helpers import DEVICES, answers, attend, bits, kernel_params, on, qkv


@pytest.mark.parametrize("kernel", kernel_params())
def test_bshd_is_bhsd_with_other_strides(kernel):
    q, k, v = qkv(2, 4, 65, 130, 32, heads_kv=2, kernel=kernel)
    expected, expected_lse = attend(q, k, v, causal=True, kernel=kernel)
    swapped = [x.transpose(1, 2) for x in (q, k, v)]
    for tensors in (swapped, [x.contiguous() for x in swapped]):
        out, lse = attend(*tensors, causal=True, layout="bshd", kernel=kernel)
        assert torch.equal(out.transpose(1, 2), expected)
        assert torch.equal(lse, expected_lse)  # (batch, heads, seqlen_q) in either layout


def strided_like(x, how):
    """The values of x under other strides."""
    if how == "packed":  # q of a (batch, seqlen, 3, heads, head_dim) projection
        batch, heads, seqlen, head_dim = x.shape
        packed = x.new_full((batch, seqlen, 3, heads, head_dim), torch.nan)
        view = packed[:, :, 1].transpose(1, 2)
    elif how == "padded rows":
        view = x.new_full((*x.shape[:3], x.shape[3] + 5), torch.nan)[..., : x.shape[3]]
    elif how == "every other row":
        view = x.new_full((*x.shape[:2], 2 * x.shape[2], x.shape[3]), torch.nan)[:, :, ::2]
    elif how == "batch innermost":
        view = x.new_empty((x.shape[2], x.shape[1], x.shape[0], x.shape[3])).permute(2, 1, 0, 3)
    elif how == "last axis strided":
        view = x.new_full((*x.shape[:3], 2 * x.shape[3]), torch.nan)[..., ::2]
    elif how == "last axis outermost":
        view = x.new_empty((x.shape[3], *x.shape[:3])).permute(1, 2, 3, 0)
    view.copy_(x)
    return view


HOWS = [
    "packed",
    "padded rows",
    "every other row",
    "batch innermost",
    "last axis strided",
    "last axis outermost",
]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kernel", kernel_params())
def test_strides(kernel, how):
    """Every stride of every argument, alone and together; inputs stay as they were."""
    q, k, v = qkv(2, 3, 33, 65, 24, kernel=kernel)
    expected, expected_lse = attend(q, k, v, causal=True, kernel=kernel)
    strided = [strided_like(x, how) for x in (q, k, v)]
    for choice in [(0,), (1,), (2,), (0, 1, 2)]:
        tensors = [strided[i] if i in choice else x for i, x in enumerate((q, k, v))]
        out, lse = attend(*tensors, causal=True, kernel=kernel)
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)
    for x, y in zip(strided, (q, k, v), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("kernel", kernel_params())
def test_expanded(kernel):
    """Stride 0, over batch, heads and rows."""
    q, k, v = qkv(1, 1, 1, 1, 32, kernel=kernel)
    expanded = [x.expand(3, 2, n, -1) for x, n in ((q, 40), (k, 70), (v, 70))]
    out, lse = attend(*expanded, kernel=kernel)
    assert_attention(out, *expanded, lse=lse)


@pytest.mark.parametrize("kernel", kernel_params("cpu"))
def test_negative_strides(kernel):
    """NumPy has them: sequences and heads read backwards."""
    q, k, v = (x.numpy() for x in qkv(2, 4, 33, 65, 24))
    flipped = [np.ascontiguousarray(x[:, ::-1, ::-1])[:, ::-1, ::-1] for x in (q, k, v)]
    assert min(flipped[0].strides) < 0
    expected = fa101.flash_attention(q, k, v, **on(kernel))
    assert (fa101.flash_attention(*flipped, **on(kernel)) == expected).all()
    # The same numbers by a negative stride of the last axis, which is copied.
    mirrored = [np.ascontiguousarray(x[..., ::-1])[..., ::-1] for x in (q, k, v)]
    assert (fa101.flash_attention(*mirrored, **on(kernel)) == expected).all()


def misaligned(x, offset):
    """x, contiguous, starting `offset` elements after an aligned address."""
    buffer = x.new_full((x.numel() + 16,), torch.nan)
    view = buffer[offset : offset + x.numel()].view(x.shape)
    assert view.is_contiguous()
    return view.copy_(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kernel", kernel_params())
def test_unaligned_pointers(kernel, dtype):
    """FA-012: each argument in turn off the 16-byte grid, and rows that are no whole vectors."""
    if not answers(kernel, dtype, 64):
        pytest.skip(f"{kernel} has no {dtype}")
    for head_dim in [64, 46] if answers(kernel, dtype, 46) else [64]:
        q, k, v = qkv(2, 3, 17, 33, head_dim, dtype=dtype, kernel=kernel)
        expected, _ = attend(q, k, v, causal=True, kernel=kernel)
        assert_attention(expected, q, k, v, causal=True)
        for offset in [1, 2, 3, 4]:
            for which in range(4):
                tensors = [q, k, v, torch.full_like(q, torch.nan)]
                tensors[which] = misaligned(tensors[which], offset)
                q_, k_, v_, out = tensors
                if kernel.startswith("sm90") and offset * q.element_size() % 16 != 0:
                    with pytest.raises(ValueError, match="multiple of 16 bytes"):
                        fa101.flash_attention(q_, k_, v_, causal=True, **on(kernel), out=out)
                    which_kernel = on("auto")
                else:
                    which_kernel = on(kernel)
                fa101.flash_attention(q_, k_, v_, causal=True, **which_kernel, out=out)
                assert_attention(out, q, k, v, causal=True)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_unaligned_elements(dtype):
    """Elements that straddle their own size are copied as inputs and refused as out."""
    q = qkv(1, 2, 5, 5, 8)[0].numpy().astype(dtype)
    raw = np.zeros(q.nbytes + 1, np.uint8)
    odd = raw[1:].view(dtype).reshape(q.shape)
    odd[...] = q
    assert not odd.flags.aligned
    expected = fa101.flash_attention(q, q, q)
    assert (fa101.flash_attention(odd, odd, odd) == expected).all()
    with pytest.raises(ValueError, match="out starts at an address"):
        fa101.flash_attention(q, q, q, out=odd)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seqlen", [128, 196, 257])
def test_output_strides(device, seqlen):
    """FA-044: dense, in the axis order of q; also with another head_dim_v."""
    q, k, v = qkv(2, 4, seqlen, seqlen, 16, head_dim_v=8, device=device)
    out, lse = attend(q, k, v)
    assert out.is_contiguous()
    assert lse.is_contiguous()

    swapped = strided_like(q, "packed")
    out, lse = attend(swapped, k, v)
    assert out.transpose(1, 2).is_contiguous()
    assert lse.is_contiguous()
    out.transpose(1, 2).view(2, seqlen, -1)
    out, _ = attend(swapped, k, k)
    assert out.transpose(1, 2).is_contiguous()

    out, _ = attend(strided_like(q, "batch innermost"), k, v)
    assert out.permute(2, 1, 0, 3).is_contiguous()
    out, _ = attend(strided_like(q, "last axis outermost"), k, v)
    assert out.is_contiguous()
    out, _ = attend(q[:1].expand(2, -1, -1, -1), k, v)
    assert out.is_contiguous()


def test_output_strides_numpy():
    q, k, v = (x.numpy() for x in qkv(2, 4, 5, 7, 16, head_dim_v=8))
    assert fa101.flash_attention(q, k, v).flags.c_contiguous
    swapped = np.ascontiguousarray(q.swapaxes(1, 2)).swapaxes(1, 2)
    assert fa101.flash_attention(swapped, k, v).swapaxes(1, 2).flags.c_contiguous


@pytest.mark.parametrize("device", DEVICES)
def test_default_scale_is_of_the_callers_head_dim(device):
    """1 / sqrt(33), not of what a kernel pads 33 to."""
    q, k, v = qkv(1, 2, 9, 9, 33, device=device)
    assert dtype_name(q) == "float32"
    by_name = fa101.flash_attention(q, k, v, softmax_scale=33**-0.5)
    assert torch.equal(fa101.flash_attention(q, k, v), by_name)


def room_for(x, how):
    """(room, view): sevens, and of them as many as x has, in its shape, each row on 16 bytes."""
    batch, heads, seqlen, head_dim = x.shape
    shape, view_of = {
        "packed": ((batch, seqlen, 3, heads, head_dim), lambda r: r[:, :, 1].transpose(1, 2)),
        "wider rows": ((batch, heads, seqlen, head_dim + 24), lambda r: r[..., 8:-16]),
        "more rows": ((batch, heads, seqlen + 9, head_dim), lambda r: r[:, :, 3:-6]),
        "every other row": ((batch, heads, 2 * seqlen, head_dim), lambda r: r[:, :, ::2]),
        "more heads": ((batch, heads + 2, seqlen, head_dim), lambda r: r[:, 1:-1]),
    }[how]
    room = x.new_full(shape, 7.0)
    return room, view_of(room)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("head_dim", [64, 72, 104, 136, 200, 256])
@pytest.mark.parametrize("kernel", kernel_params())
def test_out_in_a_room(kernel, head_dim, special):
    """A strided out has the bits of a dense one and its surroundings stay, also where rows are done
    again: where logits leap, and where keys with NaN are hidden from some rows."""
    if not answers(kernel, torch.float16, head_dim):
        pytest.skip(f"{kernel} does not answer this head_dim")
    sizes = [(2, 2, 133, 300)]
    if kernel == "sm90" and head_dim <= 72:  # two small tiles a multiprocessor; tiles of 192 rows
        sizes += [(1, 70, 133, 300), (1, 70, 133, 1100)]
    for size in sizes:
        q, k, v = qkv(*size, head_dim, dtype=torch.float16, kernel=kernel)
        if special:
            q[:, :, ::5, 0], k[:, :, 3, 0] = 20.0, 5 * q.shape[-1] ** 0.5  # logits of 100
            v[0, 0, -3:] = torch.nan
        options = {"causal": True, "align": "bottom_right"}
        expected, expected_lse = attend(q, k, v, kernel=kernel, **options)
        some = (x[:, ::10] for x in (expected, q, k, v))
        assert_attention(*some, lse=expected_lse[:, ::10], **options)
        for how in ("packed", "wider rows", "more rows", "every other row", "more heads"):
            room, out = room_for(expected, how)
            wanted, inside = room_for(expected, how)
            inside.copy_(expected)
            _, lse = attend(q, k, v, kernel=kernel, out=out.fill_(torch.nan), **options)
            assert torch.equal(bits(room), bits(wanted)), how
            assert torch.equal(lse, expected_lse)


@pytest.mark.parametrize("device", DEVICES)
def test_out_that_tma_cannot_address(device):
    """Rows on 8 bytes: another kernel answers, and sm90 by name says why not. Rows that overlap:
    refused by all."""
    q, k, v = qkv(2, 70, 150, 100, 72, dtype=torch.float16, device=device)
    room = q.new_full((*q.shape[:3], 76), 7.0)
    out = room[..., :72]
    if device == "cuda":
        assert fa101.plan(q, k, v).kernel == "sm90"
        assert fa101.plan(q, k, v, out=out).kernel != "sm90"
        with pytest.raises(ValueError, match="sm90.*out must start at a multiple of 16 bytes"):
            fa101.flash_attention(q, k, v, out=out, kernel="sm90")
        assert (room == 7).all()
    fa101.flash_attention(q, k, v, out=out)
    assert_attention(out, q, k, v)
    assert (room[..., 72:] == 7).all()

    strides = (*room.stride()[:2], 64, 1)
    with pytest.raises(ValueError, match="out has shape .*several elements share one address"):
        fa101.flash_attention(q, k, v, out=room.as_strided(q.shape, strides))
