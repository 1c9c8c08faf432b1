"""CUDA streams, graphs, devices, allocators; CuPy and JAX on a GPU. All need one."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import fa101
from fa101.testing import assert_attention
from helpers import attend, bits, kernel_params, on, qkv, run_python, variants

pytestmark = pytest.mark.gpu

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

SLEEP = 20_000_000  # clock cycles: some 10 ms


@pytest.mark.parametrize("kernel", kernel_params("cuda"))
def test_side_stream(kernel):
    """FA-006: inputs filled on a stream behind a sleep; nothing runs ahead, nothing waits."""
    stream = torch.cuda.Stream()
    fresh = [qkv(2, 4, 130, 257, 64, heads_kv=2, kernel=kernel, seed=i) for i in range(8)]
    expected = [attend(*x, causal=True, kernel=kernel) for x in fresh]
    q, k, v = (torch.full_like(x, torch.nan) for x in fresh[0])
    torch.cuda.synchronize()
    for i in range(40):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP)
            for x, y in zip((q, k, v), fresh[i % 8], strict=True):
                x.copy_(y)
            out, lse = fa101.flash_attention(q, k, v, causal=True, **on(kernel), return_lse=True)
            done = stream.record_event()
            assert not done.query()  # the call came back before the sleep was over
        done.synchronize()
        assert torch.equal(out, expected[i % 8][0])
        assert torch.equal(lse, expected[i % 8][1])


@pytest.mark.parametrize("kernel", kernel_params("cuda"))
def test_busy_default_stream(kernel):
    """FA-006: a side stream does not wait for the default stream."""
    q, k, v = qkv(2, 4, 64, 64, 64, kernel=kernel)
    expected = fa101.flash_attention(q, k, v, **on(kernel))
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(20 * SLEEP)
    with torch.cuda.stream(stream):
        out = fa101.flash_attention(q, k, v, **on(kernel))
    stream.synchronize()
    assert not torch.cuda.default_stream().query()
    assert torch.equal(out, expected)
    torch.cuda.synchronize()


@pytest.mark.parametrize("kernel", kernel_params("cuda"))
def test_everything_is_on_the_stream(kernel):
    """FA-006: every kernel, copy and memset of a call, as the profiler saw them."""
    q, k, v = qkv(2, 4, 130, 257, 64, kernel=kernel)
    strided = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile, torch.cuda.stream(stream):
        torch.cuda._sleep(1000)
        fa101.flash_attention(*strided, **on(kernel), return_lse=True)
        torch.cuda.synchronize()
    events = [e for e in profile.profiler.kineto_results.events() if "CUDA" in str(e.device_type())]
    kernels = [e for e in events if "ync" not in e.name()]
    assert len(kernels) >= 5  # the sleep, three copies, attention
    assert len({e.device_resource_id() for e in kernels}) == 1


def test_hidden_copy_is_ordered():
    """FA-002: q must be copied; blocks of its size come and go on the stream meanwhile."""
    stream = torch.cuda.Stream()
    q, k, v = qkv(2, 4, 64, 64, 64, dtype=torch.float16, device="cuda")
    expected = fa101.flash_attention(q, k, v)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(500):
            transposed = q.transpose(2, 3).contiguous().transpose(2, 3)
            noise = torch.full_like(q, torch.nan)
            del noise
            out = fa101.flash_attention(transposed, k, v)
            del transposed
            noise = torch.full_like(q, torch.nan)
            assert bits(out).shape == q.shape
            last = out
    stream.synchronize()
    assert torch.equal(last, expected)
    assert noise.isnan().all()


# ---- graphs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
@pytest.mark.parametrize("kernel", kernel_params("cuda"))
def test_graph(kernel, mode):
    """FA-028: replays follow new values; the outputs are poisoned between replays."""
    fresh = [qkv(2, 4, 130, 257, 64, heads_kv=2, kernel=kernel, seed=i) for i in range(10)]
    expected = [attend(*x, causal=True, kernel=kernel) for x in fresh]
    q, k, v = (x.clone() for x in fresh[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        out, lse = fa101.flash_attention(q, k, v, causal=True, **on(kernel), return_lse=True)
    for values, (want, want_lse) in zip(fresh, expected, strict=True):
        for x, y in zip((q, k, v), values, strict=True):
            x.copy_(y)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, want)
        assert torch.equal(lse, want_lse)


def test_graph_as_the_very_first_call():
    """FA-028: capturing needs no warm-up of ours."""
    run_python(
        """
