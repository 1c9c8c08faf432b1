"""Arrays of every kind: what comes in, what comes back, what is refused, who owns what."""

import ctypes
import resource

import ml_dtypes
import numpy as np
import pytest
import torch

import fa101
from fa101 import _fa101
from fa101._frameworks import framework_of
from fa101.testing import assert_attention, to_float64
from helpers import DEVICES, on, qkv, run_python

FORWARD = {
    "bias": None,
    "mask": None,
    "seqlens_k": None,
    "options": _fa101.Options(),
    "stream": 0,
    "allocate": lambda nbytes: np.empty(nbytes, np.uint8),
    "num_threads": 0,
}


def raw(q, k, v, out=None, lse=None):
    """The compiled function itself."""
    out = torch.full(q.shape, torch.nan) if out is None else out
    _fa101.forward(q, k, v, out, lse, **FORWARD)
    return out


def as_numpy(*tensors):
    return [x.detach().numpy() for x in tensors]


# ---- kinds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_numpy(dtype):
    """NumPy in, NumPy out; bfloat16 is ml_dtypes' (FA-020)."""
    q, k, v = (x.astype(dtype) for x in as_numpy(*qkv(2, 4, 9, 11, 16, heads_kv=2)))
    out, lse = fa101.flash_attention(q, k, v, causal=True, return_lse=True)
    assert type(out) is type(lse) is np.ndarray
    assert out.dtype == dtype
    assert_attention(out, q, k, v, lse=lse, causal=True)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_jax(dtype):
    """JAX in, JAX out, on the same device."""
    jax = pytest.importorskip("jax")
    q, k, v = (jax.numpy.asarray(x.numpy(), dtype) for x in qkv(2, 4, 9, 11, 16, heads_kv=2))
    out, lse = fa101.flash_attention(q, k, v, causal=True, return_lse=True)
    assert isinstance(out, jax.Array)
    assert isinstance(lse, jax.Array)
    assert out.devices() == q.devices()
    assert out.dtype == dtype
    assert_attention(out, q, k, v, lse=lse, causal=True)
    assert float((out + 1).astype("float32").mean()) == pytest.approx(
        float(to_float64(out).mean()) + 1, abs=0.02
    )


def test_jax_tracers_are_refused():
    """JAX is eager only: inside jit, grad and vmap there is nothing to compute with."""
    jax = pytest.importorskip("jax")
    q = jax.numpy.ones((1, 1, 2, 4))
    for transformed in (
        jax.jit(lambda q: fa101.flash_attention(q, q, q)),
        jax.grad(lambda q: fa101.flash_attention(q, q, q).sum()),
        jax.vmap(lambda q: fa101.flash_attention(q, q, q)),
    ):
        with pytest.raises(TypeError, match="q is a JAX tracer"):
            transformed(q)


def test_torch_kinds():
    """Parameters and other subclasses, views, inference mode."""
    q, k, v = qkv(1, 2, 5, 7, 8)
    expected = fa101.flash_attention(q, k, v)
    assert type(expected) is torch.Tensor

    class Named(torch.Tensor):
        pass

    assert torch.equal(fa101.flash_attention(q.as_subclass(Named), k, v), expected)
    with torch.inference_mode():
        assert torch.equal(fa101.flash_attention(q.clone(), k, v), expected)
    with torch.no_grad():
        parameter = torch.nn.Parameter(q)
        assert torch.equal(fa101.flash_attention(parameter, k, v), expected)


def test_negative_bit():
    """A view that negates when read: memory and values differ in sign."""
    q, k, v = qkv(1, 2, 5, 7, 8)
    negated = torch.complex(torch.zeros_like(q), -q).conj().imag
    assert negated.is_neg()
    assert torch.equal(negated, q)
    contiguous = torch._neg_view(-q)
    assert contiguous.is_neg()
    expected = fa101.flash_attention(q, k, v)
    assert torch.equal(fa101.flash_attention(negated, k, v), expected)
    assert torch.equal(fa101.flash_attention(contiguous, k, v), expected)
    with pytest.raises(ValueError, match="out is a negated view"):
        fa101.flash_attention(q, k, v, out=contiguous)


