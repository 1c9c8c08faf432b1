"""Inputs, kernels and calls that the tests share."""

import contextlib
import os
import re
import subprocess
import sys

import pytest
import torch

import fa101

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HALF = {torch.float16, torch.bfloat16}
TENSOR_CORES = {"fa2_cute", "sm90"}


def variants(device=None):
    """Every kernel by each of its strategies: "fa2_cute" (split_q), "fa2_cute:split_kv", ..."""
    return [
        k["name"] if strategy == "split_q" else f"{k['name']}:{strategy}"
        for k in fa101.kernels()
        if device in (None, k["device"])
        for strategy in k["strategies"]
    ]


def on(variant):
    """The options of a call that runs it."""
    kernel, _, strategy = variant.partition(":")
    return {"kernel": kernel, "strategy": strategy or ("auto" if kernel == "auto" else "split_q")}


def kernel_params(device=None):
    """Every variant (of a device), the GPU's marked."""
    return [
        pytest.param(v, marks=pytest.mark.gpu if device_of(v) == "cuda" else ())
        for v in variants(device)
    ]


def device_of(variant):
    return next(k["device"] for k in fa101.kernels() if k["name"] == on(variant)["kernel"])


def dtype_of(variant):
    return torch.float16 if on(variant)["kernel"] in TENSOR_CORES else torch.float32


def wider(variant, head_dim):
    """Tests speak of small head_dims; split_d takes what is 256 wider."""
    return head_dim + 256 if variant.endswith(":split_d") else head_dim


def answers(variant, dtype, head_dim):
    """What docs/support.md promises for wider(variant, head_dim)."""
    kernel = on(variant)["kernel"]
    head_dim = wider(variant, head_dim)
    if kernel in TENSOR_CORES:
        limit = 1024 if ":split_d" in variant else 256
        if dtype not in HALF and kernel != "fa2_cute":
            return False
        return head_dim <= limit and (kernel != "sm90" or head_dim % 8 == 0)
    limits = {"naive": 1024, "fa1": 256, "fa2": 256}  # the CPU kernels have none
    return head_dim <= limits.get(kernel, head_dim)


def has_extras(variant, *names):
    """Whether it takes those of window, softcap, bias, mask and seqlens_k; none named: all."""
    if variant == "sm90":
        return bool(names) and {"window", "softcap"}.issuperset(names)
    return on(variant)["kernel"] not in ("fa1", "fa2", "sm90")


def qkv(
    batch=2,
    heads=4,
    seqlen_q=17,
    seqlen_k=None,
    head_dim=16,
    *,
    heads_kv=None,
    head_dim_v=None,
    dtype=None,
    device="cpu",
    kernel="auto",
    layout="bhsd",
    seed=0,
):
    """Normal (not all positive) q, k and v, where and as `kernel`, a variant, takes them.

    k and v default to the shape of q, dtype to float32 where the kernel has it.
    """
    if kernel != "auto":
        device = device_of(kernel)
    if dtype is None:
        dtype = dtype_of(kernel)
    generator = torch.Generator().manual_seed(seed)
    heads_kv = heads if heads_kv is None else heads_kv
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    head_dim, head_dim_v = wider(kernel, head_dim), wider(kernel, head_dim_v)

    def make(h, s, d):
        shape = (batch, h, s, d) if layout == "bhsd" else (batch, s, h, d)
        return torch.randn(shape, generator=generator).to(device, dtype)

    q = make(heads, seqlen_q, head_dim)
    return q, make(heads_kv, seqlen_k, head_dim), make(heads_kv, seqlen_k, head_dim_v)


# How far a row that a kernel redoes carefully may be from the same row done fast: the redo sums in
# another order and, on tensor cores, without rounding the weights to 16 bits.
REDONE = {
    torch.float32: {"rtol": 1e-3, "atol": 2e-5},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}


@contextlib.contextmanager
def poisoned_memory():
    """What torch allocates inside is full of NaN (bytes: of ones): nothing unwritten hides."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def attend(q, k, v, **options):
    """(out, lse), from poisoned outputs and workspace.

    Skips what the README's table leaves to other kernels: strides that TMA cannot address.
    """
    variant = options.pop("kernel", "auto")
    with poisoned_memory():
        try:
            return fa101.flash_attention(q, k, v, return_lse=True, **on(variant), **options)
        except ValueError as error:
            if variant.startswith("sm90") and re.search("TMA|16 bytes", str(error)):
                pytest.skip(str(error))
            raise


def bits(x):
    """Comparable with ==, NaN included."""
    dtypes = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    return x.contiguous().view(dtypes[x.element_size()])


def run_python(code, *, quiet=False, **env):
    """Runs code in a fresh interpreter; gives its stdout. Quiet: stderr must stay empty."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert not quiet or done.stderr == ""
    return done.stdout