import torch, fa101
calls = [
    {"kernel": k["name"], "strategy": strategy}
    for k in fa101.kernels() if k["device"] == "cuda" for strategy in k["strategies"]
]
q = torch.randn(1, 2, 64, 320, device="cuda", dtype=torch.float16)
tensors = [q if call["strategy"] == "split_d" else q[..., :64] for call in calls]
cache = torch.randn(2, 64, 2, 64, device="cuda", dtype=torch.float16)
new = torch.randn(2, 1, 2, 64, device="cuda", dtype=torch.float16)
lengths = torch.tensor([5, 63], dtype=torch.int32, device="cuda")
decode = {"k": new, "v": new, "seqlens_k": lengths}
caches = [cache.clone() for _ in "kv"]
outs = []
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    for q, call in zip(tensors, calls):
        outs.append(fa101.flash_attention(q, q, q, **call))
    decoded = fa101.flash_attention_with_kvcache(new, *caches, **decode)
graph.replay()
for q, call, out in zip(tensors, calls, outs):
    assert torch.equal(out, fa101.flash_attention(q, q, q, **call)), call
caches = [cache.clone() for _ in "kv"]
assert torch.equal(decoded, fa101.flash_attention_with_kvcache(new, *caches, **decode))
"""
    )


# ---- devices -------------------------------------------------------------------------------------


@two_gpus
def test_another_gpu_than_the_current():
    """FA-003: right, and the current device unchanged, also after an error; alternating too."""
    run_python(
        """
import torch, fa101
tensors = [torch.randn(1, 2, 64, 64, device="cuda:1") for _ in range(3)]
out = fa101.flash_attention(*tensors)
assert out.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
expected = torch.nn.functional.scaled_dot_product_attention(*tensors)
torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
assert torch.cuda.memory_allocated(0) == 0
for kernel in [k["name"] for k in fa101.kernels() if k["device"] == "cuda"]:
    for device in ("cuda:0", "cuda:1", "cuda:0", "cuda:1"):
        moved = [x.to(device).half() for x in tensors]
        out = fa101.flash_attention(*moved, kernel=kernel)
        torch.testing.assert_close(out.float(), expected.to(device), atol=4e-3, rtol=4e-3)
        try:
            fa101.flash_attention(moved[0], moved[1][:, :1, :2], moved[2])
            raise SystemExit("no error")
        except ValueError:
            pass
        assert torch.cuda.current_device() == 0
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device), torch.cuda.graph(graph):
            fa101.flash_attention(*moved, kernel=kernel)