@pytest.mark.parametrize("odd", ["list", "None", "scalar", "string"])
def test_no_array(odd):
    value = {"list": [[[[1.0]]]], "None": None, "scalar": 1.0, "string": "q"}[odd]
    q, _, v = qkv(1, 1, 2, 2, 4)
    with pytest.raises(TypeError, match=rf"k is a builtins\.{type(value).__name__}; it must be a"):
        fa101.flash_attention(q, value, v)


def test_mixed_kinds():
    q, k, v = qkv(1, 1, 2, 2, 4)
    with pytest.raises(TypeError, match=r"v is a numpy.ndarray but q is a torch.Tensor"):
        fa101.flash_attention(q, k, v.numpy())
    with pytest.raises(TypeError, match=r"out is a numpy.ndarray but q is a torch.Tensor"):
        fa101.flash_attention(q, k, v, out=q.numpy())


def test_masked_array():
    """NumPy's masked arrays: the mask would be ignored."""
    q = np.ma.masked_array(np.ones((1, 1, 2, 4), np.float32), mask=True)
    with pytest.raises(TypeError, match="q is a masked array"):
        fa101.flash_attention(q, q, q)


# ---- dtypes --------------------------------------------------------------------------------------

REFUSED = ["float64", "int64", "int8", "uint8", "bool", "complex64", ">f4", "object"]


@pytest.mark.parametrize("dtype", [*REFUSED, "float8_e4m3fn"])
def test_numpy_dtypes_refused(dtype):
    """FA-020, FA-083: TypeError naming the argument and the dtypes; never a quiet cast."""
    q = np.ones((1, 1, 2, 4), np.float32)
    odd = np.ones((1, 1, 2, 4)).astype(dtype)
    for name, arguments in [("q", (odd, odd, odd)), ("v", (q, q, odd))]:
        with pytest.raises(TypeError, match=rf"^{name} .*float32, float16 or bfloat16"):
            fa101.flash_attention(*arguments)
    with pytest.raises(TypeError, match=r"^q .*float32, float16 or bfloat16"):
        raw(odd, odd, odd)
    with pytest.raises(TypeError, match=r"^out "):
        fa101.flash_attention(q, q, q, out=odd)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn],
    ids=str,
)
def test_torch_dtypes_refused(dtype):
    q = torch.ones(1, 1, 2, 4)
    odd = q.to(dtype)
    for name, arguments in [("q", (odd, odd, odd)), ("k", (q, odd, q))]:
        with pytest.raises(TypeError, match=rf"^{name} .*float32, float16 or bfloat16"):
            fa101.flash_attention(*arguments)
    with pytest.raises(TypeError, match=r"^q "):
        raw(odd, odd, odd)
    with pytest.raises(TypeError, match=r"^out "):
        fa101.flash_attention(q, q, q, out=odd)


def test_huge_float64_is_not_cast():
    """FA-020: 1e300 would become inf."""
    q = np.full((1, 1, 1, 8), 1e300)
    k = np.ones((1, 1, 1, 8), np.float32)
    with pytest.raises(TypeError, match="q has dtype float64"):
        fa101.flash_attention(q, k, k)


def test_mixed_dtypes():
    """FA-065: the odd argument and both dtypes."""
    q, k, v = qkv(1, 1, 2, 2, 4)
    with pytest.raises(TypeError, match=r"v has dtype bfloat16 but q has dtype float32"):
        fa101.flash_attention(q, k, v.bfloat16())
    with pytest.raises(TypeError, match=r"k has dtype bfloat16 but q has dtype float16"):
        fa101.flash_attention(q.half(), k.bfloat16(), v.half())


def test_autocast():
    """FA-065: inside autocast, its dtype; outside and where it is disabled, none of that."""
    q, k, v = qkv(1, 2, 9, 9, 16)
    cast = [x.bfloat16() for x in (q, k, v)]
    expected = fa101.flash_attention(*cast)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(fa101.flash_attention(q, k, cast[2]), expected)
        with torch.autocast("cpu", enabled=False):
            assert fa101.flash_attention(q, k, v).dtype == torch.float32
        with pytest.raises(TypeError, match="q has dtype torch.float64"):
            fa101.flash_attention(q.double(), k, v)


