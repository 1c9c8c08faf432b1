"""Whatever hypothesis thinks of: shapes, strides, dtypes, layouts, head groups, masks."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from fa101.testing import assert_attention
from helpers import HALF, answers, attend, device_of, kernel_params, wider

sizes = st.one_of(st.integers(0, 5), st.integers(0, 140), st.sampled_from([16, 32, 64, 128, 129]))


@st.composite
def problems(draw, kernel):
    """q, k, v under arbitrary dense or padded strides, and options."""
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    if not answers(kernel, dtype, 8):
        dtype = torch.float16
    step = 8 if kernel.startswith("sm90") else 1
    limit = 64 if dtype in HALF else 72
    head_dim = draw(st.integers(1, limit // step)) * step
    head_dim_v = draw(st.one_of(st.just(head_dim), st.integers(1, limit // step).map(step.__mul__)))
    head_dim, head_dim_v = wider(kernel, head_dim), wider(kernel, head_dim_v)
    batch, heads_kv, group = draw(
        st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(1, 4))
    )
    seqlen_q, seqlen_k = draw(sizes), draw(sizes)
    layout = draw(st.sampled_from(["bhsd", "bshd"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = draw(st.sampled_from([0.1, 1.0, 4.0]))

    def make(heads, seqlen, dim):
        shape = [batch, heads, seqlen, dim] if layout == "bhsd" else [batch, seqlen, heads, dim]
        order = draw(st.permutations([0, 1, 2]))
        padding = draw(st.lists(st.integers(0, 3), min_size=4, max_size=4))
        steps = [*draw(st.lists(st.integers(1, 2), min_size=3, max_size=3)), 1]
        backing = [shape[i] * steps[i] + padding[i] for i in [*order, 3]]
        memory = torch.full(backing, torch.nan, dtype=dtype)
        where = [
            slice(padding[i] // 2, padding[i] // 2 + shape[i] * steps[i], steps[i])
            for i in [*order, 3]
        ]
        view = memory[tuple(where)].permute(*np.argsort(order).tolist(), 3)
        if draw(st.booleans()) and batch > 0:
            view = view[:1].expand(batch, -1, -1, -1)  # one batch entry seen many times
            view[0].copy_(torch.from_numpy(size * rng.standard_normal(shape[1:])))
        else:
            view.copy_(torch.from_numpy(size * rng.standard_normal(shape)))
        return memory, view

    def to_device(memory, view):
        device = device_of(kernel)
        moved = memory.to(device)
        return moved.as_strided(view.shape, view.stride(), view.storage_offset())

    tensors = [
        to_device(*make(heads_kv * group, seqlen_q, head_dim)),
        to_device(*make(heads_kv, seqlen_k, head_dim)),
        to_device(*make(heads_kv, seqlen_k, head_dim_v)),
    ]
    options = {
        "causal": draw(st.booleans()),
        "align": draw(st.sampled_from(["top_left", "bottom_right"])),
        "softmax_scale": draw(st.sampled_from([None, None, 0.0, -0.5, 0.01, 1.5])),
        "layout": layout,
    }
    return tensors, options


@pytest.mark.parametrize("kernel", kernel_params())
def test_any_problem(kernel):
    @settings(
        max_examples=60,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(problems(kernel))
    def check(problem):
        tensors, options = problem
        before = [x.clone() for x in tensors]
        try:
            out, lse = attend(*tensors, kernel=kernel, **options)
        except pytest.skip.Exception:
            reject()
        assert_attention(out, *tensors, lse=lse, **options)
        assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))

    check()
