"""Window, softcap, bias, mask and seqlens_k: each, in pairs, and on every kernel that has them."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fa101
from fa101.testing import assert_attention, visible_pairs
from helpers import DTYPES, REDONE, answers, attend, has_extras, kernel_params, on, qkv, variants

with_extras = [p for p in kernel_params() if has_extras(p.values[0])]
with_softcap = [p for p in kernel_params() if has_extras(p.values[0], "window", "softcap")]


def random_extras(q, k, *, seed=0, layout="bhsd"):
    """One value of every option, by name."""
    heads, rows = (1, 2) if layout == "bhsd" else (2, 1)
    batch, seqlen_q, seqlen_k = q.shape[0], q.shape[rows], k.shape[rows]
    shape = (batch, q.shape[heads], seqlen_q, seqlen_k)
    generator = torch.Generator().manual_seed(seed)
    return {
        "window": {"window": (seqlen_k // 3, seqlen_k // 5)},
        "causal": {"causal": True, "align": "bottom_right"},
        "softcap": {"softcap": 2.0},
        "bias": {"bias": torch.randn(shape, generator=generator).to(q)},
        "mask": {"mask": (torch.rand(shape, generator=generator) < 0.7).to(q.device)},
        "seqlens_k": {
            "seqlens_k": torch.randint(
                0, seqlen_k + 1, (batch,), generator=generator, dtype=torch.int32
            ).to(q.device)
        },
    }


NAMES = ["window", "causal", "softcap", "bias", "mask", "seqlens_k"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", with_softcap)
def test_each_and_each_pair(kernel, dtype):
    if not answers(kernel, dtype, 40):
        pytest.skip(f"{kernel} has no {dtype}")
    for i, (first, second) in enumerate(itertools.combinations_with_replacement(NAMES, 2)):
        if not has_extras(kernel, *{first, second} - {"causal"}):
            continue
        q, k, v = qkv(2, 4, 70, 150, 40, heads_kv=2, dtype=dtype, kernel=kernel, seed=i)
        extras = random_extras(q, k, seed=i)
        options = extras[first] | extras[second]
        out, lse = attend(q, k, v, kernel=kernel, **options)
        assert_attention(out, q, k, v, lse=lse, **options)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("kernel", with_extras)
def test_all_at_once(kernel, head_dim):
    """On every tile; few queries and many."""
    for seqlen_q, seqlen_k in [(1, 300), (5, 700), (200, 260)]:
        q, k, v = qkv(2, 6, seqlen_q, seqlen_k, head_dim, heads_kv=2, kernel=kernel)
        options = {name: x for extra in random_extras(q, k).values() for name, x in extra.items()}
        out, lse = attend(q, k, v, kernel=kernel, **options)
        assert_attention(out, q, k, v, lse=lse, **options)


@pytest.mark.parametrize("kernel", with_softcap)
def test_windows(kernel):
    """Both sides, from none to all, around the tiles, in both corners."""
    widths = [None, 0, 1, 63, 64, 200, 2**62]
    for i, window in enumerate(itertools.product(widths, widths)):
        head_dim = (32, 96, 128, 192, 256)[i % 5]
        q, k, v = qkv(1, 2, 260, (390, 260, 130)[i % 3], head_dim, kernel=kernel, seed=i)
        options = {"window": window, "align": ("top_left", "bottom_right")[i % 2]}
        options["softcap"] = 2.0 if i % 4 == 3 else 0.0
        out, lse = attend(q, k, v, kernel=kernel, **options)
        assert_attention(out, q, k, v, lse=lse, **options)


def test_window_examples():
    """The keys that the docstring says: a sliding window, also with causal."""
    q, k, v = qkv(1, 1, 6, 6, 8)
    sliding = fa101.flash_attention(q, k, v, window=(2, 0))
    assert torch.equal(sliding, fa101.flash_attention(q, k, v, window=(2, None), causal=True))
    assert torch.equal(sliding, fa101.flash_attention(q, k, v, window=(2, 5), causal=True))
    assert torch.equal(sliding, fa101.flash_attention(q, k, v, window=[np.int64(2), 0]))
    seen = visible_pairs((1, 1, 6, 6), window=(2, 0))[0, 0]
    assert seen[4].tolist() == [False, False, True, True, True, False]
    assert_attention(sliding, q, k, v, window=(2, 0))


@pytest.mark.parametrize("softcap", [0.3, 30.0, 1e4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", with_softcap)
def test_softcap(kernel, dtype, softcap):
    """Small and large against the logits; large logits stay within it."""
    if not answers(kernel, dtype, 64):
        pytest.skip(f"{kernel} has no {dtype}")
    q, k, v = qkv(1, 2, 65, 130, 64, dtype=dtype, kernel=kernel)
    for size in (0.1, 1.0, 20.0):
        for scale in (None, -1.0, 0.0):
            options = {"softcap": softcap, "softmax_scale": scale}
            out, lse = attend(size * q, k, v, kernel=kernel, **options)
            assert_attention(out, size * q, k, v, lse=lse, **options)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("kernel", with_extras)
def test_broadcast(kernel, layout):
    """2 to 4 axes, each whole or 1, expanded or strided; always (batch, heads, queries, keys)."""
    q, k, v = qkv(2, 4, 33, 70, 16, heads_kv=2, kernel=kernel, layout=layout)
    extras = random_extras(q, k, layout=layout)
    bias, mask = extras["bias"]["bias"], extras["mask"]["mask"]
    where = [np.s_[:], np.s_[:1]]
    for choice in itertools.product(where, repeat=4):
        options = {"bias": bias[choice], "mask": mask[choice[::-1]]}
        out, lse = attend(q, k, v, kernel=kernel, layout=layout, **options)
        assert_attention(out, q, k, v, lse=lse, layout=layout, **options)
    for make in (
        lambda x: x[0, 0],
        lambda x: x[0, :1],
        lambda x: x[:1, :1].expand(2, 4, -1, -1),
        lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
        lambda x: torch.cat([x, x], dim=3)[..., ::2],
    ):
        for options in ({"bias": make(bias)}, {"mask": make(mask)}):
            out, _ = attend(q, k, v, kernel=kernel, layout=layout, **options)
            assert_attention(out, q, k, v, layout=layout, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", with_extras)
def test_float32_bias(kernel, dtype):
    """A bias in float32 beside 16-bit inputs is not rounded first."""
    if not answers(kernel, dtype, 16):
        pytest.skip(f"{kernel} has no {dtype}")
    q, k, v = qkv(1, 2, 20, 70, 16, dtype=dtype, kernel=kernel)
    bias = 300 + torch.rand(20, 70, device=q.device)
    _, lse = attend(q, k, v, kernel=kernel, bias=bias)
    logits = q.double() @ k.double().mT / q.shape[-1] ** 0.5 + bias.double()
    torch.testing.assert_close(lse.double(), logits.logsumexp(-1), rtol=0, atol=2e-4)


@pytest.mark.parametrize("how", ["mask", "bias"])
@pytest.mark.parametrize("kernel", with_extras)
def test_rows_fully_masked(kernel, how):
    """Hidden by the mask or by a bias of -inf: 0 and -inf, as torch has it; others are exact."""
    for seqlen_q, seqlen_k in [(1, 64), (70, 130)]:
        q, k, v = qkv(2, 2, seqlen_q, seqlen_k, 32, kernel=kernel)
        mask = torch.rand(2, 2, seqlen_q, seqlen_k) < 0.5
        mask[0, :, ::2] = False
        mask[1, 1] = False
        mask = mask.to(q.device)
        bias = torch.zeros(mask.shape).to(q).masked_fill(~mask, -math.inf)
        options = {"mask": mask} if how == "mask" else {"bias": bias}
        out, lse = attend(q, k, v, kernel=kernel, **options)
        assert (out[0, :, ::2] == 0).all()
        assert (lse[0, :, ::2] == -math.inf).all()
        assert (out[1, 1] == 0).all()
        assert_attention(out, q, k, v, lse=lse, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", with_extras)
def test_lowest_finite_bias(kernel, dtype):
    """finfo.min as Hugging Face's masks have it: hides, but a row of nothing else is the mean."""
    if not answers(kernel, dtype, 16):
        pytest.skip(f"{kernel} has no {dtype}")
    for bias_dtype in {dtype, torch.float32}:
        q, k, v = qkv(1, 2, 5, 70, 16, dtype=dtype, kernel=kernel)
        lowest = torch.finfo(bias_dtype).min
        bias = torch.zeros(5, 70, dtype=bias_dtype, device=q.device)
        bias[0], bias[1, 20:], bias[2, 1], bias[3, 0] = lowest, lowest, -lowest, -math.inf
        out, _ = attend(q, k, v, kernel=kernel, bias=bias)
        assert_attention(out, q, k, v, bias=bias)
        if lowest < -1e30:  # so low that logits make no difference
            torch.testing.assert_close(out[:, :, 0].float(), v.float().mean(2), atol=2e-2, rtol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("how", ["mask", "window", "capped window", "seqlens_k", "both"])
@pytest.mark.parametrize("kernel", with_softcap)
def test_hidden_values_have_no_effect(kernel, how, bad):
    """FA-009, FA-050: k, v and bias that no or some queries may not see may hold anything there."""
    if "window" not in how and not has_extras(kernel):
        pytest.skip(f"{kernel} has no mask and no lengths")
    for seqlen_q, seqlen_k in [(1, 300), (3, 130), (130, 200)]:
        q, k, v = qkv(2, 4, seqlen_q, seqlen_k, 48, heads_kv=2, kernel=kernel)
        extras = random_extras(q, k, seed=seqlen_q)
        options = {
            "mask": extras["mask"],
            "window": {"window": (20, 30), "align": "bottom_right"},
            "capped window": {"window": (20, 30), "align": "bottom_right", "softcap": 2.0},
            "seqlens_k": extras["seqlens_k"],
            "both": extras["mask"] | {"window": (40, 0), "align": "bottom_right"},
        }[how]
        bias = extras["bias"]["bias"] if has_extras(kernel) else None
        clean, clean_lse = attend(q, k, v, kernel=kernel, bias=bias, **options)
        visibility = {name: x for name, x in options.items() if name in ("window", "align")}
        for name in ("mask", "seqlens_k"):
            if name in options:
                visibility[name] = options[name].cpu().numpy()
        shape = (2, 4, seqlen_q, seqlen_k)
        visible = torch.from_numpy(visible_pairs(shape, **visibility)).to(q.device)
        # Some keys go bad: rows that do not see them must not notice.
        for key in (0, seqlen_k // 2, seqlen_k - 1):
            k_bad, v_bad = k.clone(), v.clone()
            k_bad[:, :, key], v_bad[:, :, key] = bad, bad
            bias_bad = None if bias is None else bias.masked_fill(~visible, bad)
            out, lse = attend(q, k_bad, v_bad, kernel=kernel, bias=bias_bad, **options)
            unseen = ~visible[..., key]
            torch.testing.assert_close(out[unseen], clean[unseen], **REDONE[out.dtype])
            torch.testing.assert_close(lse[unseen], clean_lse[unseen], rtol=1e-6, atol=2e-6)
            assert_attention(out, q, k_bad, v_bad, lse=lse, bias=bias_bad, **options)


@pytest.mark.parametrize("kernel", with_extras)
def test_nan_in_a_visible_bias(kernel):
    q, k, v = qkv(1, 2, 40, 90, 16, kernel=kernel)
    bias = torch.zeros(40, 90).to(q)
    bias[7, 50] = math.nan
    out, lse = attend(q, k, v, kernel=kernel, bias=bias)
    assert out[:, :, 7].isnan().all()
    assert lse[:, :, 7].isnan().all()
    assert_attention(out, q, k, v, lse=lse, bias=bias)


@pytest.mark.parametrize("kernel", with_extras)
def test_lengths(kernel):
    """FA-009, FA-076: the tail beyond seqlens_k is never read into the result, even NaN."""
    capacity = 200
    for seqlen_q in (1, 3, 70):
        for align in ("top_left", "bottom_right"):
            for causal in (False, True):
                q, k, v = qkv(6, 4, seqlen_q, capacity, 64, heads_kv=2, kernel=kernel)
                lengths = [0, 1, 64, 129, 200, 1000]
                for b, n in enumerate(lengths):
                    k[b, :, n:], v[b, :, n:] = math.nan, math.nan
                seqlens_k = torch.tensor(lengths, dtype=torch.int32, device=q.device)
                options = {"causal": causal, "align": align}
                out, lse = attend(q, k, v, kernel=kernel, seqlens_k=seqlens_k, **options)
                assert_attention(out, q, k, v, lse=lse, seqlens_k=seqlens_k, **options)
                # as a call on the keys that exist
                for b, n in enumerate(lengths[:-1]):
                    part = [x[b : b + 1, :, :n] for x in (k, v)]
                    one, one_lse = attend(q[b : b + 1], *part, kernel=kernel, **options)
                    torch.testing.assert_close(out[b : b + 1], one, **REDONE[out.dtype])
                    torch.testing.assert_close(lse[b : b + 1], one_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", with_extras)
def test_lengths_strided_and_negative(kernel):
    q, k, v = qkv(3, 2, 4, 50, 16, kernel=kernel)
    seqlens_k = torch.tensor([7, 0, -3, 0, 50, 0], dtype=torch.int32, device=q.device)[::2]
    out, lse = attend(q, k, v, kernel=kernel, seqlens_k=seqlens_k)
    assert (out[1] == 0).all()
    assert_attention(out, q, k, v, lse=lse, seqlens_k=seqlens_k)


@pytest.mark.parametrize("kernel", [p for p in with_extras if ":split_kv" in p.values[0]])
def test_same_bits_in_any_company(kernel):
    """A sequence's result depends neither on the cache's capacity nor on other lengths."""
    q, k, v = qkv(4, 8, 1, 4096, 128, heads_kv=2, dtype=torch.float16, kernel=kernel)

    def run(capacity, lengths):
        seqlens_k = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        return attend(q, k[:, :, :capacity], v[:, :, :capacity], kernel=kernel, seqlens_k=seqlens_k)

    out, lse = run(4096, [1500, 4096, 1, 700])
    for capacity, lengths in [(1500, [1500, 3, 0, 9]), (2048, [1500] * 4), (4096, [1500, 1, 2, 3])]:
        again, again_lse = run(capacity, lengths)
        assert torch.equal(again[0], out[0])
        assert torch.equal(again_lse[0], lse[0])


@pytest.mark.parametrize("kernel", [p for p in with_extras if ":split_kv" in p.values[0]])
def test_strided_output_of_split_kv(kernel):
    """FA-037: the combine writes rows where they belong, and nothing beside them."""
    for layout in ("bhsd", "bshd"):
        q, k, v = qkv(3, 4, 5, 4096, 64, dtype=torch.float16, kernel=kernel, layout=layout)
        canaries = torch.full((3, *q.shape[1:3], 96), 7.0, dtype=q.dtype, device=q.device)
        out = canaries[..., 16:80]
        out.fill_(math.nan)
        fa101.flash_attention(q, k, v, layout=layout, out=out, **on(kernel))
        assert_attention(out, q, k, v, layout=layout)
        assert (canaries[..., :16] == 7).all()
        assert (canaries[..., 80:] == 7).all()


@pytest.mark.gpu
def test_graph_with_growing_lengths():
    """FA-029: captured once, replayed with other lengths."""
    q, k, v = qkv(2, 8, 1, 8192, 128, heads_kv=2, dtype=torch.float16, device="cuda")
    seqlens_k = torch.ones(2, dtype=torch.int32, device="cuda")
    fa101.flash_attention(q, k, v, seqlens_k=seqlens_k)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fa101.flash_attention(q, k, v, seqlens_k=seqlens_k)
    for lengths in [(2, 64), (65, 4095), (8192, 1), (0, 8192)]:
        seqlens_k.copy_(torch.tensor(lengths))
        out.fill_(math.nan)
        graph.replay()
        expected = fa101.flash_attention(q, k, v, seqlens_k=seqlens_k)
        assert torch.equal(out, expected)
        assert_attention(out, q, k, v, seqlens_k=seqlens_k)


@pytest.mark.parametrize("kernel", variants("cpu"))
@pytest.mark.parametrize("read_only", [False, True])
def test_numpy_extras(kernel, read_only):
    """NumPy's bool and int32 arrays, read-only and unaligned ones too."""
    q, k, v = (x.numpy() for x in qkv(2, 2, 9, 30, 8))
    bias = np.random.default_rng(0).standard_normal((9, 30), np.float32)
    mask = bias > -1
    if read_only:
        bias.flags.writeable = mask.flags.writeable = False
    seqlens_k = np.frombuffer(b"\0" + np.array([30, 17], np.int32).tobytes(), np.int32, 2, 1)
    options = {"bias": bias, "mask": mask, "seqlens_k": seqlens_k}
    out, lse = fa101.flash_attention(q, k, v, return_lse=True, **on(kernel), **options)
    assert_attention(out, q, k, v, lse=lse, **options)


@st.composite
def extra_problems(draw, kernel):
    dtype = draw(st.sampled_from([d for d in DTYPES if answers(kernel, d, 8)]))
    head_dim, head_dim_v = draw(st.tuples(st.integers(1, 72), st.integers(1, 72)))
    batch, heads_kv, group = draw(
        st.tuples(st.integers(1, 3), st.integers(1, 2), st.sampled_from([1, 2, 4, 5]))
    )
    length = st.one_of(st.integers(1, 5), st.integers(1, 140), st.sampled_from([64, 128, 257]))
    longer = st.sampled_from([513, 1100, 1700])  # split over blocks, where that is the strategy
    q, k, v = qkv(
        batch,
        heads_kv * group,
        draw(length),
        draw(st.one_of(length, longer) if ":split_kv" in kernel else length),
        head_dim,
        heads_kv=heads_kv,
        head_dim_v=head_dim_v,
        dtype=dtype,
        kernel=kernel,
        seed=draw(st.integers(0, 2**31)),
    )
    extras = random_extras(q, k, seed=draw(st.integers(0, 2**31)))
    options = {"align": draw(st.sampled_from(["top_left", "bottom_right"]))}
    side = st.one_of(st.none(), st.integers(0, 150))
    if draw(st.booleans()):
        options["window"] = (draw(side), draw(side))
    for name in ("causal", "softcap", "bias", "mask", "seqlens_k"):
        if draw(st.booleans()):
            options |= extras[name]
    options["softmax_scale"] = draw(st.sampled_from([None, None, 0.0, -0.5, 1.5]))
    for name in ("bias", "mask"):
        if name in options:
            where = draw(st.tuples(*[st.sampled_from([np.s_[:], np.s_[:1]])] * 4))
            options[name] = options[name][where]
    return (q, k, v), options


@pytest.mark.parametrize("kernel", with_extras)
def test_any_extras(kernel):
    @settings(
        max_examples=60,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(extra_problems(kernel))
    def check(problem):
        tensors, options = problem
        out, lse = attend(*tensors, kernel=kernel, **options)
        assert_attention(out, *tensors, lse=lse, **options)

    check()