# ---- gradients and transforms --------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [torch.Tensor.requires_grad_, torch.nn.Parameter])
def test_requires_grad(wrap):
    """FA-001: never a silently lost gradient, by the public or the raw function."""
    tensors = qkv(2, 3, 17, 17, 16)
    for i, name in enumerate("qkv"):
        arguments = [x.clone() for x in tensors]
        arguments[i] = wrap(arguments[i])
        for call in (fa101.flash_attention, raw):
            with pytest.raises(RuntimeError, match=rf"{name} requires grad.*{name}\.detach\(\)"):
                call(*arguments)
            with torch.no_grad():
                assert_attention(call(*arguments), *tensors)
        transposed = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in arguments]
        with pytest.raises(RuntimeError, match=f"{name} requires grad"):
            fa101.flash_attention(*transposed)  # would be copied first
    out = torch.zeros_like(tensors[0], requires_grad=True)
    with pytest.raises(RuntimeError, match="out requires grad"):
        fa101.flash_attention(*tensors, out=out)


def test_out_counts_as_changed():
    """Autograd notices that a tensor it saved was overwritten by out=."""
    q, k, v = qkv(1, 1, 3, 3, 4)
    saved = torch.ones_like(q)
    loss = (torch.ones_like(q, requires_grad=True) * saved).sum()
    fa101.flash_attention(q, k, v, out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_torch_transforms_are_refused():
    """FA-081, FA-011: TypeErrors that name the argument; forward mode would lose a tangent."""
    from torch.autograd import forward_ad
    from torch.fx.experimental.proxy_tensor import make_fx

    q = torch.randn(2, 1, 3, 4)

    def f(q):
        return fa101.flash_attention(q, q, q)

    with pytest.raises(TypeError, match=r"q is inside a torch\.func transform"):
        torch.func.vmap(f)(q[None])
    with pytest.raises(TypeError, match=r"q is inside a torch\.func transform"):
        torch.func.grad(lambda q: f(q).sum())(q)
    with pytest.raises(TypeError, match=r"q is inside a torch\.func transform"):
        torch.func.jvp(f, (q,), (q,))
    # Those that wrap the result, too, though no argument is.
    for transform in (torch.func.grad, torch.func.functionalize):
        with pytest.raises(TypeError, match=r"q is inside a torch\.func transform"):
            transform(lambda x: (f(q) * x).sum())(torch.tensor(2.0))
    doubled = torch.func.vmap(lambda x: f(q) * x)(torch.tensor([1.0, 2.0]))
    assert torch.equal(doubled, torch.stack([f(q), 2 * f(q)]))
    with pytest.raises(TypeError, match="q is being traced"):
        make_fx(f)(q)
    with pytest.raises(TypeError, match="q is being traced"):
        torch.jit.trace(f, q)
    with (
        forward_ad.dual_level(),
        pytest.raises(RuntimeError, match="q has a forward-mode tangent"),
    ):
        f(forward_ad.make_dual(q, q))
    f(q)


@pytest.mark.filterwarnings("ignore")
def test_tensors_without_memory_are_refused():
    """FA-011: fake, meta, sparse, nested and quantized tensors, also by the raw function."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    dense = torch.randn(1, 2, 3, 4)
    fake = FakeTensorMode().from_tensor(dense)
    meta = dense.to("meta")
    nested = torch.nested.nested_tensor([torch.randn(2, 3, 4), torch.randn(2, 5, 4)])
    quantized = torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8)
    for odd in (fake, meta, dense.to_sparse(), nested, quantized):
        with pytest.raises(TypeError, match="^k "):
            fa101.flash_attention(dense, odd, dense)
        with pytest.raises(TypeError, match="^q "):
            raw(odd, odd, odd, dense.clone())
        with pytest.raises(TypeError, match="^out "):
            fa101.flash_attention(dense, dense, dense, out=odd)


def test_meta_tensors_are_refused_in_a_sentence():
    """By name, and without the stack that torch gives."""
    x = torch.randn(1, 2, 3, 4)
    meta, length = x.to("meta"), torch.ones(1, dtype=torch.int32, device="meta")
    words = "is on the meta device, which has no memory to compute with"
    for name, call in (
        ("q", lambda: fa101.flash_attention(meta, meta, meta)),
        ("bias", lambda: fa101.flash_attention(x, x, x, bias=meta[..., :3])),
        ("out", lambda: fa101.flash_attention(x, x, x, out=meta)),
        ("v", lambda: fa101.plan(x, x, meta)),
        ("k_cache", lambda: fa101.flash_attention_with_kvcache(x, meta, x)),
        ("seqlens_k", lambda: fa101.flash_attention_with_kvcache(x, x, x, seqlens_k=length)),
    ):
        with pytest.raises(TypeError, match=f"^{name} {words}$"):
            call()
    with pytest.raises(TypeError, match=r"^q cannot be read as a dense array: .*\Z"):
        raw(meta, meta, meta, x.clone())


@pytest.mark.filterwarnings("ignore")
def test_compiled_code_calls_it():
    """torch.compile breaks its graph around the call and computes the same."""
    q, k, v = qkv(1, 2, 9, 9, 16)
    compiled = torch.compile(
        lambda q, k, v: fa101.flash_attention(q * 2, k, v, causal=True) + 1, backend="eager"
    )
    expected = fa101.flash_attention(q * 2, k, v, causal=True) + 1
    assert torch.equal(compiled(q, k, v), expected)


# ---- read-only and out= --------------------------------------------------------------------------


def read_only_arrays(tmp_path):
    x = np.random.default_rng(0).standard_normal((2, 2, 5, 8), np.float32)
    frozen = x.copy()
    frozen.flags.writeable = False
    path = tmp_path / "x.bin"
    x.tofile(path)
    mapped = np.memmap(path, np.float32, "r", shape=x.shape)
    broadcast = np.broadcast_to(x[:1], x.shape)
    return {"frozen": frozen, "mapped": mapped, "broadcast": broadcast}


def test_read_only(tmp_path):
    """FA-054: accepted as inputs and unchanged; refused as out."""
    for x in read_only_arrays(tmp_path).values():
        before = x.tobytes()
        out = fa101.flash_attention(x, x, x)
        assert_attention(out, x, x, x)
        assert x.tobytes() == before
        q = np.ones(x.shape, np.float32)
        with pytest.raises(ValueError, match="out is read-only"):
            fa101.flash_attention(q, q, q, out=x)
        with pytest.raises(ValueError, match="out is read-only"):
            raw(q, q, q, x)


def test_read_only_bfloat16():
    q = np.ones((1, 1, 2, 4), ml_dtypes.bfloat16)
    frozen = q.copy()
    frozen.flags.writeable = False
    assert (fa101.flash_attention(frozen, frozen, frozen) == 1).all()
    with pytest.raises(ValueError, match="out is read-only"):
        fa101.flash_attention(q, q, q, out=frozen)


def test_read_only_jax():
    jax = pytest.importorskip("jax")
    q = jax.numpy.ones((1, 1, 2, 4))
    with pytest.raises(ValueError, match="out is a JAX array, which is read-only"):
        fa101.flash_attention(q, q, q, out=q + 1)


# ---- ownership -----------------------------------------------------------------------------------


class DLManagedTensor(ctypes.Structure):
    """DLPack's unversioned struct, flattened."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class CountingExporter:
    """An array without a framework; counts how often its memory is given back."""

    def __init__(self, values):
        self.values = values
        self.exported = 0
        self.deleted = 0
        self.deleter = DELETER(self.count)
        self.shape = (ctypes.c_int64 * values.ndim)(*values.shape)

    def count(self, _):
        self.deleted += 1

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **_):
        self.exported += 1
        self.managed = DLManagedTensor(
            self.values.ctypes.data,
            1, 0, self.values.ndim, 2, 32, 1,
            ctypes.addressof(self.shape),
            None, 0, None,
            ctypes.cast(self.deleter, ctypes.c_void_p),
        )  # fmt: skip
        return new_capsule(ctypes.addressof(self.managed), b"dltensor", None)


