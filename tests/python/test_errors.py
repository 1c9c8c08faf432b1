"""Options and shapes that are refused, and what is said; out= in full."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import fa101
from fa101 import __main__
from fa101.testing import assert_attention
from helpers import DEVICES, qkv


@pytest.mark.parametrize(
    ("option", "value", "error", "words"),
    [
        ("causal", "yes", TypeError, "causal is 'yes'; it must be True or False"),
        ("causal", None, TypeError, "causal is None"),
        ("causal", 1, TypeError, "causal is 1"),
        ("return_lse", 1, TypeError, "return_lse is 1"),
        ("strategy", 3, TypeError, "strategy is 3; it must be a string"),
        ("strategy", "nope", ValueError, "strategy 'nope' is unknown.*'split_kv' or 'split_d'"),
        ("strategy", "split_kv", ValueError, "'split_kv' does not fit.*these fit: 'cpu_naive'"),
        ("strategy", "split_d", ValueError, "'split_d' does not fit.*these fit: 'cpu_naive'"),
        ("kernel", None, TypeError, "kernel is None"),
        ("kernel", "nope", ValueError, "kernel 'nope' is unknown.*'cpu_naive'"),
        ("align", 0, TypeError, "align is 0"),
        ("align", "left", ValueError, "align is 'left'; it must be 'top_left' or 'bottom_right'"),
        ("layout", ("b", "h"), TypeError, "layout is "),
        ("layout", "bhds", ValueError, "layout is 'bhds'; it must be 'bhsd' or 'bshd'"),
        ("layout", "bshd\0", ValueError, r"layout is 'bshd.x00'; it must be a name"),
        ("kernel", "\udc80", ValueError, r"kernel is '.udc80'; it must be a name"),
        ("softmax_scale", "1", TypeError, "softmax_scale is '1'; it must be a number or None"),
        ("softmax_scale", True, TypeError, "softmax_scale is True"),
        ("softmax_scale", 1j, TypeError, "softmax_scale is 1j"),
        ("softmax_scale", float("nan"), ValueError, "softmax_scale is nan; it must be finite"),
        ("softmax_scale", 1e300, ValueError, r"softmax_scale is 1e\+300; it must be finite"),
        ("softmax_scale", 10**400, ValueError, "softmax_scale is inf; it must be finite"),
        ("softcap", None, TypeError, "softcap is None; it must be a number"),
        ("softcap", -1.0, ValueError, "softcap is -1.0; it must be 0 .none. or between"),
        ("softcap", 1e-50, ValueError, "softcap is 1e-50; it must be 0 .none. or between"),
        ("softcap", 1e30, ValueError, r"softcap is 1e\+30; it must be 0 .none. or between"),
        ("softcap", float("inf"), ValueError, "softcap is inf"),
        ("window", 4, TypeError, r"window is 4; it must be a pair \(left, right\)"),
        ("window", (4,), ValueError, r"window is \(4,\); it must be a pair"),
        ("window", (1.5, 0), TypeError, r"window is \(1.5, 0\)"),
        ("window", (True, 0), TypeError, r"window is \(True, 0\)"),
        ("window", (-1, -3), ValueError, r"window is \(-1, -3\); its sides must be at least 0"),
    ],
)
def test_options(option, value, error, words):
    """FA-038: named, with the value and what it must be; by plan() too."""
    q, k, v = qkv(1, 1, 2, 2, 4)
    with pytest.raises(error, match=words):
        fa101.flash_attention(q, k, v, **{option: value})
    if option != "return_lse":
        with pytest.raises(error, match=words):
            fa101.plan(q, k, v, **{option: value})


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"causal": True}, {"causal": 1}),
        ({"softcap": 1.0}, {"softcap": True}),
        ({"softmax_scale": 1}, {"softmax_scale": True}),
        ({"window": (1, 0)}, {"window": (True, False)}),
    ],
)
def test_options_seen_before(right, wrong):
    """What is equal to an option that was right is not right for that."""
    q, k, v = qkv(1, 1, 2, 2, 4)
    for _ in range(2):
        fa101.flash_attention(q, k, v, **right)
        with pytest.raises(TypeError, match=f"{next(iter(wrong))} is"):
            fa101.flash_attention(q, k, v, **wrong)


class Unhashable(float):
    __hash__ = None


def test_options_need_not_be_hashable():
    q, k, v = qkv(1, 1, 3, 3, 4)
    expected = fa101.flash_attention(q, k, v, softmax_scale=0.25, window=(1, 0))
    out = fa101.flash_attention(q, k, v, softmax_scale=Unhashable(0.25), window=[1, 0])
    assert torch.equal(out, expected)
    with pytest.raises(TypeError, match=r"align is \[\]; it must be a string"):
        fa101.flash_attention(q, k, v, align=[])


def optional_arrays():
    """Name, array and what is wrong with it, for q of (2, 4, 3, 8) and k of (2, 2, 5, 8)."""
    full = torch.zeros(2, 4, 3, 5)
    true = torch.ones(2, 4, 3, 5, dtype=torch.bool)
    lengths = torch.tensor([5, 3], dtype=torch.int32)
    return [
        ("bias", full[:, :2], ValueError, r"bias has .* \(2, 2, 3, 5\); .* = \(2, 4, 3, 5\)"),
        ("bias", full[0, 0, 0], ValueError, r"shape \(5,\); it must have 2 to 4 axes"),
        ("bias", full[None], ValueError, "bias has 5 dimensions.*2 to 4 axes"),
        ("bias", torch.zeros((1,) * 40), ValueError, "bias has 40 dimensions.*2 to 4 axes"),
        ("mask", torch.ones((1,) * 12) > 0, ValueError, "mask has 12 dimensions.*2 to 4 axes"),
        ("bias", full.half(), TypeError, "bias has dtype float16; it must be float32 or the dtype"),
        ("bias", full.double(), TypeError, "bias has dtype float64"),
        ("bias", true, TypeError, "bias has dtype bool"),
        ("bias", full.numpy(), TypeError, "bias is a numpy.ndarray but q is a torch.Tensor"),
        ("bias", full.clone().requires_grad_(), RuntimeError, "bias requires grad"),
        ("bias", 1.0, TypeError, "bias is a builtins.float"),
        ("mask", full, TypeError, "mask has dtype float32; it must be bool.*is a bias"),
        ("mask", true.to(torch.uint8), TypeError, "mask has dtype uint8; it must be bool"),
        ("mask", true[..., :4], ValueError, r"mask has .*shape \(2, 4, 3, 4\)"),
        ("seqlens_k", lengths.long(), TypeError, "seqlens_k has dtype int64; it must be int32"),
        ("seqlens_k", lengths[:1], ValueError, r"seqlens_k has shape \(1,\); .* \(2,\)"),
        ("seqlens_k", lengths[None], ValueError, r"seqlens_k has shape \(1, 2\)"),
        ("seqlens_k", lengths.view((1,) * 30 + (2,)), ValueError, r"seqlens_k has shape"),
        ("seqlens_k", [5, 3], TypeError, "seqlens_k is a builtins.list"),
    ]


@pytest.mark.parametrize(("name", "array", "error", "words"), optional_arrays())
def test_optional_arrays(name, array, error, words):
    """What is wrong with bias, mask and seqlens_k is named, by plan() too."""
    q, k, v = qkv(2, 4, 3, 5, 8, heads_kv=2)
    for call in (fa101.flash_attention, fa101.plan):
        with pytest.raises(error, match=words):
            call(q, k, v, **{name: array})


def test_out_overlaps_optional_arrays():
    q, k, v = qkv(1, 1, 4, 8, 8)
    out = torch.empty_like(q)
    for bias in (out[..., :4].expand(1, 1, 4, 4), out[0, 0, :, :1]):
        with pytest.raises(ValueError, match="out overlaps bias in memory"):
            fa101.flash_attention(q, k[:, :, :4], v[:, :, :4], bias=bias, out=out)


@pytest.mark.parametrize(
    "option",
    [
        *("dropout_p", "window_size", "alibi_slopes", "block_table", "return_attn_probs"),
        *("attn_mask", "cache_seqlens", "is_causal", "casual"),
    ],
)
def test_absent_options(option):
    """FA-038: nothing is accepted and ignored."""
    q, k, v = qkv(1, 1, 2, 2, 4)
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'"):
        fa101.flash_attention(q, k, v, **{option: None})
    with pytest.raises(TypeError, match="positional argument"):
        fa101.flash_attention(q, k, v, True)


def test_kernel_of_the_other_device():
    """The error says which kernels would fit."""
    q, k, v = qkv(1, 1, 2, 2, 4)
    with pytest.raises(ValueError, match=r"'fa2' does not fit: it runs on CUDA.*'cpu_fa2'"):
        fa101.flash_attention(q, k, v, kernel="fa2")
    with pytest.raises(ValueError, match=r"fit: it runs on CUDA tensors; these fit: 'cpu_naive'"):
        fa101.flash_attention(q, k, v, kernel="sm90")


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (((2, 4, 5), (2, 4, 5), (2, 4, 5)), "q has 3 dimensions; it must have 4: .batch, heads"),
        (((), (), ()), "q has 0 dimensions"),
        (((1,) * 5, (1,) * 5, (1,) * 5), "q has 5 dimensions"),
        (((1, 1, 2, 4), (1, 2, 4), (1, 1, 2, 4)), "k has 3 dimensions"),
        (((1, 1, 2, 4), (1, 1, 2, 4), ()), "v has 0 dimensions"),
        (((2, 1, 2, 4), (1, 1, 2, 4), (2, 1, 2, 4)), "k has batch 1 but q has 2; they must be"),
        (((1, 1, 2, 4), (1, 1, 2, 5), (1, 1, 2, 4)), "k has head_dim 5 but q has 4"),
        (((1, 1, 2, 4), (1, 1, 3, 4), (1, 1, 2, 4)), "v has seqlen 2 but k has 3"),
        (((1, 1, 2, 0), (1, 1, 2, 0), (1, 1, 2, 4)), "q has head_dim 0; it must be at least 1"),
        (((1, 1, 2, 4), (1, 1, 2, 4), (1, 1, 2, 0)), "v has head_dim 0"),
    ],
)
@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_shapes(kind, shapes, words):
    make = torch.zeros if kind == "torch" else lambda s: np.zeros(s, np.float32)
    with pytest.raises(ValueError, match=words):
        fa101.flash_attention(*(make(s) for s in shapes), return_lse=True)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_layout_is_named(layout):
    with pytest.raises(ValueError, match=f"for layout {layout}"):
        fa101.flash_attention(*[torch.zeros(2, 3, 4)] * 3, layout=layout)


@pytest.mark.gpu
def test_mixed_devices():
    """FA-003: both arguments and both devices."""
    q, k, v = qkv(1, 1, 2, 2, 4)
    with pytest.raises(ValueError, match=r"k is on cuda:0 but q is on cpu"):
        fa101.flash_attention(q, k.cuda(), v)
    with pytest.raises(ValueError, match=r"v is on cpu but q is on cuda:0"):
        fa101.flash_attention(q.cuda(), k.cuda(), v)
    with pytest.raises(ValueError, match=r"out is on cpu but q is on cuda:0"):
        fa101.flash_attention(q.cuda(), k.cuda(), v.cuda(), out=q)


# ---- out= ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_out(device):
    """FA-075: filled, also as a view into a bigger buffer, neighbours untouched, returned as is."""
    q, k, v = qkv(2, 3, 17, 33, 24, head_dim_v=40, device=device)
    expected, expected_lse = fa101.flash_attention(q, k, v, causal=True, return_lse=True)
    buffer = torch.full((2, 19, 5, 48), torch.nan, device=device)
    out = buffer[:, 1:-1, 1:4, 3:43].transpose(1, 2)
    returned, lse = fa101.flash_attention(q, k, v, causal=True, return_lse=True, out=out)
    assert returned is out
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    out.fill_(torch.nan)
    assert buffer.isnan().all()


def test_out_numpy():
    q, k, v = (x.numpy() for x in qkv(2, 3, 17, 33, 24))
    buffer = np.full((2, 3, 17, 30), np.nan, np.float32)
    out = buffer[..., 2:26]
    assert fa101.flash_attention(q, k, v, out=out) is out
    assert_attention(out, q, k, v)
    out[...] = np.nan
    assert np.isnan(buffer).all()


def test_bad_out():
    """FA-075: refused by name, and the inputs stay as they were."""
    q, k, v = qkv(2, 3, 17, 17, 16)
    before = [x.clone() for x in (q, k, v)]
    joint = torch.zeros(2 * q.numel())
    overlapping = joint[q.numel() // 2 :][: q.numel()].view(q.shape)
    joint[: q.numel()] = q.flatten()
    q_in_joint = joint[: q.numel()].view(q.shape)
    refused = [
        (q.half(), TypeError, "out has dtype float16 but q has dtype float32"),
        (torch.empty(2, 3, 17, 15), ValueError, "out has head_dim 15 but v has 16"),
        (torch.empty(2, 3, 16, 16), ValueError, "out has seqlen 16 but q has 17"),
        (torch.empty(2, 2, 17, 16), ValueError, "out has heads 2 but q has 3"),
        (torch.empty(3, 17, 16), ValueError, "out has 3 dimensions"),
        (torch.empty(2, 3, 17, 32)[..., ::2], ValueError, "out has strides.*must be contiguous"),
        (torch.empty(1, 3, 17, 16).expand(2, -1, -1, -1), ValueError, "out .*share one address"),
        (q, ValueError, "out overlaps q in memory"),
        (k, ValueError, "out overlaps k in memory"),
        (v[:, :, :], ValueError, "out overlaps v in memory"),
    ]
    for out, error, words in refused:
        with pytest.raises(error, match=words):
            fa101.flash_attention(q, k, v, out=out)
    with pytest.raises(ValueError, match="out overlaps q"):
        fa101.flash_attention(q_in_joint, k, v, out=overlapping)
    for x, y in zip((q, k, v), before, strict=True):
        assert torch.equal(x, y)


# ---- plans ---------------------------------------------------------------------------------------


def test_plan_and_explain(capsys):
    q, k, v = qkv(1, 8, 64, 64, 64)
    plan = fa101.plan(q, k, v, causal=True)
    assert capsys.readouterr().out == ""
    assert plan.kernel == "cpu_fa2"
    assert plan.strategy == "split_q"
    assert plan.num_splits == 1
    assert plan.workspace_bytes >= 0
    assert plan.block_m > 0
    assert plan.packed_heads == 1
    assert plan.block_n > 0
    explained = fa101.explain(q, k, v, causal=True)
    text = capsys.readouterr().out
    assert text == str(explained) == str(plan)
    assert repr(explained) == "<fa101 Plan: cpu_fa2, split_q, 1 split(s)>"
    for word in ("cpu_fa2", "split_q", "tile", "splits", "workspace", "why", plan.reason):
        assert word in text
    assert "asked for by name" in str(fa101.plan(q, k, v, kernel="cpu_naive"))
    with pytest.raises(ValueError, match="out overlaps v"):
        fa101.explain(q, k, v, out=v, return_lse=True)


def test_plan_and_explain_with_kvcache(capsys):
    """Of an appending call over pages; nothing is written, and what is wrong is named."""
    q, new = torch.ones(2, 1, 4, 8), torch.ones(2, 1, 2, 8)
    cache = torch.zeros(6, 16, 2, 8)
    call = {
        "k": new, "v": new, "seqlens_k": torch.tensor([3, 31], dtype=torch.int32),
        "page_table": torch.tensor([[0, 1], [4, 5]], dtype=torch.int32),
    }  # fmt: skip
    plan = fa101.plan_with_kvcache(q, cache, cache.clone(), **call)
    assert capsys.readouterr().out == ""
    assert not cache.any()
    explained = fa101.explain_with_kvcache(q, cache, cache.clone(), **call)
    text = capsys.readouterr().out
    assert text == str(explained) == str(plan)
    for words in ("seqlen 1 x 32", "heads 4 (2 for k and v)", "seqlens_k, pages of 16", "cpu_fa2",
                  "\nappend     before the attention\n"):  # fmt: skip
        assert words in text
    assert "append" not in str(fa101.plan_with_kvcache(q, cache[:2], cache[2:4]))
    rotary = (torch.ones(32, 4), torch.zeros(32, 4), False)
    assert fa101.plan_with_kvcache(q, cache, cache.clone(), **call, rotary=rotary)
    answer = {"out": torch.zeros_like(q), "return_lse": True}
    again = fa101.explain_with_kvcache(q, cache, cache.clone(), **call, **answer)
    assert str(again) == text
    assert not answer["out"].any()
    for change, error, words in (
        ({"v": None}, ValueError, "k and v must both be there"),
        ({"seqlens_k": [3, 32]}, ValueError, "seqlens_k has 32; it must be from 0 to 31"),
        ({"num_splits": 0}, ValueError, "num_splits is 0"),
        ({"out": torch.zeros(2, 1, 4, 6)}, ValueError, "out has head_dim 6"),
        ({"out": q}, ValueError, "out overlaps q"),
        ({"return_lse": 1}, TypeError, "return_lse is 1"),
    ):
        with pytest.raises(error, match=words):
            fa101.plan_with_kvcache(q, cache, cache.clone(), **{**call, **change})


def test_info():
    info = fa101.info()
    assert info["version"] == fa101.__version__
    assert info["cpu"]["simd"] in info["cpu"]["simd_built"]
    assert info["cpu"]["num_threads"] == fa101.get_num_threads()
    assert bool(info["gpus"]) != bool(info["no_gpu_because"])
    assert (info["cuda"] is None) == (not any(info["archs"].values()))


def test_module_prints_info():
    text = subprocess.run(
        [sys.executable, "-m", "fa101"], capture_output=True, text=True, check=True
    ).stdout
    info = fa101.info()
    words = [info["version"], info["cpu"]["name"], info["cpu"]["simd"], "CUDA", "CUTLASS"]
    for word in words:
        assert word in text
    assert (info["no_gpu_because"] or "cuda:0") in text
    runs = dict(line.split()[:2] for line in text.splitlines() if line.startswith("  "))
    assert list(runs) == [kernel["name"] for kernel in fa101.kernels()]
    for kernel in fa101.kernels():
        if kernel["device"] == "cpu":
            assert runs[kernel["name"]] == "CPU"
        elif not info["gpus"]:
            assert runs[kernel["name"]] in ("not", "no")  # built; GPU


def test_module_ignores_no_argument():
    done = subprocess.run(
        [sys.executable, "-m", "fa101", "--nope"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "--nope" in done.stderr


@pytest.mark.parametrize(
    ("archs", "gpus", "where"),
    [
        ([], [], "not built"),
        (["80"], [], "no GPU"),
        (["80"], [["fa2"], ["fa2", "sm90"]], "GPU"),
        (["80"], [["sm90"], ["fa2", "sm90"]], "cuda:1"),
        (["80"], [["sm90"]], "other GPU"),
    ],
)
def test_module_says_what_runs_a_kernel(archs, gpus, where, monkeypatch):
    gpu = {"name": "X", "arch": 90, "sms": 132, "memory_bytes": 1 << 37}
    info = {**fa101.info(), "gpus": [{**gpu, "kernels": names} for names in gpus]}
    info["archs"] = {"fa2": archs}
    monkeypatch.setattr(fa101, "info", lambda: info)
    line = next(line for line in __main__.lines() if line.startswith("  fa2 "))
    assert line[13:23].strip() == where
