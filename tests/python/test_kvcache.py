"""flash_attention_with_kvcache: lengths, pages, append, rotary, splits; on the CPU and on a GPU."""

import math
import subprocess
import sys
import warnings
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fa101
from fa101 import flash_attention_with_kvcache
from fa101.testing import assert_attention, to_float64
from helpers import DEVICES, DTYPES, bits, poisoned_memory

PLACES = [
    pytest.param(
        device, dtype, id=f"{device}-{dtype}", marks=pytest.mark.gpu if device == "cuda" else ()
    )
    for device in ("cpu", "cuda")
    for dtype in DTYPES
]

# Caches in fp8, beside 16-bit queries.
FP8 = torch.float8_e4m3fn
FP8_PLACES = [
    pytest.param(device, dtype, id=f"{device}-{dtype}", marks=marks)
    for device, marks in (("cpu", ()), ("cuda", pytest.mark.gpu))
    for dtype in (torch.float16, torch.bfloat16)
]


def int32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def in_layout(x, layout):
    """x (batch, seqlen, heads, head_dim) as `layout` has it."""
    return x if layout == "bshd" else x.transpose(1, 2).contiguous()


class Cache:
    """Keys and values of `lengths`, and room for `capacity`; whatever is not theirs is NaN.

    k and v are (batch, capacity, heads_kv, head_dim), as if in one piece. With a page_size
    k_cache and v_cache are pages in no order, every third of them nobody's, and the table has
    nonsense past the page of the last of the keys and of the `new` ones that calls append.

    fp8: the caches are float8_e4m3fn, with descales by "head", by "entry" and head, or "bare".
    """

    def __init__(
        self,
        lengths,
        capacity,
        *,
        heads_kv=2,
        head_dim=32,
        head_dim_v=None,
        page_size=None,
        layout="bshd",
        dtype=torch.float32,
        device="cpu",
        seed=0,
        new=0,
        fp8=None,
    ):
        generator = torch.Generator().manual_seed(seed)
        batch = len(lengths)
        self.dtype = dtype
        self.lengths, self.capacity, self.new = list(lengths), capacity, new
        self.layout, self.page_size, self.device = layout, page_size, device
        self.seqlens_k = int32(lengths, device)

        def make(seqlen, d):
            x = torch.randn(batch, seqlen, heads_kv, d, generator=generator)
            return x.to(device, dtype)

        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        self.k, self.v = make(capacity, head_dim), make(capacity, head_dim_v)
        self.k_new, self.v_new = make(new, head_dim), make(new, head_dim_v)
        self.descales = {}
        if fp8 in ("head", "entry"):
            shape = (heads_kv,) if fp8 == "head" else (batch, heads_kv)
            for name in ("k_descale", "v_descale"):
                self.descales[name] = (torch.rand(shape, generator=generator) + 0.1).to(device)
        for b, n in enumerate(lengths):
            self.k[b, n:], self.v[b, n:] = math.nan, math.nan
        if fp8 is not None:
            self.k, self.v = self.quantised("k", self.k), self.quantised("v", self.v)
        if page_size is None:
            self.page_table = None
            self.k_cache, self.v_cache = (in_layout(x.clone(), layout) for x in (self.k, self.v))
            return
        max_pages = capacity // page_size
        pages = torch.randperm(batch * max_pages * 3 // 2 + 1, generator=generator)
        table = pages[: batch * max_pages].view(batch, max_pages)
        pools = []
        for x in (self.k, self.v):
            shape = (-1, page_size, *x.shape[2:])
            pool = torch.full((len(pages), *shape[1:]), math.nan, device=device).to(x.dtype)
            bits(pool)[table.flatten().to(device)] = bits(x).view(shape)
            pools.append(in_layout(pool, layout))
        self.k_cache, self.v_cache = pools
        for b, n in enumerate(lengths):
            table[b, -(-min(n + new, capacity) // page_size) :] = -(10**9)
        self.page_table = int32(table.tolist(), device)

    def quantised(self, name, x):
        """x, rows of k or v, in fp8 by torch."""
        descale = self.descales.get(f"{name}_descale", torch.ones(1, device=x.device))
        x = x.float() / (descale[..., None] if descale.ndim == 1 else descale[:, None, :, None])
        return x.clamp(-448, 448).to(FP8)

    def total(self):
        """The lengths with the new keys."""
        return int32([min(n + self.new, self.capacity) for n in self.lengths], self.device)

    def complete(self):
        """k and v with the new keys where they belong."""
        k, v = self.k.clone(), self.v.clone()
        k_new, v_new = self.k_new, self.v_new
        if k.dtype == FP8:
            k_new, v_new = self.quantised("k", k_new), self.quantised("v", v_new)
        for b, n in enumerate(self.lengths):
            room = min(self.new, self.capacity - n)
            k[b, n : n + room], v[b, n : n + room] = k_new[b, :room], v_new[b, :room]
        return k, v

    def call(self, q, **options):
        new = dict(self.descales)
        if self.new:
            new |= {name: in_layout(x, self.layout) for name, x in self.new_keys().items()}
        with poisoned_memory():
            return flash_attention_with_kvcache(
                in_layout(q, self.layout),
                self.k_cache,
                self.v_cache,
                **{"seqlens_k": self.seqlens_k, "page_table": self.page_table} | new | options,
                layout=self.layout,
            )

    def new_keys(self):
        return {"k": self.k_new, "v": self.v_new}

    def contents(self):
        """k_cache and v_cache as k and v are."""
        caches = [x if self.layout == "bshd" else x.transpose(1, 2) for x in self.caches()]
        if self.page_size is None:
            return caches
        table = self.page_table.clamp(min=0).long()
        return [bits(x)[table].flatten(1, 2).view(x.dtype) for x in caches]

    def caches(self):
        return self.k_cache, self.v_cache

    def written(self):
        """What k_cache and v_cache are to be after a call: the new keys, and all else as it was."""
        pools = [x.clone() for x in self.caches()]
        for pool, name in zip(pools, "kv", strict=True):
            new = getattr(self, f"{name}_new")
            new = self.quantised(name, new) if pool.dtype == FP8 else new
            for b, n in enumerate(self.lengths):
                for i in range(n, min(n + self.new, self.capacity)):
                    at = b, i
                    if self.page_size is not None:
                        at = self.page_table[b, i // self.page_size], i % self.page_size
                    bits(pool)[at] = bits(new)[b, i - n]
        return pools

    def check(self, q, *, causal=True, align="bottom_right", **options):
        """Calls with these options, and compares with attention over the keys there are."""
        out, lse = self.call(q, causal=causal, align=align, return_lse=True, **options)
        k, v = self.complete()
        options.pop("num_splits", None)
        assert_attention(
            out if self.layout == "bshd" else out.transpose(1, 2),
            q,
            k,
            v,
            lse=lse,
            seqlens_k=self.total(),
            causal=causal,
            align=align,
            layout="bshd",
            **self.descales,
            **options,
        )
        for b, n in enumerate(self.total().tolist()):
            for got, want in zip(self.contents(), (k, v), strict=True):
                assert torch.equal(bits(got[b, :n]), bits(want[b, :n]))
        return out, lse


def queries(cache, seqlen_q, *, group=2, seed=1):
    batch, _, heads_kv, head_dim = cache.k.shape
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, seqlen_q, heads_kv * group, head_dim, generator=generator)
    return q.to(cache.device, cache.dtype)


def is_one_kernel(cache, q):
    """Whether pages and one piece are read by one kernel: on Hopper up to 16 rows of queries."""
    return cache.device == "cpu" or q.shape[1] * q.shape[2] // cache.k.shape[2] <= 16


@st.composite
def problems(draw, device, dtype, fp8=(None,)):
    page_size = draw(st.sampled_from([None, 16, 16, 32, 64, 256]))
    pages = draw(st.integers(1, 6))
    capacity = draw(st.integers(1, 300)) if page_size is None else pages * page_size
    if device == "cuda" and draw(st.booleans()):
        capacity += 1536  # several splits
    batch = draw(st.integers(1, 4))
    new = draw(st.sampled_from([0, 0, 1, 2, min(17, capacity)]))
    new = min(new, capacity)
    length = st.one_of(
        st.integers(0, capacity - new),
        st.sampled_from([0, capacity - new, (capacity - new) // 16 * 16]),
    )
    cache = Cache(
        draw(st.lists(length, min_size=batch, max_size=batch)),
        capacity,
        heads_kv=draw(st.integers(1, 2)),
        head_dim=draw(st.sampled_from([8, 24, 33, 64, 96, 128, 192, 256])),
        head_dim_v=draw(st.sampled_from([None, None, 16, 40])),
        page_size=page_size,
        layout=draw(st.sampled_from(["bshd", "bhsd"])),
        dtype=dtype,
        device=device,
        seed=draw(st.integers(0, 2**31)),
        new=new,
        fp8=draw(st.sampled_from(fp8)),
    )
    seqlen_q = draw(st.sampled_from([1, 1, 1, 2, 5, 16, 64]))
    q = queries(cache, seqlen_q, group=draw(st.sampled_from([1, 2, 4, 7, 8])))
    options = {
        "causal": draw(st.booleans()),
        "align": draw(st.sampled_from(["bottom_right", "bottom_right", "top_left"])),
        "softcap": draw(st.sampled_from([0.0, 0.0, 20.0])),
        "softmax_scale": draw(st.sampled_from([None, None, 0.3])),
    }
    side = st.one_of(st.none(), st.integers(0, 100))
    if draw(st.booleans()):
        options["window"] = (draw(side), draw(side))
    if device == "cuda":
        options["num_splits"] = draw(st.sampled_from(["auto", "auto", 1, 3, 16]))
    return cache, q, options


def check_any(strategy):
    @settings(
        max_examples=60,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(strategy)
    def check(problem):
        cache, q, options = problem
        cache.check(q, **options)

    check()


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_any_cache(device, dtype):
    """Lengths, pages, groups, windows, layouts, new keys: against float64; NaN wherever it may."""
    check_any(problems(device, dtype))


@pytest.mark.parametrize(("device", "dtype"), FP8_PLACES)
def test_any_fp8_cache(device, dtype):
    check_any(problems(device, dtype, fp8=("head", "entry", "bare")))


@pytest.mark.parametrize("head_dim", [16, 300])
@pytest.mark.parametrize("device", DEVICES)
def test_whole_caches_on_every_kernel(device, head_dim):
    """In one piece whatever flash_attention has will do: float32, and head_dim over 256."""
    for dtype in (torch.float32, torch.float16):
        cache = Cache([0, 5, 60], 64, head_dim=head_dim, dtype=dtype, device=device, new=4)
        cache.check(queries(cache, 4))


# ---- the same bits -------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("page_size", [16, 64, 512])
def test_pages_or_one_piece(page_size, device, dtype):
    for seqlen_q in (1, 3, 4):
        options = {"dtype": dtype, "device": device, "head_dim": 64, "seed": seqlen_q}
        lengths = [1, 1536, 1100]
        whole = Cache(lengths, 1536, **options)
        paged = Cache(lengths, 1536, page_size=page_size, **options)
        q = queries(whole, seqlen_q, group=4)
        for x, y in zip(
            whole.call(q, return_lse=True), paged.call(q, return_lse=True), strict=True
        ):
            assert torch.equal(bits(x), bits(y))


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_append_then_attend(device, dtype):
    """As attention over a cache that holds the new keys already."""
    for page_size in (None, 16):
        for new in (1, 5, 30):
            options = {"head_dim": 64, "dtype": dtype, "device": device, "page_size": page_size}
            cache = Cache([0, 600, 1000], 1040, new=new, **options)
            q = queries(cache, new)
            out, lse = cache.call(q, return_lse=True)
            k, v = cache.complete()
            again, again_lse = flash_attention_with_kvcache(
                q, k, v, seqlens_k=cache.total(), return_lse=True
            )
            if page_size is None or is_one_kernel(cache, q):
                assert torch.equal(bits(out), bits(again))
                assert torch.equal(bits(lse), bits(again_lse))
            else:
                assert_attention(out, q, k, v, lse=lse, seqlens_k=cache.total(), causal=True,
                                 align="bottom_right", layout="bshd")  # fmt: skip


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize(
    ("page_size", "seqlen_q", "head_dim", "length", "capacities"),
    [
        (None, 1, 128, 1500, (1504, 2048, 4096)),
        (32, 1, 128, 1500, (1504, 2048, 4096)),
        (None, 8, 128, 1500, (1504, 2048, 4096)),
        (None, 128, 64, 700, (700, 1024, 2048)),  # either side of 1024, where tiles change
    ],
)
def test_same_bits_in_any_company(page_size, seqlen_q, head_dim, length, capacities, device, dtype):
    """Neither the capacity nor the other sequences change a result."""
    options = {"head_dim": head_dim, "dtype": dtype, "device": device}
    big = Cache([length, capacities[-1], 1, 700], capacities[-1], **options)
    q = queries(big, seqlen_q, group=4)
    out, lse = big.call(q, return_lse=True)
    companies = ([3, 0, 9], [length] * 3, [1, 2, 3])
    for capacity, others in zip(capacities, companies, strict=True):
        other = Cache([length, *others], capacity, page_size=page_size, **options)
        for pool, x in zip(other.caches(), (big.k, big.v), strict=True):
            if page_size is None:
                pool[0, :length] = x[0, :length]
            else:
                for i in range(-(-length // page_size)):
                    rows = x[0, i * page_size : min((i + 1) * page_size, length)]
                    pool[other.page_table[0, i].item(), : len(rows)] = rows
        again, again_lse = other.call(q, return_lse=True)
        assert torch.equal(again[0], out[0])
        assert torch.equal(again_lse[0], lse[0])


# ---- lengths -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("page_size", [None, 16])
def test_unused_slots(page_size, device, dtype):
    """FA-009: what lies behind the keys has no effect, whatever it is."""
    for seqlen_q in (1, 4):
        results = []
        for tail in (0.0, math.nan, math.inf):
            cache = Cache([1, 32, 96, 128], 128, heads_kv=8, head_dim=64, page_size=page_size,
                          dtype=dtype, device=device)  # fmt: skip
            for x in cache.caches():
                x.masked_fill_(x.isnan(), tail)
            results.append(cache.call(queries(cache, seqlen_q, group=1), return_lse=True))
        for out, lse in results[1:]:
            assert torch.equal(out, results[0][0])
            assert torch.equal(lse, results[0][1])


@pytest.mark.parametrize("device", DEVICES)
def test_lengths_from_the_host(device):
    """An int, a list, a tuple, any sequence; none: all of it."""
    cache = Cache([7, 7], 20, device=device)
    q = queries(cache, 2)
    expected = cache.call(q)
    for lengths in (7, [7, 7], (7, np.int32(7)), deque([7, 7])):
        assert torch.equal(cache.call(q, seqlens_k=lengths), expected)
    full = Cache([20, 20], 20, device=device)
    assert torch.equal(full.call(q, seqlens_k=None), full.call(q))


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("page_size", [None, 16])
def test_empty_sequences(page_size, device, dtype):
    """FA-021: among others as alone; without a key the output is 0 and the lse -inf."""
    options = {"page_size": page_size, "dtype": dtype, "device": device}
    for lengths in ([0, 0, 0], [0, 40, 0], [64, 0, 1]):
        cache = Cache(lengths, 64, **options)
        out, lse = cache.check(queries(cache, 3))
        for b, n in enumerate(lengths):
            assert (out[b] == 0).all() == (n == 0)
            assert (lse[b] == -math.inf).all() == (n == 0)
    # The first new keys are all that is seen.
    cache = Cache([0, 0, 0], 64, new=3, **options)
    cache.check(queries(cache, 3))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("new", [0, 2])
def test_lengths_strided(new, device):
    """FA-040: every second element of an array."""
    cache = Cache([7, 0, 20], 32, page_size=16, device=device, new=new)
    contiguous = cache.seqlens_k
    cache.seqlens_k = torch.full((3, 2), 999, dtype=torch.int32, device=device)[:, 0]
    cache.seqlens_k.copy_(contiguous)
    assert not cache.seqlens_k.is_contiguous()
    cache.check(queries(cache, 2))


@pytest.mark.parametrize("device", DEVICES)
def test_static_cache(device):
    """FA-076: ten keys of a cache of 64."""
    cache = Cache([10], 64, device=device)
    q = queries(cache, 1)
    part = [x[:, :10].transpose(1, 2) for x in (cache.k, cache.v)]
    expected = fa101.flash_attention(q.transpose(1, 2), *part).transpose(1, 2)
    for causal in (False, True):
        torch.testing.assert_close(cache.call(q, causal=causal), expected, rtol=1e-6, atol=1e-6)
    # Three new tokens behind seven keys: token i sees 7 + i + 1 of them.
    cache = Cache([7], 64, device=device, new=3)
    q = queries(cache, 3)
    out = cache.call(q)
    k, v = (x.transpose(1, 2) for x in cache.complete())
    for i in range(3):
        seen = [x[:, :, : 7 + i + 1] for x in (k, v)]
        one = fa101.flash_attention(q[:, i : i + 1].transpose(1, 2), *seen).transpose(1, 2)
        torch.testing.assert_close(out[:, i : i + 1], one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_chunked_prefill(device, dtype):
    """FA-076: a prompt in any chunks is the prompt at once."""
    for page_size in (None, 16):
        whole = Cache([0, 0], 96, new=80, page_size=page_size, dtype=dtype, device=device)
        q = queries(whole, 80)
        k, v = whole.complete()
        for chunks in ([80], [1, 79], [16, 16, 48], [33, 30, 17]):
            cache = Cache([0, 0], 96, new=80, page_size=page_size, dtype=dtype, device=device)
            outs, begin = [], 0
            for n in chunks:
                here = slice(begin, begin + n)
                cache.k_new, cache.v_new = whole.k_new[:, here], whole.v_new[:, here]
                outs.append(cache.call(q[:, here]))
                cache.seqlens_k += n
                begin += n
            lengths = int32([80, 80], device)
            options = {"causal": True, "align": "bottom_right", "layout": "bshd"}
            assert_attention(torch.cat(outs, 1), q, k[:, :80], v[:, :80], **options)
            assert cache.seqlens_k.equal(lengths)


# ---- append --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["whole rows", "odd rows", "sliced", "rotary"])
@pytest.mark.parametrize(
    ("new", "seqlen_q", "group"),
    [(1, 1, 16), (1, 1, 17), (4, 4, 4), (5, 4, 4), (4, 17, 1), (4, 1, 2), (1, 4, 2)],
)
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("device", DEVICES)
def test_append_around_one_launch(device, page_size, new, seqlen_q, group, how):
    """Up to 4 new rows for up to 16 rows of queries are written by the attention, others before it:
    either way as if they had been there, aligned or not, and nothing else is written."""
    cache = Cache([0, 15, 600], 640, head_dim=33 if how == "odd rows" else 64, new=new,
                  page_size=page_size, dtype=torch.float16, device=device)  # fmt: skip
    q = queries(cache, seqlen_q, group=group)
    options = {}
    if how == "sliced":
        for name, x in cache.new_keys().items():
            room = torch.nn.functional.pad(x, (3, 2), value=math.nan)
            setattr(cache, f"{name}_new", room[..., 3:-2])
    elif how == "rotary":  # by no angle
        ones = torch.ones(640, 32, device=device)
        options["rotary"] = (ones, torch.zeros_like(ones), False)
    expected = cache.written()
    out, lse = cache.call(q, return_lse=True, **options)
    for pool, want in zip(cache.caches(), expected, strict=True):
        assert torch.equal(bits(pool), bits(want))
    k, v = cache.complete()
    places = {"causal": True, "align": "bottom_right", "layout": "bshd"}
    assert_attention(out, q, k, v, lse=lse, seqlens_k=cache.total(), **places)
    if page_size is None or is_one_kernel(cache, q):
        again, again_lse = flash_attention_with_kvcache(
            q, k, v, seqlens_k=cache.total(), return_lse=True
        )
        assert torch.equal(bits(out), bits(again))
        assert torch.equal(bits(lse), bits(again_lse))


@pytest.mark.parametrize("fp8", [None, "head"])
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("device", DEVICES)
def test_append_without_queries(device, page_size, fp8):
    """Nothing is attended, and the new keys are there."""
    cache = Cache([0, 15, 40], 64, new=3, page_size=page_size, dtype=torch.float16, device=device,
                  fp8=fp8)  # fmt: skip
    expected = cache.written()
    out, lse = cache.call(queries(cache, 1)[:, :0], return_lse=True)
    assert out.shape == (3, 0, 4, 32)
    assert lse.shape == (3, 4, 0)
    for pool, want in zip(cache.caches(), expected, strict=True):
        assert torch.equal(bits(pool), bits(want))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [None, 16])
def test_canaries(page_size, device):
    """FA-030: on the device lengths are cut to what there is room for; nothing else is written."""
    dtype = torch.float16
    shape = (2, 16, 2, 32) if page_size is None else (3, 16, 2, 32)
    table = None if page_size is None else int32([[1], [2]], device)
    for lengths in ([16, 16], [15, -3], [100, 2**31 - 1], [-(2**31), 14]):
        memory = torch.full((2, 4096), 7.0, dtype=dtype, device=device)
        k_cache, v_cache = (
            row[512 : 512 + math.prod(shape)].view(shape).fill_(0.0) for row in memory
        )
        k, v = (torch.full((2, 2, 2, 32), x, dtype=dtype, device=device) for x in (1.0, 2.0))
        q = torch.randn(2, 2, 4, 32).to(k)
        options = {"k": k, "v": v, "page_table": table}
        if device == "cpu":  # where lengths can be seen they are checked
            with pytest.raises(ValueError, match="seqlens_k has .*capacity is 16"):
                flash_attention_with_kvcache(
                    q, k_cache, v_cache, seqlens_k=int32(lengths, device), **options
                )
            assert (k_cache == 0).all()
        else:
            flash_attention_with_kvcache(
                q, k_cache, v_cache, seqlens_k=int32(lengths, device), **options
            )
            for pool, value in ((k_cache, 1.0), (v_cache, 2.0)):
                pool = pool if page_size is None else pool[1:]
                for b, n in enumerate(min(max(n, 0), 16) for n in lengths):
                    expected = torch.zeros_like(pool[b])
                    expected[n : n + 2] = value
                    assert torch.equal(pool[b], expected)
        assert (memory[:, :512] == 7).all()
        assert (memory[:, 512 + math.prod(shape) :] == 7).all()


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        (16, "seqlens_k has 16; it must be from 0 to 15: the cache's capacity is 16 keys"),
        ([3, 16], "seqlens_k has 16; it must be from 0 to 15"),
        ([-1, 3], "seqlens_k has -1; it must be from 0 to 15"),
        (2**40, f"seqlens_k has {2**40}"),
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_lengths_beyond_the_capacity(device, lengths, words):
    """FA-030: values on the host are checked."""
    cache = Cache([0, 0], 16, new=1, device=device)
    before = cache.k_cache.clone()
    with pytest.raises(ValueError, match=words):
        cache.call(queries(cache, 1), seqlens_k=lengths)
    assert torch.equal(bits(cache.k_cache), bits(before))


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("seqlen_q", [1, 40])
def test_lengths_beyond_the_capacity_without_new_keys(seqlen_q, device, dtype):
    """FA-030: refused where the host sees them; on a GPU there are no more keys than the capacity,
    and no fewer than none."""
    cache = Cache([16, 0], 16, dtype=dtype, device=device)
    q = queries(cache, seqlen_q)
    for lengths in (17, [16, -1]):
        with pytest.raises(ValueError, match="seqlens_k has .* from 0 to 16.* and 0 are new"):
            cache.call(q, seqlens_k=lengths)
    beyond = int32([2**31 - 1, -(2**31)], device)
    if device == "cpu":
        with pytest.raises(ValueError, match=r"seqlens_k has -?\d+; it must be from 0 to 16"):
            cache.call(q, seqlens_k=beyond)
    else:
        assert torch.equal(cache.call(q, seqlens_k=beyond), cache.call(q))


@pytest.mark.parametrize("device", DEVICES)
def test_pages_that_are_none(device):
    """Neither read nor written outside of the cache, whatever the table says."""
    cache = Cache([20, 3], 64, page_size=16, dtype=torch.float16, new=2, device=device)
    q = queries(cache, 2)
    cache.page_table.fill_(10**9)
    before = [x.clone() for x in cache.caches()]
    cache.call(q)
    cache.page_table.fill_(-(2**31))
    cache.call(q)
    for x, y in zip(cache.caches(), before, strict=True):
        assert torch.equal(bits(x), bits(y))


@pytest.mark.gpu
def test_pool_beyond_2_to_31_elements():
    """FA-026: pages at the far end of 4 GB, read and written."""
    if torch.cuda.mem_get_info()[0] < 10 << 30:
        pytest.skip("needs 10 GB")
    cache = Cache([30, 60], 64, heads_kv=1, head_dim=64, dtype=torch.float16, device="cuda", new=2)
    q = queries(cache, 2)
    num_pages = 2**31 // (16 * 64) + 8
    pages = num_pages - 1 - torch.arange(8, device="cuda").view(2, 4)
    pools = [torch.empty(num_pages, 16, 1, 64, dtype=torch.float16, device="cuda") for _ in "kv"]
    for pool, x in zip(pools, (cache.k, cache.v), strict=True):
        pool[pages] = x.view(2, 4, 16, 1, 64)
    out = flash_attention_with_kvcache(
        q, *pools, **cache.new_keys(), seqlens_k=cache.seqlens_k, page_table=pages.int()
    )
    assert torch.equal(out, cache.call(q))
    for pool, x in zip(pools, cache.complete(), strict=True):
        assert torch.equal(bits(pool[pages].view(2, 64, 1, 64)), bits(x))


# ---- rotary --------------------------------------------------------------------------------------


def rotated(x, positions, cos, sin, interleaved):
    """x (batch, seqlen, heads, head_dim), rotated for positions (batch, seqlen), in float64."""
    x, cos, sin = (torch.from_numpy(to_float64(y)).clone() for y in (x, cos, sin))
    half = cos.shape[1]
    cos, sin = cos[positions][:, :, None], sin[positions][:, :, None]
    pairs = (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    if not interleaved:
        pairs = (slice(0, half), slice(half, 2 * half))
    first, second = x[..., pairs[0]].clone(), x[..., pairs[1]].clone()
    x[..., pairs[0]] = first * cos - second * sin
    x[..., pairs[1]] = second * cos + first * sin
    return x


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("page_size", [None, 32])
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_rotary(device, dtype, page_size, interleaved):
    """The new keys and the queries, by the formula; all of head_dim and half of it."""
    for rotary_dim, layout, angles in [(64, "bshd", torch.float32), (32, "bhsd", dtype)]:
        for causal in (True, False):
            lengths = [0, 31, 93]
            cache = Cache(lengths, 96, head_dim=64, page_size=page_size, layout=layout, new=3,
                          dtype=dtype, device=device)  # fmt: skip
            q = queries(cache, 3)
            theta = torch.arange(96)[:, None] / 100 ** (torch.arange(rotary_dim // 2) / 16)
            cos, sin = (x.to(device, angles) for x in (theta.cos(), theta.sin()))
            out = cache.call(q, causal=causal, rotary=(cos, sin, interleaved))
            positions = torch.tensor(lengths)[:, None] + torch.arange(3)
            k_new = rotated(cache.k_new, positions, cos, sin, interleaved).to(dtype)
            q = rotated(q, positions if causal else positions[:, :1].expand(-1, 3), cos, sin,
                        interleaved).to(q)  # fmt: skip
            got = cache.contents()[0]
            tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 2 * torch.finfo(dtype).eps}
            for b, n in enumerate(lengths):
                torch.testing.assert_close(got[b, n : n + 3].cpu(), k_new[b], **tolerance)
                cache.k_new[b] = got[b, n : n + 3]
            k, v = cache.complete()
            out = out if layout == "bshd" else out.transpose(1, 2)
            options = {"causal": causal, "align": "bottom_right", "layout": "bshd"}
            if dtype == torch.float32:
                assert_attention(out, q, k, v, seqlens_k=cache.total(), **options)
            else:  # q may have been rounded the other way
                expected, _ = fa101.testing.reference_attention(
                    q, k, v, seqlens_k=cache.total(), **options
                )
                np.testing.assert_allclose(to_float64(out), expected, atol=8 * tolerance["atol"])


# ---- fp8 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
@pytest.mark.parametrize(("device", "dtype"), FP8_PLACES)
def test_every_code(device, dtype, head_dim):
    """One key a batch entry, another code in each column: its logits and values, exactly."""
    codes = torch.arange(256)[:, None] + 7 * torch.arange(head_dim)
    finite = codes % 127 + 128 * (codes // 128 % 2)  # without the two of NaN
    q = torch.eye(head_dim, dtype=dtype, device=device)  # head h asks for column h

    def cache(codes):
        return (codes % 256).to(torch.uint8).view(FP8)[:, None, None].to(device)

    for heads in (8, head_dim):  # the rows of either tile
        for first in range(0, head_dim, heads):
            some = slice(first, first + heads)
            out, lse = flash_attention_with_kvcache(
                q[some].expand(256, 1, -1, -1),
                cache(finite),
                cache(codes),
                softmax_scale=1.0,
                return_lse=True,
            )
            logits = cache(finite)[:, 0, 0, some, None].float()
            torch.testing.assert_close(lse, logits, rtol=1e-6, atol=1e-5)
            values = cache(codes).to(dtype).expand_as(out)
            torch.testing.assert_close(out, values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("device", "dtype"), FP8_PLACES)
def test_fp8_tiles(device, dtype, head_dim):
    """Groups, 1 to 64 queries, several splits, both kinds of descale, pages or not."""
    for page_size, fp8 in ((None, "head"), (16, "entry"), (64, "bare")):
        for seqlen_q, group in ((1, 8), (1, 32), (3, 4), (16, 1), (5, 7), (64, 2)):
            cache = Cache([1500, 64, 1], 1536, head_dim=head_dim, page_size=page_size, fp8=fp8,
                          dtype=dtype, device=device)  # fmt: skip
            cache.check(queries(cache, seqlen_q, group=group))


@pytest.mark.parametrize(("device", "dtype"), FP8_PLACES)
def test_fp8_same_bits(device, dtype):
    """In pages or not, appended or there before, whatever the capacity."""
    for seqlen_q in (1, 5, 20):
        options = {"head_dim": 64, "dtype": dtype, "device": device, "fp8": "entry", "new": 5}
        lengths = [1, 1500, 1024]
        whole = Cache(lengths, 1536, **options)
        paged = Cache(lengths, 1536, page_size=16, **options)
        q = queries(whole, seqlen_q, group=4)
        out, lse = whole.call(q, return_lse=True)
        k, v = whole.complete()
        room = [torch.cat([x, x], dim=1) for x in (k, v)]
        for again, again_lse in (
            paged.call(q, return_lse=True),
            *(
                flash_attention_with_kvcache(
                    q, *caches, seqlens_k=whole.total(), **whole.descales, return_lse=True
                )
                for caches in ((k, v), room)
            ),
        ):
            assert torch.equal(bits(out), bits(again))
            assert torch.equal(bits(lse), bits(again_lse))


@pytest.mark.parametrize(("device", "dtype"), FP8_PLACES)
def test_fp8_append_saturates(device, dtype):
    """Ties to even, beyond 448 and inf to 448, NaN stays."""
    values = [1.0625, 1.1875, -1.0625, 2.0**-10, 3 * 2.0**-10, -(2.0**-11), 0.0, -0.0]
    values += [448.0, 464.0, 1000.0, -1e4, math.inf, -math.inf, 17.0, 19.0]
    stored = [1.0, 1.25, -1.0, 0.0, 2.0**-8, -0.0, 0.0, -0.0]
    stored += [448.0, 448.0, 448.0, -448.0, 448.0, -448.0, 16.0, 20.0]
    x = torch.tensor(values, dtype=dtype, device=device)[None, None, None]
    nan = torch.full_like(x, math.nan)
    pools = [torch.ones(1, 4, 1, 16, device=device).to(FP8) for _ in "kv"]
    for descale in (1.0, 0.125):
        descales = {name: torch.full((1,), descale, device=device)
                    for name in ("k_descale", "v_descale")}  # fmt: skip
        flash_attention_with_kvcache(
            torch.zeros_like(x), *pools, k=x * descale, v=nan, seqlens_k=2, **descales
        )
        expected = torch.tensor(stored, device=device).to(FP8)
        assert torch.equal(bits(pools[0][0, 2, 0]), bits(expected))
        assert pools[1].float()[0, 2].isnan().all()
        for pool in pools:
            assert (pool.float()[0, [0, 1, 3]] == 1).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp8_values_wider_than_keys(dtype):
    """So wide that past a buffer of a key's size is memory of nobody."""
    cache = Cache([5, 0], 16, head_dim=8, head_dim_v=1 << 14, dtype=dtype, new=2, fp8="head")
    cache.check(queries(cache, 1))


@pytest.mark.parametrize(("device", "dtype"), FP8_PLACES)
def test_fp8_descale_of_nobody(device, dtype):
    """A slot without a sequence gives zeros, whatever its descales are."""
    cache = Cache([0, 30], 64, dtype=dtype, device=device, fp8="entry")
    q = queries(cache, 2)
    expected, expected_lse = cache.call(q, return_lse=True)
    for descale in cache.descales.values():
        descale[0] = math.nan
    out, lse = cache.call(q, return_lse=True)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    assert (out[0] == 0).all()


@pytest.mark.parametrize(("device", "dtype"), FP8_PLACES)
def test_fp8_nan_where_it_is_seen(device, dtype):
    """Codes of NaN reach the queries that see them, and no other."""
    for head_dim in (64, 128):
        for seqlen_q, group in ((8, 2), (40, 2)):
            for where in "kv":
                cache = Cache([70, 200], 256, head_dim=head_dim, dtype=dtype, device=device,
                              fp8="head")  # fmt: skip
                pool, x = getattr(cache, f"{where}_cache"), getattr(cache, where)
                for key in (40, 66, 195):
                    for y in (pool, x):
                        y.view(torch.uint8)[:, key, 1, 3] = 0x7F if key == 66 else 0xFF
                for entry, n in enumerate(cache.lengths):  # still NaN behind the keys
                    assert pool[entry, n:].float().isnan().all()
                out, _ = cache.check(queries(cache, seqlen_q, group=group), window=(5, None))
                assert out.isnan().any()
                assert not out.isnan().all()


@pytest.mark.parametrize(("device", "dtype"), FP8_PLACES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_fp8_rotary(device, dtype, interleaved):
    """New keys are rotated in float32, then divided and rounded."""
    cache = Cache([0, 31], 64, head_dim=64, page_size=16, new=3, dtype=dtype, device=device,
                  fp8="entry")  # fmt: skip
    q = queries(cache, 3)
    theta = torch.arange(64)[:, None] / 100 ** (torch.arange(16) / 16)
    cos, sin = (x.to(device, torch.float32) for x in (theta.cos(), theta.sin()))
    cache.call(q, rotary=(cos, sin, interleaved))
    positions = torch.tensor(cache.lengths)[:, None] + torch.arange(3)
    k_new = rotated(cache.k_new, positions, cos, sin, interleaved)
    k_new /= cache.descales["k_descale"].double().cpu()[:, None, :, None]
    for b, n in enumerate(cache.lengths):
        got = cache.contents()[0][b, n : n + 3].double().cpu()
        torch.testing.assert_close(got, k_new[b], rtol=2**-4 + 1e-6, atol=2**-10 + 1e-6)
    v = cache.quantised("v", cache.v_new)
    for b, n in enumerate(cache.lengths):
        assert torch.equal(bits(cache.contents()[1][b, n : n + 3]), bits(v[b]))


@pytest.mark.parametrize("device", DEVICES)
def test_fp8_as_bytes(device):
    """uint8 is fp8 where a descale says so."""
    cache = Cache([9, 30], 64, dtype=torch.float16, device=device, new=2, fp8="head")
    q = queries(cache, 2)
    twin = Cache([9, 30], 64, dtype=torch.float16, device=device, new=2, fp8="head")
    twin.k_cache, twin.v_cache = (x.view(torch.uint8) for x in twin.caches())
    assert torch.equal(cache.call(q), twin.call(q))
    for x, y in zip(cache.caches(), twin.caches(), strict=True):
        assert torch.equal(x.view(torch.uint8), y)
    with pytest.raises(TypeError, match="v_cache has dtype uint8, which without v_descale"):
        twin.call(q, v_descale=None)
    with pytest.raises(TypeError, match="k_cache has dtype uint8, which without k_descale"):
        twin.call(q, k_descale=None)


def test_fp8_is_explained():
    cache = Cache([9, 30], 64, dtype=torch.bfloat16, fp8="entry")
    plan = fa101.plan_with_kvcache(
        queries(cache, 2), *cache.caches(), seqlens_k=cache.seqlens_k, **cache.descales
    )
    assert "bfloat16 (float8_e4m3fn k and v)" in str(plan)


def test_fp8_takes_new_keys_of_another_dtype():
    """They are quantised anyway. A rotation, which is of queries and keys, needs one dtype."""
    cache, new = torch.zeros(1, 16, 1, 8).to(FP8), torch.randint(-8, 8, (1, 1, 1, 8)) / 4
    q = torch.ones(1, 1, 1, 8, dtype=torch.float16)

    def call(dtype, **options):
        k_cache, v_cache, k = cache.clone(), cache.clone(), new.to(dtype)
        out = flash_attention_with_kvcache(
            q, k_cache, v_cache, k=k, v=k.clone(), seqlens_k=3, **options
        )
        return out, bits(k_cache)

    for found, expected in zip(call(torch.bfloat16), call(torch.float16), strict=True):
        assert torch.equal(found, expected)
    rotary = (torch.ones(16, 4), torch.zeros(16, 4), False)
    with pytest.raises(TypeError, match="dtype"):
        call(torch.bfloat16, rotary=rotary)


def test_fp8_in_compiled_code():
    """torch.compile breaks its graph around the call, computes the same and does not warn."""
    cache = Cache([9, 30], 64, dtype=torch.bfloat16, new=2, fp8="entry")
    q = queries(cache, 2)
    expected = flash_attention_with_kvcache(
        q * 2, *cache.caches(), **cache.new_keys(), seqlens_k=cache.lengths, **cache.descales
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = torch.compile(
            lambda q: flash_attention_with_kvcache(
                q * 2, *cache.caches(), **cache.new_keys(), seqlens_k=cache.lengths,
                **cache.descales
            ),
            backend="eager",
        )(q)  # fmt: skip
    assert torch.equal(out, expected)
    assert not [str(w.message) for w in caught if "lru_cache" in str(w.message)]


def test_fp8_autocast():
    cache = Cache([9, 30], 64, dtype=torch.bfloat16, new=2, fp8="entry")
    q = queries(cache, 2)
    expected = cache.call(q)
    cache.k_new, cache.v_new = cache.k_new.float(), cache.v_new.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(cache.call(q.float()), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [300, 512])
def test_fp8_head_dims_on_a_gpu(head_dim):
    cache = Cache([5], 16, head_dim=head_dim, dtype=torch.float16, device="cuda", fp8="head")
    with pytest.raises(NotImplementedError, match=f"head_dim is {head_dim}, more than its tiles"):
        cache.call(queries(cache, 1))


# ---- splits --------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [None, 64])
def test_number_of_splits(page_size):
    """FA-037: any number, in either layout, from poisoned memory."""
    for layout in ("bshd", "bhsd"):
        cache = Cache([4096, 1000, 0], 4096, head_dim=64, page_size=page_size, layout=layout,
                      dtype=torch.float16, device="cuda")  # fmt: skip
        q = queries(cache, 5)
        for num_splits in (1, 2, 4, 7, 32, 10**6):
            cache.check(q, num_splits=num_splits)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("new", "words"), [(1, "in the attention's own launch"), (5, "a launch of its own")]
)
def test_plans_say_how_new_keys_are_written(new, words):
    cache = Cache([1000, 0], 2048, head_dim=64, dtype=torch.float16, device="cuda", new=new)
    plan = fa101.plan_with_kvcache(
        queries(cache, 1), *cache.caches(), seqlens_k=cache.seqlens_k, **cache.new_keys()
    )
    assert f"\nappend     {words}" in str(plan)


def test_splits_on_the_cpu():
    cache = Cache([5], 16)
    q = queries(cache, 1)
    assert torch.equal(cache.call(q, num_splits=1), cache.call(q))
    for num_splits in (2, 2**40, 2**63 - 1):
        words = f"does not split the keys .num_splits is {num_splits}."
        with pytest.raises(NotImplementedError, match=words):
            cache.call(q, num_splits=num_splits)


# ---- what is refused -----------------------------------------------------------------------------


def bad_calls():
    k = torch.zeros(2, 1, 2, 8)
    cache = torch.zeros(2, 16, 2, 8)
    lengths = torch.tensor([1, 2], dtype=torch.int32)
    table = torch.zeros(2, 3, dtype=torch.int32)
    angles = torch.zeros(16, 4)
    half = {"q": torch.zeros(2, 1, 4, 8).half()}
    fp8 = {"k_cache": cache.to(FP8), "v_cache": cache.to(FP8)}
    scales = torch.ones(2, 2)
    new = {"k": k, "v": k, "seqlens_k": lengths}
    return [
        ({"k": k}, ValueError, "k and v must both be there or both be absent"),
        ({"v": k}, ValueError, "k and v must both be there or both be absent"),
        ({"k": k, "v": k}, ValueError, "seqlens_k is absent"),
        (new | {"k": k[:1]}, ValueError, "k has batch 1 but k_cache has 2"),
        (new | {"page_table": table, "k": k[:1], "v": k[:1]}, ValueError,
         "k has batch 1 but q has 2"),
        (new | {"q": torch.zeros(3, 1, 4, 8), "seqlens_k": 0}, ValueError,
         "k has batch 2 but q has 3"),
        (new | {"v": torch.cat([k, k], 1)}, ValueError, "v has seqlen 2 but k has 1"),
        (new | {"k": k.repeat(1, 1, 2, 1)}, ValueError, "k has heads 4 but k_cache has 2"),
        (new | {"v": k.half()}, TypeError, "v has dtype float16 but k_cache has dtype float32"),
        (new | {"k": k.numpy()}, TypeError, "k is a numpy.ndarray but q is a torch.Tensor"),
        (new | {"k": k.clone().requires_grad_()}, RuntimeError, "k requires grad"),
        ({"q": torch.zeros(2, 1, 4, 4)}, ValueError, "k_cache has head_dim 8 but q has 4"),
        ({"q": torch.zeros(2, 1, 3, 8)}, ValueError, "k_cache has 2 heads and q has 3; .*v_cache"),
        ({"q": torch.zeros(3, 1, 4, 8)}, ValueError, "k_cache has batch 2 but q has 3"),
        ({"q": torch.zeros(2, 4, 8)}, ValueError, "q has 3 dimensions"),
        ({"k_cache": cache[0]}, ValueError, "k_cache has 3 dimensions"),
        ({"k_cache": cache.double()}, TypeError, "k_cache has dtype torch.float64"),
        ({"v_cache": cache[:, :8]}, ValueError, "v_cache has seqlen 8 but k_cache has 16"),
        ({"v_cache": cache.mT}, ValueError, "v_cache has strides .* must be contiguous"),
        ({"v_cache": cache.numpy()}, TypeError, "v_cache is a numpy.ndarray"),
        ({"k_cache": cache[:1].expand(2, -1, -1, -1)} | new, ValueError, "k_cache has shape"),
        ({"seqlens_k": lengths.long()}, TypeError, "seqlens_k has dtype int64; it must be int32"),
        ({"seqlens_k": lengths[:1]}, ValueError, r"seqlens_k has shape \(1,\)"),
        ({"seqlens_k": [1, 2, 3]}, ValueError, r"seqlens_k has shape \(3,\)"),
        ({"seqlens_k": [1, 2.5]}, TypeError, "seqlens_k is .1, 2.5.; it must be"),
        ({"seqlens_k": True}, TypeError, "seqlens_k is True"),
        ({"seqlens_k": "12"}, TypeError, "seqlens_k is '12'; it must be an int32 array, an int"),
        ({"seqlens_k": 2.0}, TypeError, "seqlens_k is 2.0; it must be an int32 array, an int or"),
        ({"seqlens_k": b"12"}, TypeError, "seqlens_k is b'12'; it must be an int32 array, an int"),
        ({"page_table": table.long()}, TypeError, "page_table has dtype int64; it must be int32"),
        ({"page_table": table[0]}, ValueError, r"page_table has shape \(3,\)"),
        ({"page_table": table[:1]}, ValueError, r"page_table has shape \(1, 3\)"),
        ({"page_table": table.T.contiguous().T}, ValueError, "page_table has strides"),
        ({"page_table": table, "k_cache": cache[:, :8], "v_cache": cache[:, :8]}, ValueError,
         "k_cache has pages of 8 keys; the page size must be a power of two from 16 on"),
        ({"num_splits": 0}, ValueError, "num_splits is 0; it must be 'auto' or an integer"),
        ({"num_splits": 2**63}, ValueError, f"num_splits is {2**63}; it must be 'auto' or an int"),
        ({"num_splits": "many"}, ValueError, "num_splits is 'many'"),
        ({"num_splits": 1.0}, TypeError, "num_splits is 1.0"),
        ({"rotary": (angles, angles, False)}, ValueError, "rotary is given without k and v"),
        (new | {"rotary": (angles, angles)}, TypeError, "rotary is a builtins.tuple; it must be a"),
        (new | {"rotary": (angles, angles, 1)}, TypeError, "rotary's interleaved is 1"),
        (new | {"rotary": (angles, None, True)}, TypeError, "rotary's sin is None; it must be"),
        (new | {"rotary": (None, None, True)}, TypeError, "rotary's cos is None; it must be"),
        (new | {"rotary": (angles[1:], angles[1:], True)}, ValueError,
         r"cos has shape \(15, 4\).*each of the 16 keys"),
        (new | {"rotary": (angles, angles[:, :3], True)}, ValueError, "sin has shape"),
        (new | {"rotary": (angles.half(), angles.half(), True)}, TypeError, "cos has dtype"),
        (fp8, TypeError, "q has dtype float32 and k_cache float8_e4m3fn; .* float16 or bfloat16"),
        (half | {"k_cache": cache.half()}, TypeError, "v_cache has dtype float32"),
        (half | fp8 | {"v_cache": cache.half()}, TypeError,
         "v_cache has dtype float16 but k_cache has dtype float8_e4m3fn"),
        (half | fp8 | {"q": half["q"].to(FP8)}, TypeError,
         "q has dtype torch.float8_e4m3fn; it must be float32, float16 or bfloat16; in fp8"),
        (half | fp8 | new | {"k": k.to(FP8)}, TypeError, "k has dtype torch.float8_e4m3fn"),
        (half | fp8 | new, TypeError, "k has dtype float32 and k_cache float8_e4m3fn"),
        (half | fp8 | {"out": half["q"].to(FP8)}, TypeError,
         "out has dtype float8_e4m3fn but q has dtype float16"),
        (half | {x: y.to(torch.float8_e5m2) for x, y in fp8.items()}, TypeError,
         "k_cache has dtype torch.float8_e5m2; it must be .* or float8_e4m3fn"),
        ({"k_descale": scales}, ValueError,
         "k_descale is given but k_cache has dtype float32; only float8_e4m3fn has a descale"),
        ({"v_descale": scales}, ValueError, "v_descale is given but v_cache has dtype float32"),
        (half | fp8 | {"k_descale": scales[:, :1]}, ValueError,
         r"k_descale has shape \(2, 1\); .* head of k_cache, \(2,\), or .* \(2, 2\)"),
        (half | fp8 | {"v_descale": scales[:1]}, ValueError, r"v_descale has shape \(1, 2\)"),
        (half | fp8 | {"v_descale": scales[0, 0]}, ValueError, r"v_descale has shape \("),
        (half | fp8 | {"v_descale": scales.half()}, TypeError,
         "v_descale has dtype float16; it must be float32"),
        (half | fp8 | {"k_descale": scales.numpy()}, TypeError, "k_descale is a numpy.ndarray"),
        (half | fp8 | {"k_descale": 2.0}, TypeError, "k_descale is a builtins.float"),
        ({"layout": "sbhd"}, ValueError, "layout is 'sbhd'"),
        ({"align": "left"}, ValueError, "align is 'left'"),
        ({"causal": 1}, TypeError, "causal is 1"),
        ({"out": torch.zeros(2, 1, 4, 7)}, ValueError, "out has head_dim 7 but v_cache has 8"),
        ({"out": torch.zeros(2, 1, 4, 8).half()}, TypeError, "out has dtype float16"),
        ({"out": cache[:, :1, :1].expand(2, 1, 4, 8)}, ValueError, "out has shape"),
    ]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "words"), bad_calls())
def test_refused(change, error, words):
    """Named, with the value and the rule; nothing is written."""
    q, cache = torch.zeros(2, 1, 4, 8), torch.zeros(2, 16, 2, 8)
    arguments = {"q": q, "k_cache": cache, "v_cache": cache.clone()} | change
    before = arguments["k_cache"]
    before = before.copy() if isinstance(before, np.ndarray) else before.clone()
    with pytest.raises(error, match=words):
        flash_attention_with_kvcache(**arguments)
    assert (before == arguments["k_cache"]).all()


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_fp8_is_for_caches(name):
    arrays = {x: torch.zeros(1, 2, 3, 8, dtype=torch.float16) for x in "qkv"}
    arrays[name] = arrays[name].to(FP8)
    words = f"{name} has dtype torch.float8_e4m3fn.* caches only, of flash_attention_with_kvcache"
    with pytest.raises(TypeError, match=words):
        fa101.flash_attention(**arrays)


def test_out_overlaps():
    """FA-075: out may be nobody's memory."""
    cache = torch.zeros(2, 16, 4, 8)
    q = torch.zeros(2, 1, 4, 8)
    with pytest.raises(ValueError, match="out overlaps k_cache in memory"):
        flash_attention_with_kvcache(q, cache, cache.clone(), out=cache[:, :1])
    with pytest.raises(ValueError, match="k_cache overlaps k in memory"):
        flash_attention_with_kvcache(
            q, cache, cache.clone(), k=cache[:, :1], v=q.clone(), seqlens_k=3
        )
    with pytest.raises(ValueError, match="v_cache overlaps q in memory"):
        flash_attention_with_kvcache(
            cache[:, :1], cache.clone(), cache, k=q, v=q.clone(), seqlens_k=3
        )
    with pytest.raises(ValueError, match="out overlaps q in memory"):
        flash_attention_with_kvcache(q, cache, cache.clone(), out=q)
    flash_attention_with_kvcache(cache[:, :1], cache, cache)  # all of them are read alone

    memory = torch.zeros(2, 1, 4, 8)
    cos = torch.zeros(16, 4)
    call = {"k": q.clone(), "v": q.clone(), "seqlens_k": 3, "rotary": (cos, cos.clone(), False)}
    for name in ("k", "v", "cos", "sin", "q"):
        arguments = {"q": q, **call}
        if name in ("cos", "sin"):
            turned = memory.view(16, 4)
            rotary = (turned, cos, False) if name == "cos" else (cos, turned, False)
            arguments["rotary"] = rotary
        else:
            arguments[name] = memory
        before = memory.clone()
        with pytest.raises(ValueError, match=f"out overlaps {name} in memory"):
            flash_attention_with_kvcache(
                k_cache=cache, v_cache=cache.clone(), out=memory, **arguments
            )
        assert torch.equal(memory, before)
    assert not cache.any()


@pytest.mark.parametrize("name", ["k_cache", "v_cache", "out"])
def test_numpy_steps_of_what_is_used_in_place(name):
    """A field of a structured array: its steps are no multiples of its elements' size."""
    cache = np.zeros((1, 16, 2, 8), np.float32)
    arguments = {"q": cache[:, :1].copy(), "k_cache": cache, "v_cache": cache.copy()}
    record = np.dtype([("x", np.float32, 8), ("tag", np.int16)])
    arguments[name] = np.zeros(arguments.get(name, arguments["q"]).shape[:3], record)["x"]
    with pytest.raises(ValueError, match=rf"{name} has strides of \(\d+, .*multiples of 4"):
        flash_attention_with_kvcache(**arguments)


@pytest.mark.parametrize("device", DEVICES)
def test_out(device):
    """FA-075: a strided out is filled, its neighbours are not, the bits are those without it."""
    cache = Cache([40, 64], 64, page_size=16, dtype=torch.float16, new=0, device=device)
    q = queries(cache, 3)
    expected = cache.call(q)
    room = torch.full((2, 3, 4, 64), 7.0, dtype=torch.float16, device=device)
    out = room[..., 8:40]
    out.fill_(math.nan)
    assert cache.call(q, out=out) is out
    assert torch.equal(out, expected)
    assert (room[..., :8] == 7).all()
    assert (room[..., 40:] == 7).all()


@pytest.mark.gpu
def test_wrong_devices():
    cache = Cache([5], 16, dtype=torch.float16, device="cuda", new=1)
    q = queries(cache, 1)
    for name in ("seqlens_k", "page_table"):
        value = torch.zeros(1, dtype=torch.int32)
        with pytest.raises(ValueError, match=f"{name} is on cpu but k_cache is on cuda:0"):
            cache.call(q, **{name: value if name == "seqlens_k" else value[None]})
    with pytest.raises(ValueError, match="k is on cpu but k_cache is on cuda:0"):
        cache.call(q, k=cache.k_new.cpu())


# ---- frameworks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_numpy(dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    np_dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    cache = Cache([9, 30], 64, page_size=16, new=2)
    q = queries(cache, 2)
    arrays = [x.numpy().astype(np_dtype) for x in (q, *cache.caches(), cache.k_new, cache.v_new)]
    out, lse = flash_attention_with_kvcache(
        *arrays[:3],
        k=arrays[3],
        v=arrays[4],
        seqlens_k=cache.seqlens_k.numpy(),
        page_table=cache.page_table.numpy(),
        return_lse=True,
    )
    assert isinstance(out, np.ndarray)
    assert isinstance(lse, np.ndarray)
    k, v = (x.numpy().astype(np_dtype) for x in cache.complete())
    options = {"causal": True, "align": "bottom_right", "layout": "bshd"}
    assert_attention(out, arrays[0], k, v, lse=lse, seqlens_k=cache.total().numpy(), **options)
    read_only = arrays[1].copy()
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="k_cache is read-only"):
        flash_attention_with_kvcache(
            arrays[0], read_only, arrays[2], k=arrays[3], v=arrays[4], seqlens_k=3,
            page_table=cache.page_table.numpy(),
        )  # fmt: skip


@pytest.mark.parametrize("as_bytes", [False, True])
def test_numpy_fp8(as_bytes):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    cache = Cache([9, 30], 64, page_size=16, new=2, dtype=torch.float16, fp8="head")
    q = queries(cache, 2)
    pools = [x.view(torch.uint8).numpy().copy() for x in cache.caches()]
    arrays = pools if as_bytes else [x.view(ml_dtypes.float8_e4m3fn) for x in pools]
    options = {"seqlens_k": cache.seqlens_k, "page_table": cache.page_table}
    options |= cache.new_keys() | cache.descales
    out = flash_attention_with_kvcache(
        q.numpy(), *arrays, **{name: x.numpy() for name, x in options.items()}
    )
    np.testing.assert_array_equal(out, cache.call(q).numpy())
    for pool, x in zip(pools, cache.caches(), strict=True):
        np.testing.assert_array_equal(pool, x.view(torch.uint8).numpy())


def test_jax_fp8():
    jax = pytest.importorskip("jax")
    cache = Cache([9, 30], 64, dtype=torch.float16, fp8="entry")
    q = queries(cache, 2)
    fp8 = [jax.numpy.asarray(x.view(torch.uint8).numpy()).view("float8_e4m3fn")
           for x in cache.caches()]  # fmt: skip
    descales = {name: jax.numpy.asarray(x.numpy()) for name, x in cache.descales.items()}
    out = flash_attention_with_kvcache(
        jax.numpy.asarray(q.numpy()), *fp8, seqlens_k=[9, 30], **descales
    )
    np.testing.assert_array_equal(np.asarray(out), cache.call(q).numpy())


def test_jax():
    """Reads a cache; cannot append to it."""
    jax = pytest.importorskip("jax")
    cache = Cache([9, 30], 64, new=0)
    q = queries(cache, 2)
    q_jax, k, v = (jax.numpy.asarray(x.numpy()) for x in (q, *cache.caches()))
    lengths = jax.numpy.asarray(cache.seqlens_k.numpy())
    for seqlens_k in (lengths, [9, 30]):
        out = flash_attention_with_kvcache(q_jax, k, v, seqlens_k=seqlens_k)
        np.testing.assert_allclose(np.asarray(out), cache.call(q).numpy(), rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="k_cache is a JAX array, which cannot be written"):
        flash_attention_with_kvcache(q_jax, k, v, k=q_jax[:, :, :2], v=q_jax[:, :, :2], seqlens_k=3)


@pytest.mark.gpu
def test_cupy():
    cupy = pytest.importorskip("cupy")
    cache = Cache([9, 30], 64, page_size=16, dtype=torch.float16, device="cuda", new=2)
    q = queries(cache, 2)
    arrays = [cupy.asarray(x) for x in (q, *cache.caches(), cache.k_new, cache.v_new)]
    out = flash_attention_with_kvcache(
        *arrays[:3],
        k=arrays[3],
        v=arrays[4],
        seqlens_k=cupy.asarray(cache.seqlens_k),
        page_table=cupy.asarray(cache.page_table),
    )
    again = cache.call(q)
    assert torch.equal(torch.as_tensor(out, device="cuda"), again)


@pytest.mark.gpu
def test_cupy_fp8():
    """As bytes: CuPy has no such dtype."""
    cupy = pytest.importorskip("cupy")
    cache = Cache([9, 30], 64, page_size=16, dtype=torch.float16, device="cuda", new=2, fp8="head")
    q = queries(cache, 2)
    options = {"seqlens_k": cache.seqlens_k, "page_table": cache.page_table}
    options |= cache.new_keys() | cache.descales
    out = flash_attention_with_kvcache(
        cupy.asarray(q),
        *(cupy.asarray(x.view(torch.uint8).clone()) for x in cache.caches()),
        **{name: cupy.asarray(x) for name, x in options.items()},
    )
    assert torch.equal(torch.as_tensor(out, device="cuda"), cache.call(q))


@pytest.mark.parametrize("device", DEVICES)
def test_autocast(device):
    """Queries and new keys are cast, caches are not."""
    cache = Cache([9, 30], 64, dtype=torch.bfloat16, new=2, device=device)
    q = queries(cache, 2).float()
    cache.k_new, cache.v_new = cache.k_new.float(), cache.v_new.float()
    with torch.autocast(device, dtype=torch.bfloat16):
        out = cache.call(q)
    assert out.dtype == torch.bfloat16
    assert cache.k_cache.dtype == torch.bfloat16


def test_writes_are_seen_by_autograd():
    cache = Cache([9, 30], 64, new=2)
    versions = [x._version for x in cache.caches()]
    cache.call(queries(cache, 2))
    assert all(x._version > n for x, n in zip(cache.caches(), versions, strict=True))
    cache.new = 0
    versions = [x._version for x in cache.caches()]
    cache.call(queries(cache, 2))
    assert [x._version for x in cache.caches()] == versions


@pytest.mark.parametrize("device", DEVICES)
def test_threads(device):
    """FA-043: every thread its own caches; workspaces and copies of q are nobody else's."""
    options = {"head_dim": 64, "dtype": torch.float16, "device": device, "new": 2}

    def generate(seed):
        cache = Cache([0, 700], 1024, seed=seed, **options)
        angles = torch.linspace(0, 9, 1024 * 32, device=device).view(1024, 32)
        outs = []
        for step in range(10):
            q = queries(cache, 2, group=4, seed=step)
            outs.append(cache.call(q, rotary=(angles.cos(), angles.sin(), step % 2 == 0)))
            cache.seqlens_k += 2
        return torch.stack(outs)

    with poisoned_memory(), ThreadPoolExecutor(8) as pool:  # for all threads at once
        expected = [generate(seed) for seed in range(8)]
        for out, want in zip(pool.map(generate, range(8)), expected, strict=True):
            assert torch.equal(bits(out), bits(want))


def test_example():
    """A Llama of transformers through pages generates what it generates through SDPA."""
    pytest.importorskip("transformers")
    example = Path(__file__).parents[2] / "examples" / "decode.py"
    arguments = ["--layers", "1", "--prompt", "20", "--tokens", "6", "--page-size", "16"]
    done = subprocess.run(
        [sys.executable, example, *arguments], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "fa101 " in done.stdout
    assert torch.cuda.is_available() or "100 % of the tokens are the same" in done.stdout


# ---- one call after another ----------------------------------------------------------------------

# On Hopper a launch that has more blocks than there are multiprocessors starts before the one in
# front of it has ended, and has to wait for what that one writes.


def chain(cache, q, outs, *, sync=False):
    """The result of each call is the queries of the next."""
    for out in outs:
        flash_attention_with_kvcache(q, *cache.caches(), seqlens_k=cache.seqlens_k, out=out)
        if sync:
            torch.cuda.synchronize()
        q = out


def chained_cache(device, batch, seqlen):
    """Values so large that the means of a chain do not fade."""
    cache = Cache([seqlen] * batch, seqlen, heads_kv=8, head_dim=128, dtype=torch.float16,
                  device=device)  # fmt: skip
    for x in (cache.v, cache.v_cache):
        x *= 0.5 * seqlen**0.5
    return cache


# For an H200 the second and third are of several splits and of 256 and more blocks, the last two of
# one split and of 128 and 256 blocks.
CHAINS = [
    pytest.param("cpu", 2, 300),
    *(
        pytest.param("cuda", *sizes, marks=pytest.mark.gpu)
        for sizes in [(1, 4096), (1, 8192), (17, 1024), (16, 1024), (32, 1024)]
    ),
]


@pytest.mark.parametrize(("device", "batch", "seqlen"), CHAINS)
def test_chain(device, batch, seqlen):
    """The bits of calls that wait for each other."""
    cache = chained_cache(device, batch, seqlen)
    first = queries(cache, 1, group=4)
    expected = [torch.full_like(first, math.nan) for _ in range(8)]
    chain(cache, first, expected, sync=device == "cuda")
    for q, out in ((first, expected[0]), (expected[-2], expected[-1])):
        some = (x[:2] for x in (out, q, cache.k, cache.v))
        assert_attention(*some, layout="bshd")
    assert expected[-1].float().std() > 0.1
    for _ in range(20 if device == "cuda" else 1):
        outs = [torch.full_like(first, math.nan) for _ in expected]
        chain(cache, first, outs)
        for out, want in zip(outs, expected, strict=True):
            assert torch.equal(out, want)


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "seqlen"), [x.values[1:] for x in CHAINS[1:]])
def test_chain_in_a_graph(batch, seqlen):
    cache = chained_cache("cuda", batch, seqlen)
    first = queries(cache, 1, group=4)
    outs = [torch.full_like(first, math.nan) for _ in range(8)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(cache, first, outs)
    for _ in range(3):
        first.normal_()
        expected = [torch.full_like(first, math.nan) for _ in outs]
        chain(cache, first, expected, sync=True)
        for out in outs:
            out.fill_(math.nan)
        graph.replay()
        for out, want in zip(outs, expected, strict=True):
            assert torch.equal(out, want)


@pytest.mark.parametrize(
    ("head_dim", "page_size", "fp8"),
    [(33, None, None), (33, 16, None), (128, None, None), (128, 16, None), (128, 16, "head")],
)
@pytest.mark.parametrize("device", DEVICES)
def test_decoder_steps(device, head_dim, page_size, fp8):
    """Forty steps of a key each, which the next one reads: the bits of steps that wait for each
    other, over page borders."""
    steps, heads_kv = 40, 8 if device == "cuda" else 1  # 160 blocks on an H200
    cache = Cache([0, 5, 250, 640, 1000], 1040, heads_kv=heads_kv, head_dim=head_dim, new=steps,
                  page_size=page_size, dtype=torch.float16, device=device, fp8=fp8)  # fmt: skip
    q = queries(cache, steps, group=4)
    lengths = [cache.seqlens_k + step for step in range(steps)]
    expected = cache.written()

    def generate(caches, sync):
        outs = [torch.full_like(q[:, :1], math.nan) for _ in range(steps)]
        for i, out in enumerate(outs):
            here = slice(i, i + 1)
            flash_attention_with_kvcache(
                q[:, here], *caches, k=cache.k_new[:, here], v=cache.v_new[:, here], out=out,
                seqlens_k=lengths[i], page_table=cache.page_table, **cache.descales,
            )  # fmt: skip
            if sync:
                torch.cuda.synchronize()
        for pool, want in zip(caches, expected, strict=True):
            assert torch.equal(bits(pool), bits(want))
        return torch.cat(outs, dim=1)

    waiting = generate([x.clone() for x in cache.caches()], sync=device == "cuda")
    k, v = cache.complete()
    for b, n in enumerate(cache.total().tolist()):  # without NaN the reference is fast
        bits(k)[b, n:] = bits(v)[b, n:] = 0
    options = {"causal": True, "align": "bottom_right", "layout": "bshd", **cache.descales}
    assert_attention(waiting, q, k, v, seqlens_k=cache.total(), **options)
    for _ in range(5 if device == "cuda" else 1):
        assert torch.equal(generate([x.clone() for x in cache.caches()], sync=False), waiting)


# ---- streams and graphs --------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("page_size", "seqlen_q"), [(None, 1), (16, 1), (None, 8)])
def test_graph_with_growing_lengths(page_size, seqlen_q):
    """FA-029: captured once, at any length; replayed over page borders with new keys."""
    cache = Cache([8000, 1], 8192, head_dim=128, page_size=page_size, dtype=torch.float16,
                  device="cuda", new=1)  # fmt: skip
    if page_size is not None:  # all pages are there, whatever the length
        full = Cache([8192, 8192], 8192, head_dim=128, page_size=page_size, dtype=torch.float16,
                     device="cuda")  # fmt: skip
        cache.k_cache, cache.v_cache = full.k_cache, full.v_cache
        cache.page_table = full.page_table
    for x in cache.caches():
        x.nan_to_num_(nan=0.5)
    q = queries(cache, seqlen_q, group=4)
    graph = torch.cuda.CUDAGraph()
    options = cache.new_keys() | {"page_table": cache.page_table, "seqlens_k": cache.seqlens_k}
    theta = torch.arange(8192, device="cuda")[:, None] / 100 ** (
        torch.arange(64, device="cuda") / 64
    )
    options["rotary"] = (theta.cos(), theta.sin(), False)
    with torch.cuda.graph(graph):
        out = flash_attention_with_kvcache(q, *cache.caches(), **options)
    steps = [(2, 64), (15, 16), (65, 4095), (8191, 0), (1, 511), (512, 8190), (0, 0), (8191, 8191),
             (255, 256), (256, 255), (8190, 1), (0, 300), (4096, 4095)]  # fmt: skip
    for lengths in steps:
        cache.seqlens_k.copy_(torch.tensor(lengths))
        for x in (q, cache.k_new, cache.v_new):
            x.normal_()
        copies = [x.clone() for x in cache.caches()]
        expected = flash_attention_with_kvcache(q, *copies, **options)
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out, expected)
        for x, y in zip(cache.caches(), copies, strict=True):
            assert torch.equal(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [None, 64])
def test_same_bits_in_used_memory(page_size):
    """FA-052: 2000 times, in a workspace that holds what the calls before left there."""
    caches = [
        Cache(lengths, 8192, heads_kv=heads_kv, head_dim=head_dim, page_size=page_size,
              dtype=torch.bfloat16, device="cuda")
        for lengths, heads_kv, head_dim in [([8192], 8, 128), ([8000, 0, 300], 2, 64)]
    ]  # fmt: skip
    calls = [(cache, queries(cache, seqlen_q)) for cache in caches for seqlen_q in (1, 20)]
    expected = [cache.call(q) for cache, q in calls]
    for _ in range(500):
        got = [
            flash_attention_with_kvcache(
                q, *cache.caches(), seqlens_k=cache.seqlens_k, page_table=cache.page_table
            )
            for cache, q in calls
        ]
        assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


@pytest.mark.gpu
def test_two_streams_with_splits():
    """FA-006: each has more blocks than the GPU holds, and blocks that wait for others."""
    cache = Cache([8192] * 4, 8192, heads_kv=8, head_dim=128, dtype=torch.float16, device="cuda")
    q = queries(cache, 1)
    expected = cache.call(q, num_splits=64)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    outs = []
    for _ in range(100):
        for stream in streams:
            with torch.cuda.stream(stream):
                outs.append(
                    flash_attention_with_kvcache(
                        q, *cache.caches(), seqlens_k=cache.seqlens_k, num_splits=64
                    )
                )
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in outs)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [None, 16])
def test_fp8_in_a_graph(page_size):
    """New lengths, keys and descales without a new capture."""
    cache = Cache([4096, 4096], 4096, head_dim=128, page_size=page_size, dtype=torch.bfloat16,
                  device="cuda", fp8="entry")  # fmt: skip
    q = queries(cache, 2, group=4)
    k, v = (torch.randn(2, 2, 2, 128, device="cuda").to(q) for _ in "kv")
    options = {"k": k, "v": v, "page_table": cache.page_table, "seqlens_k": cache.seqlens_k}
    options |= cache.descales
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attention_with_kvcache(q, *cache.caches(), **options)
    for lengths in [(2, 64), (15, 16), (4094, 0), (1, 511)]:
        cache.seqlens_k.copy_(torch.tensor(lengths))
        for x in (q, k, v):
            x.normal_()
        for x in cache.descales.values():
            x.uniform_(0.5, 2)
        copies = [x.clone() for x in cache.caches()]
        expected = flash_attention_with_kvcache(q, *copies, **options)
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out, expected)
        for x, y in zip(cache.caches(), copies, strict=True):
            assert torch.equal(bits(x), bits(y))


@pytest.mark.gpu
def test_side_stream():
    """FA-006: behind a sleep, in the stream's order; the call does not wait."""
    cache = Cache([100, 700], 1024, head_dim=64, page_size=16, dtype=torch.float16, device="cuda",
                  new=3)  # fmt: skip
    q = queries(cache, 3)
    expected = cache.call(q)
    values = cache.new_keys() | {"seqlens_k": cache.seqlens_k}
    late = {name: torch.zeros_like(x) for name, x in values.items()}
    for x in cache.caches():
        x.nan_to_num_(nan=0.0)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(20):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            for name, x in late.items():
                x.copy_(values[name])
            out = flash_attention_with_kvcache(
                q, *cache.caches(), **late, page_table=cache.page_table
            )
            done = stream.record_event()
            assert not done.query()
            for x in late.values():
                x.zero_()
        done.synchronize()
        assert torch.equal(out, expected)