def test_deleter_runs_once():
    """FA-058: once per capsule, also when the call is refused; strides may be absent."""
    values = as_numpy(*qkv(1, 2, 5, 5, 8))
    exporters = [CountingExporter(x) for x in values]
    out = np.empty_like(values[0])
    assert_attention(raw(*exporters, out), *values)
    for refused in (np.empty((1, 2, 5, 9), np.float32), values[0].astype(np.float64)):
        with pytest.raises((ValueError, TypeError)):
            raw(*exporters, refused)
    assert [e.deleted for e in exporters] == [e.exported for e in exporters] == [3, 3, 3]


def test_memory_stays_flat():
    """FA-058, FA-067: thousands of calls with 1 MB inputs, half of them refused, leave nothing."""
    jax = pytest.importorskip("jax")
    q = torch.randn(1, 1, 1, 64)
    k = torch.randn(1, 1, 4096, 64)
    sets = [
        (q, k, k[:, :, 1:]),
        [x.numpy() for x in (q, k, k[:, :, 1:])],
        [jax.numpy.asarray(x.numpy()) for x in (q, k, k[:, :, 1:])],
    ]

    def calls(n):
        for q, k, short in sets:
            for _ in range(n):
                fa101.flash_attention(q, k, k)
                with pytest.raises(ValueError, match="v has seqlen 4095"):
                    fa101.flash_attention(q, k, short)

    calls(50)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    calls(700)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 * 1024  # KiB