"""
    )


@two_gpus
def test_cache_on_another_gpu_than_the_current():
    """FA-003: new keys, pages and split keys, as on the current one."""
    outs = []
    for device in ("cuda:0", "cuda:1"):
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(2, 1, 4, 64, generator=generator).to(device).half() for _ in "qkv")
        caches = [torch.randn(128, 16, 4, 64, generator=generator).to(device).half() for _ in "kv"]
        options = {"k": k, "v": v, "num_splits": 4}
        options["seqlens_k"] = torch.tensor([1000, 3], dtype=torch.int32, device=device)
        options["page_table"] = torch.arange(128, dtype=torch.int32, device=device).view(2, 64)
        outs.append(fa101.flash_attention_with_kvcache(q, *caches, **options))
        assert outs[-1].device == torch.device(device)
        assert torch.cuda.current_device() == 0
        for cache, x in zip(caches, (k, v), strict=True):
            assert torch.equal(cache[1000 // 16, 1000 % 16], x[0, 0])
    assert torch.equal(outs[0].cpu(), outs[1].cpu())


@two_gpus
def test_two_gpus_in_one_call():
    q, k, v = qkv(1, 1, 2, 2, 8, device="cuda:0")
    with pytest.raises(ValueError, match=r"k is on cuda:1 but q is on cuda:0"):
        fa101.flash_attention(q, k.to("cuda:1"), v)


def test_threads_with_different_shared_memory():
    """FA-048: 8 threads, sizes alternating, 1000 calls, on every GPU there is."""
    problems = []
    for device in range(torch.cuda.device_count()):
        for head_dim in (64, 256):
            for kernel in variants("cuda"):
                half = qkv(1, 2, 65, 65, head_dim, dtype=torch.float16, kernel=kernel)
                q, k, v = (x.to(f"cuda:{device}") for x in half)
                expected = fa101.flash_attention(q, k, v, **on(kernel))
                problems.append((q, k, v, kernel, expected))
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)

    def work(thread):
        with torch.cuda.stream(torch.cuda.Stream(problems[0][0].device)):
            for i in range(125):
                q, k, v, kernel, expected = problems[(thread + i) % len(problems)]
                if not torch.equal(fa101.flash_attention(q, k, v, **on(kernel)), expected):
                    return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_host_does_not_wait_with_the_gil():
    """A second Python thread runs while calls queue up behind a sleep."""
    q, k, v = qkv(1, 2, 64, 64, 64, device="cuda")
    fa101.flash_attention(q, k, v)
    torch.cuda.synchronize()
    counted = threading.Event()
    threading.Thread(target=counted.set).start()
    torch.cuda._sleep(10 * SLEEP)
    for _ in range(20):
        out = fa101.flash_attention(q, k, v)
    assert not torch.cuda.current_stream().query()
    assert counted.wait(1)
    assert_attention(out, q, k, v)


# ---- memory --------------------------------------------------------------------------------------


def test_memory_is_linear_and_comes_back():
    """FA-067: extra memory grows with S, not S^2, and not with the query heads; none is left."""
    for kernel in variants("cuda"):
        extra = []
        for seqlen in (1024, 2048, 4096, 8192):
            shape = (1, 16, seqlen, seqlen, 64)
            q, k, v = qkv(*shape, heads_kv=2, dtype=torch.float16, kernel=kernel)
            out = torch.empty_like(q)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            fa101.flash_attention(q, k, v, **on(kernel), out=out)
            extra.append(torch.cuda.max_memory_allocated() - before)
            assert extra[-1] >= fa101.plan(q, k, v, **on(kernel)).workspace_bytes
            assert torch.cuda.memory_allocated() == before
            if kernel == "naive" and seqlen == 2048:
                break  # the S x S matrix is its lesson
        if kernel != "naive":
            assert extra[-1] <= 10 * max(extra[0], 4096)


def test_many_calls_leave_nothing():
    """FA-058, FA-067: 3000 calls, half of them refused."""
    q, k, v = qkv(1, 4, 64, 4096, 64, dtype=torch.float16, device="cuda")

    def calls(n):
        for _ in range(n):
            fa101.flash_attention(q, k, v)
            with pytest.raises(ValueError, match="v has seqlen"):
                fa101.flash_attention(q, k, v[:, :, 1:])

    calls(10)
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    calls(1500)
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


# ---- CuPy and JAX --------------------------------------------------------------------------------


def to_cupy(*tensors):
    cupy = pytest.importorskip("cupy")
    return [cupy.from_dlpack(x) for x in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_cupy(dtype):
    """CuPy in, CuPy out, dense in the axis order of q; out= and lse too."""
    cupy = pytest.importorskip("cupy")
    tensors = qkv(2, 4, 33, 65, 24, heads_kv=2, head_dim_v=40, dtype=dtype, device="cuda")
    expected, expected_lse = attend(*tensors, causal=True)
    q, k, v = to_cupy(*tensors)
    out, lse = fa101.flash_attention(q, k, v, causal=True, return_lse=True)
    assert isinstance(out, cupy.ndarray)
    assert isinstance(lse, cupy.ndarray)
    assert out.dtype == q.dtype
    assert out.flags.c_contiguous
    assert torch.equal(torch.from_dlpack(out), expected)
    assert torch.equal(torch.from_dlpack(lse), expected_lse)
    swapped = cupy.ascontiguousarray(q.swapaxes(1, 2)).swapaxes(1, 2)
    assert fa101.flash_attention(swapped, k, v).swapaxes(1, 2).flags.c_contiguous
    mirrored = cupy.ascontiguousarray(q[..., ::-1])[..., ::-1]
    target = cupy.empty_like(out)
    assert fa101.flash_attention(mirrored, k, v, causal=True, out=target) is target
    assert torch.equal(torch.from_dlpack(target), expected)
    with pytest.raises(TypeError, match="q has dtype float64"):
        fa101.flash_attention(cupy.zeros((1, 1, 2, 4)), k, v)
    with pytest.raises(TypeError, match=r"k is a torch.Tensor but q is a cupy.ndarray"):
        fa101.flash_attention(q, tensors[1], v)


def test_cupy_stream_and_graph():
    """FA-002, FA-006: CuPy's current stream, without an order with any other; capturable."""
    cupy = pytest.importorskip("cupy")
    tensors = qkv(2, 4, 64, 64, 64, device="cuda")
    expected = fa101.flash_attention(*tensors)
    torch.cuda.synchronize()
    q, k, v = (cupy.full(tuple(x.shape), cupy.nan, "float32") for x in tensors)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    code = """extern "C" __global__ void nap() {
        for (long long start = clock64(); clock64() - start < 40000000;) {}
    }"""
    nap = cupy.RawKernel(code, "nap")
    with stream:
        nap((1,), (1,), ())
        for x, y in zip((q, k, v), to_cupy(*tensors), strict=True):
            x[...] = y
        out = fa101.flash_attention(q, k, v)
        assert not stream.done
    stream.synchronize()
    assert torch.equal(torch.from_dlpack(out), expected)

    with stream:
        fa101.flash_attention(q, k, v, out=out)
        stream.synchronize()
        stream.begin_capture()
        fa101.flash_attention(q, k, v, out=out)
        graph = stream.end_capture()
        out[...] = cupy.nan
        graph.launch(stream)
        stream.synchronize()
    assert torch.equal(torch.from_dlpack(out), expected)


def test_jax():
    """JAX in, JAX out; fed by work that JAX has only enqueued, and read by more of it."""
    run_python(
        """
import os
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
import jax, numpy as np, fa101
from fa101.testing import assert_attention
assert jax.default_backend() == "gpu", jax.default_backend()
keys = jax.random.split(jax.random.key(0), 3)
for dtype in ("float32", "float16", "bfloat16"):
    for i in range(20):
        q, k, v = (jax.random.normal(key, (2, 4, 128, 64), dtype) * (1 + i / 20) for key in keys)
        out, lse = fa101.flash_attention(q, k, v, causal=True, return_lse=True)
        doubled = jax.jit(lambda x: x + x)(out)
        del out
        noise = [jax.numpy.full(q.shape, np.nan, dtype) for _ in range(4)]
        assert doubled.devices() == q.devices() and doubled.dtype == dtype
        if i % 10 == 0:
            assert_attention(doubled / 2, q, k, v, lse=lse, causal=True)
    fa101.flash_attention(q, k, v, kernel="fa1")
del q, k, v, lse, doubled, noise
"""
    )