def test_results_survive_the_interpreter():
    """FA-091: results held by globals and threads at exit: exit code 0 and not a word."""
    run_python(
        """
import threading
import numpy as np, torch, fa101
q = torch.randn(1, 2, 33, 16)
kept = fa101.flash_attention(q, q, q)
exported = np.from_dlpack(kept)
view = torch.from_dlpack(fa101.flash_attention(exported, exported, exported))
bits = fa101._fa101.as_bfloat16(np.ones((1, 1, 2, 4), np.uint16))
del kept
def drop():
    global view
    del view
thread = threading.Thread(target=drop)
thread.start()
thread.join()
""",
        quiet=True,
    )


def test_torch_without_the_exchange_api():
    """Older torch has only __dlpack__, whose fallback would let requires_grad through."""
    run_python(
        """
import torch, fa101
del torch.Tensor.__dlpack_c_exchange_api__
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    q = torch.randn(1, 2, 5, 8).to(dtype)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    torch.testing.assert_close(fa101.flash_attention(q, q, q), theirs, atol=2e-2, rtol=0)
parameter = torch.nn.Parameter(q)
try:
    fa101.flash_attention(parameter, q, q)
    raise SystemExit("no error")
except RuntimeError as error:
    assert str(error).startswith("q requires grad"), error
with torch.no_grad():
    assert torch.equal(fa101.flash_attention(parameter, q, q), fa101.flash_attention(q, q, q))
try:
    fa101.flash_attention(q, q.to("meta"), q)
    raise SystemExit("no error")
except TypeError as error:
    assert str(error).startswith("k "), error
"""
    )


def test_as_bfloat16():
    """The binding's way to NumPy's bfloat16: the same memory under another name."""
    bits = np.array([0x3F80, 0x4000], np.uint16)
    view = torch.from_dlpack(_fa101.as_bfloat16(bits))
    assert view.tolist() == [1, 2]
    assert view.dtype == torch.bfloat16
    bits[0] = 0x4000
    assert view.tolist() == [2, 2]
    with pytest.raises(TypeError, match="bits has dtype int16"):
        _fa101.as_bfloat16(bits.view(np.int16))


def test_workspace_comes_from_the_caller():
    """Kernels that need workspace ask for it once, and for as much as the plan says."""
    asked = []

    def allocate(nbytes):
        asked.append(nbytes)
        return torch.full((nbytes,), 255, dtype=torch.uint8)

    q, k, v = qkv(1, 2, 33, 33, 16, dtype=torch.float16)
    for kernel in [k["name"] for k in fa101.kernels() if k["device"] == "cpu"]:
        asked.clear()
        needed = fa101.plan(q, k, v, **on(kernel)).workspace_bytes
        out = torch.full_like(q, torch.nan)
        options = {**FORWARD, "options": _fa101.Options(kernel=kernel), "allocate": allocate}
        _fa101.forward(q, k, v, out, None, **options)
        assert_attention(out, q, k, v)
        assert asked == ([needed + 255] if needed else [])
        if needed:
            with pytest.raises(ValueError, match=f"workspace is null.*{needed} bytes"):
                _fa101.forward(q, k, v, out, None, **{**options, "allocate": None})
            with pytest.raises(MemoryError):
                _fa101.forward(q, k, v, out, None, **{**options, "allocate": raise_memory_error})


def test_plans_are_kept_for_equal_calls_alone():
    """More shapes in turns than are kept; then the same shape asking something else."""
    shapes = [(1, heads, rows, rows, 8) for heads in (1, 2, 3, 4) for rows in (3, 33, 65)]
    calls = [qkv(*shape) for shape in shapes]
    for _ in range(2):
        for q, k, v in calls:
            assert_attention(fa101.flash_attention(q, k, v), q, k, v)
    q, k, v = calls[-1]
    lengths = torch.tensor([7], dtype=torch.int32)
    for options in ({"causal": True}, {"window": (2, 2)}, {"kernel": "cpu_naive"}, {}):
        assert_attention(fa101.flash_attention(q, k, v, **options), q, k, v, **{
            name: value for name, value in options.items() if name != "kernel"
        })  # fmt: skip
    shorter = fa101.flash_attention(q, k, v, seqlens_k=lengths)
    assert_attention(shorter, q, k[:, :, :7], v[:, :, :7])
    for _ in range(2):
        with pytest.raises(ValueError, match="kernel 'sm90' does not fit"):
            fa101.flash_attention(q, k, v, kernel="sm90")


def test_a_callback_may_call_again():
    """A plan is not lost while the allocator's own calls are planned."""
    q, k, v = qkv(1, 2, 33, 33, 16)

    def allocate(nbytes):
        for rows in range(1, 12):
            raw(*qkv(1, 1, rows, rows, 8))
        return np.empty(nbytes, np.uint8)

    out = torch.full_like(q, torch.nan)
    options = {"options": _fa101.Options(kernel="cpu_fa1"), "allocate": allocate}
    assert fa101.plan(q, k, v, kernel="cpu_fa1").workspace_bytes > 0
    _fa101.forward(q, k, v, out, None, **{**FORWARD, **options})
    assert_attention(out, q, k, v)


@pytest.fixture
def short_way():
    """Torch's, which answers or gives None."""
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this torch has no C exchange API")
    return framework_of("q", torch.empty(0)).short_way


@pytest.mark.parametrize("device", DEVICES)
def test_plain_tensors_take_the_short_way(device, short_way, monkeypatch):
    """With any options and whatever order of q's axes in memory; the long way says the same."""
    q, k, v = (x.to(device) for x in qkv(2, 4, 6, 6, 8, heads_kv=2))
    transposed = q.transpose(1, 2).contiguous().transpose(1, 2)
    more = {
        "bias": torch.randn(6, 6, device=device),
        "mask": torch.ones(6, 6, dtype=torch.bool, device=device).tril(),
        "seqlens_k": torch.tensor([3, 6], dtype=torch.int32, device=device),
    }
    cases = [
        ((q, k, v), {"causal": True}),
        ((transposed, k, v), {"return_lse": True}),
        ((transposed, k, v[..., :4].contiguous()), {}),
        ((q[:, :, ::2], k, v), {"window": (2, 0)}),
        ((q, k, v), more),
    ]

    def refuse(*arrays):
        raise AssertionError("the long way")

    def answers():
        found = [fa101.flash_attention(*arrays, **options) for arrays, options in cases]
        return [x for answer in found for x in (answer if isinstance(answer, tuple) else [answer])]

    framework = framework_of("q", q)
    with monkeypatch.context() as patch:
        patch.setattr(framework, "inputs", refuse)
        short = answers()
    monkeypatch.setattr(framework, "short_way", lambda *arguments: None)
    for found, expected in zip(short, answers(), strict=True):
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()


def test_what_is_not_plain_takes_the_long_way(short_way):
    q, k, v = qkv(1, 2, 5, 7, 8)
    options = _fa101.Options()

    def answer(q=q, k=k, v=v, bias=None, mask=None, seqlens_k=None, out=None):
        return short_way(q, k, v, bias, mask, seqlens_k, out, False, "bhsd", options)

    class Named(torch.Tensor):
        pass

    assert torch.equal(answer(), fa101.flash_attention(q, k, v))
    assert answer(q=q.as_subclass(Named)) is None
    assert answer(q=torch._neg_view(q)) is None
    assert answer(k=k.numpy()) is None
    assert answer(k=None) is None
    assert answer(k=k.double()) is None
    assert answer(v=v.transpose(2, 3).contiguous().transpose(2, 3)) is None
    assert answer(v=v.to_sparse()) is None
    assert answer(bias=torch.zeros(5, 7).double()) is None
    assert answer(mask=torch.ones(5, 7)) is None
    assert answer(seqlens_k=torch.tensor([7])) is None
    assert answer(out=torch._neg_view(torch.empty_like(q))) is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert answer() is None
    with torch.autograd.forward_ad.dual_level():
        assert answer() is None
    with torch.utils._python_dispatch.TorchDispatchMode():
        assert answer() is None
    torch.vmap(lambda x: [x, answer() is None and x][1])(q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_negated_views_take_the_long_way(short_way, dtype):
    """In every dtype, though torch's public functions negate no bfloat16 and no int32."""
    q, k, v = (x.to(dtype) for x in qkv(1, 2, 5, 7, 8))
    lengths = torch.tensor([4], dtype=torch.int32)
    expected = fa101.flash_attention(q, k, v, seqlens_k=lengths)
    for i in range(3):
        arrays = [torch._neg_view(-x) if i == j else x for j, x in enumerate((q, k, v))]
        assert short_way(*arrays, None, None, None, None, False, "bhsd", _fa101.Options()) is None
        assert torch.equal(fa101.flash_attention(*arrays, seqlens_k=lengths), expected)
    with pytest.raises(ValueError, match="out is a negated view"):
        fa101.flash_attention(q, k, v, out=torch._neg_view(torch.empty_like(q)))
    negated = torch._neg_view(-lengths)
    assert torch.equal(fa101.flash_attention(q, k, v, seqlens_k=negated), expected)


def test_written_tensors_count_it(short_way):
    """Autograd sees that `out` has changed; inference tensors keep no count."""
    q, k, v = qkv(1, 2, 5, 7, 8)
    out = torch.empty_like(q)
    before = out._version
    fa101.flash_attention(q, k, v, out=out)
    assert out._version == before + 1
    with torch.inference_mode():
        fa101.flash_attention(q, k, v, out=torch.empty_like(q))


def test_remember_tuples():
    """The same object or an equal one; not one with items of other types; not for another maker."""
    pair, kept = (1, 2), {}
    first = _fa101.remember(kept, lambda _: object(), pair)
    assert _fa101.remember(kept, lambda _: object(), pair) is first
    assert _fa101.remember(kept, lambda _: object(), tuple([1, 2])) is first  # noqa: C409
    assert _fa101.remember(kept, lambda _: object(), (True, 2)) is not first
    assert _fa101.remember({}, lambda _: object(), pair) is not first


def test_remember():
    """Equal and of one type is the same; who cannot be hashed is asked again; it does not grow."""
    kept, asked = {}, []

    def make(*arguments):
        asked.append(arguments)
        if arguments == ("wrong",):
            raise TypeError("that is wrong")
        return object()

    first = _fa101.remember(kept, make, 1, "a")
    assert _fa101.remember(kept, make, 1, "a") is first
    assert _fa101.remember(kept, make, True, "a") is not first
    assert _fa101.remember(kept, make, 1.0, "a") is not first
    assert len(kept) == len(asked) == 3
    for _ in range(2):
        _fa101.remember(kept, make, [])
        with pytest.raises(TypeError, match="that is wrong"):
            _fa101.remember(kept, make, "wrong")
    assert len(kept) == 3
    assert len(asked) == 7
    for number in range(1000):
        _fa101.remember(kept, make, number)
    assert 0 < len(kept) <= 256


def test_remember_while_remembering():
    """An argument may call again as it is dropped: each call keeps its own answer."""

    class Last:
        def __del__(self):
            inner.append(_fa101.remember(others, lambda _: object(), "inner"))

    others, inner = {}, []
    _fa101.remember({}, lambda _: object(), Last())
    for number in range(8):  # more than are kept at hand
        outer = _fa101.remember({}, lambda _: object(), number)
        if inner:
            break
    assert _fa101.remember(others, lambda _: object(), "inner") is inner[0]
    assert inner[0] is not outer


def test_kept_options_are_no_leak():
    """Nothing is printed when the process ends."""
    program = (
        "import torch, fa101; x = torch.ones(1, 1, 2, 4); fa101.flash_attention(x, x, x); "
        "fa101.plan(x, x, x)"
    )
    run_python(program, quiet=True)


def raise_memory_error(nbytes):
    raise MemoryError
