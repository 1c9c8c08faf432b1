"""What differs between torch, NumPy, CuPy and JAX: one class each, the same questions.

A framework is imported only when one of its arrays arrives, so importing fa101 needs none of them.
"""

from __future__ import annotations

import functools
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from fa101 import _fa101

Allocator = Callable[[int], Any]


def framework_of(name: str, x: Any) -> Framework:
    """The framework of an array, found by its type alone."""
    framework = _known.get(type(x))
    if framework is None:
        framework = _known[type(x)] = _find(name, type(x))
    return framework


_known: dict[type, Framework] = {}


def _find(name: str, kind: type) -> Framework:
    for base in kind.__mro__:
        match (base.__module__.partition(".")[0], base.__name__):
            case ("torch", "Tensor"):
                return _torch()
            case ("numpy", "ndarray"):
                return _numpy()
            case ("cupy", "ndarray"):
                return _cupy()
            case ("jaxlib", "ArrayImpl"):
                return _jax()
            case ("jax", "Tracer"):
                raise TypeError(
                    f"{name} is a JAX tracer; fa101 computes on concrete arrays only, "
                    "so call it outside jit, grad and vmap"
                )
    raise TypeError(
        f"{name} is a {kind.__module__}.{kind.__qualname__}; "
        "it must be a torch tensor or a NumPy, CuPy or JAX array"
    )


def _refuse_dtype(name: str, dtype: object) -> TypeError:
    rule = "float32, float16 or bfloat16"
    if name.endswith("_cache"):
        rule = "float32, float16, bfloat16 or float8_e4m3fn"
    elif _dtype_name(dtype).startswith("float8"):
        rule += "; in fp8 there are caches only, of flash_attention_with_kvcache"
    return TypeError(f"{name} has dtype {dtype}; it must be {rule}")


# A cache's bits, in a dtype of their own or, from those who cannot export it, as uint8, which the
# binding takes where there is a descale.
_FP8_DTYPES = ("float8_e4m3fn", "uint8")


def _axis_order(strides: Sequence[int]) -> list[int]:
    """The axes from outermost to innermost in memory; expanded ones first, the last one last."""
    last = len(strides) - 1
    order = sorted(range(last), key=lambda axis: (strides[axis] != 0, -abs(strides[axis])))
    return [*order, last]


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _counts_elements(x: Any) -> bool:
    """Whether a NumPy array's strides are whole elements, as DLPack's are."""
    return all(stride % x.itemsize == 0 for stride in x.strides)


def _out_shape(q_shape: tuple[int, ...], v_shape: tuple[int, ...]) -> tuple[int, ...]:
    """q's with the head_dim of v. A v of no axes is refused further down."""
    return (*q_shape[:-1], *(v_shape[-1:] or (1,)))


def _lse_shape(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """(batch, heads, seqlen_q). A q that has not 4 axes is refused further down."""
    return (shape[0], shape[2], shape[1]) if layout == "bshd" and len(shape) == 4 else shape[:3]


_EXTRA_DTYPES = {
    "bias": ("float32", "float16", "bfloat16"),
    "mask": ("bool",),
    "seqlens_k": ("int32",),
    "page_table": ("int32",),
    "k_descale": ("float32",),
    "v_descale": ("float32",),
    "cos": ("float32", "float16", "bfloat16"),
    "sin": ("float32", "float16", "bfloat16"),
}


def _dtype_name(dtype: Any) -> str:
    name = _dtype_names.get(dtype)
    if name is None:
        # A foreign byte order is in it: ">f4".
        name = _dtype_names[dtype] = str(dtype).removeprefix("torch.")
    return name


_dtype_names: dict[Any, str] = {}  # functools.cache makes torch.compile warn


def _no_answer(*arguments: Any) -> Any:
    return None


class Framework(ABC):
    # The answer to a whole call of flash_attention, and of flash_attention_with_kvcache; or None,
    # and functional.py goes the long way: by the methods below.
    short_way: Callable[..., Any] = _no_answer
    short_way_with_kvcache: Callable[..., Any] = _no_answer

    @abstractmethod
    def inputs(self, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        """q, k and v with their last axis contiguous: copied where it is not."""

    @abstractmethod
    def cache_inputs(
        self, q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any
    ) -> tuple[Any, Any, Any, Any, Any]:
        """q, and k and v unless None, as above; the caches as they are, to be written with k."""

    def extra(self, name: str, x: Any) -> Any:
        """An optional array, checked for what the binding cannot see."""
        dtype = _dtype_name(x.dtype)
        if dtype not in _EXTRA_DTYPES[name]:
            allowed = _EXTRA_DTYPES[name]
            rule = allowed[0] if len(allowed) == 1 else "float32 or the dtype of q"
            hint = "; what is added to the logits is a bias" if name == "mask" else ""
            raise TypeError(f"{name} has dtype {dtype}; it must be {rule}{hint}")
        return x

    @abstractmethod
    def writable(self, out: Any) -> Any:
        """`out`, checked for what the binding cannot see."""

    @abstractmethod
    def empty_out(self, q: Any, v: Any) -> Any:
        """Where the result goes: dense, with the axis order of q."""

    @abstractmethod
    def empty_lse(self, q: Any, layout: str) -> Any: ...

    @abstractmethod
    def int32(self, values: Sequence[int], q: Any) -> Any:
        """An array of them beside q."""

    def host_range(self, x: Any) -> tuple[int, int] | None:
        """The least and the largest of x where they can be read without waiting for a device."""
        return None

    @abstractmethod
    def allocator(self, q: Any) -> Allocator:
        """Gives bytes on q's device, in order with stream(q)."""

    def argument(self, x: Any) -> Any:
        """What the binding gets for x."""
        return x

    def arguments(self, *arrays: Any) -> tuple[Any, ...]:
        """The same of several, some of which may be None."""
        return tuple(None if x is None else self.argument(x) for x in arrays)

    def result(self, x: Any, q: Any) -> Any:
        """What the user gets for x, which is from empty_out or empty_lse."""
        return x

    def written(self, out: Any) -> None:  # noqa: B027, most frameworks keep no books
        """The user's own array has a new content."""

    def stream(self, q: Any) -> int:
        return 0

    def num_threads(self) -> int:
        """The most CPU threads the call may use; 0 is no limit of the framework's."""
        return 0


class Torch(Framework):
    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._plain = {torch.Tensor, torch.nn.Parameter}
        self._dtypes = {torch.float32, torch.float16, torch.bfloat16}
        self._strided = torch.strided
        self._is_tracing = torch._C._is_tracing
        self._transforms = torch._C._functorch.peek_interpreter_stack
        self._len_modes = torch._C._len_torch_dispatch_stack
        self._forward_ad = torch.autograd.forward_ad
        self._is_autocast = torch.is_autocast_enabled
        if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):  # from torch 2.10 on
            calls = _fa101.TorchCalls(self)
            self.short_way = calls.attention
            self.short_way_with_kvcache = calls.attention_with_kvcache

    def _is_transformed(self) -> bool:
        """Whether something runs that an array could be a stand-in for."""
        return bool(
            self._is_tracing()
            or self._transforms() is not None
            or self._len_modes() > 0
            or self._forward_ad._current_level >= 0
        )

    def arguments(self, *arrays: Any) -> tuple[Any, ...]:
        return arrays

    def inputs(self, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        self._refuse_transforms(q=q, k=k, v=v)
        cast = self._autocast_dtype(q)
        return self._input("q", q, cast), self._input("k", k, cast), self._input("v", v, cast)

    def cache_inputs(
        self, q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any
    ) -> tuple[Any, Any, Any, Any, Any]:
        new = {} if k is None or v is None else {"k": k, "v": v}
        self._refuse_transforms(q=q, k_cache=k_cache, v_cache=v_cache, **new)
        for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
            self._require_plain_memory(name, x)
            if x.dtype not in self._dtypes and _dtype_name(x.dtype) not in _FP8_DTYPES:
                raise _refuse_dtype(name, x.dtype)
        cast = self._autocast_dtype(q)
        for name, x in new.items():
            new[name] = self._input(name, x, cast)
        return self._input("q", q, cast), k_cache, v_cache, new.get("k", k), new.get("v", v)

    def _autocast_dtype(self, x: Any) -> Any:
        place = "cuda" if x.is_cuda else "cpu"
        return self._torch.get_autocast_dtype(place) if self._is_autocast(place) else None

    def _input(self, name: str, x: Any, cast: Any) -> Any:
        self._require_dense(name, x)
        if x.dtype not in self._dtypes:
            raise _refuse_dtype(name, x.dtype)
        if cast is not None:
            x = x.to(cast)
        if x.is_neg():  # a view that negates when read; its memory has the other sign
            x = x.resolve_neg()
        stride = x.stride()
        if stride and stride[-1] != 1 and x.size(-1) != 1:
            x = x.contiguous()
        return x

    def extra(self, name: str, x: Any) -> Any:
        self._refuse_transforms(**{name: x})
        self._require_dense(name, x)
        super().extra(name, x)
        torch = self._torch
        if x.dtype not in (torch.float32, torch.bool, torch.int32):
            cast = self._autocast_dtype(x)
            if cast is not None:
                x = x.to(cast)
        return x.resolve_neg()

    def writable(self, out: Any) -> Any:
        self._refuse_transforms(out=out)
        self._require_plain_memory("out", out)
        return out

    def _require_plain_memory(self, name: str, x: Any) -> None:
        """Of what is used where it is."""
        self._require_dense(name, x)
        if x.is_neg():
            raise ValueError(
                f"{name} is a negated view (Tensor.is_neg); it cannot be used in place"
            )

    def _require_dense(self, name: str, x: Any) -> None:
        kind = type(x)
        # Wrappers (fake, functional and distributed tensors) dispatch to Python and hold no memory
        # themselves; other subclasses are tensors like any.
        if (
            kind not in self._plain
            and kind.__torch_dispatch__ is not self._torch.Tensor.__torch_dispatch__
        ):
            raise TypeError(f"{name} is a {kind.__name__}, which has no memory to compute with")
        if x.is_meta:
            raise TypeError(f"{name} is on the meta device, which has no memory to compute with")
        if x.layout is not self._strided or x.is_nested:
            layout = "nested" if x.is_nested else str(x.layout)
            raise TypeError(f"{name} is {layout}; it must be dense (torch.strided)")

    def _refuse_transforms(self, **named: Any) -> None:
        """What runs a function on stand-ins for its arguments would not see what we compute."""
        if self._is_transformed():
            torch = self._torch
            levels = self._forward_ad._current_level
            is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
            from torch.fx.experimental.proxy_tensor import get_proxy_mode

            # All transforms but vmap wrap what is made inside them: the result, too.
            wrap_all = self._transforms() is not None and is_wrapped(torch.empty(0))
            for name, x in named.items():
                if torch._C._is_tracing() or get_proxy_mode() is not None:
                    raise TypeError(f"{name} is being traced; fa101 cannot be traced")
                if wrap_all or is_wrapped(x):
                    raise TypeError(
                        f"{name} is inside a torch.func transform (vmap, grad, jvp); "
                        "fa101 cannot be transformed"
                    )
                if levels >= 0 and torch.autograd.forward_ad.unpack_dual(x).tangent is not None:
                    raise RuntimeError(
                        f"{name} has a forward-mode tangent, which would be lost; "
                        "fa101 has no derivatives yet"
                    )

    def empty_out(self, q: Any, v: Any) -> Any:
        torch = self._torch
        if q.is_contiguous():
            if q.ndim > 0 and v.ndim > 0 and q.shape[-1] == v.shape[-1]:
                return torch.empty_like(q)  # half the time of torch.empty
            order: Sequence[int] = range(q.ndim)
        else:
            order = _axis_order(q.stride())
        shape = _out_shape(q.shape, v.shape)
        dense = torch.empty([shape[i] for i in order], dtype=q.dtype, device=q.device)
        return dense.permute(_inverse(order))

    def empty_lse(self, q: Any, layout: str) -> Any:
        shape = _lse_shape(q.shape, layout)
        return self._torch.empty(shape, dtype=self._torch.float32, device=q.device)

    def written(self, out: Any) -> None:
        # Autograd must see that what it may have saved has changed.
        if not out.is_inference():
            self._torch.autograd.graph.increment_version(out)

    def int32(self, values: Sequence[int], q: Any) -> Any:
        torch = self._torch
        if len(set(values)) == 1:  # a copy from the host would wait
            return self.full_int32(values[0], len(values), q)
        return torch.tensor(values, dtype=torch.int32, device=q.device)

    def full_int32(self, value: int, count: int, q: Any) -> Any:
        """So often the same; a kernel fills it."""
        torch = self._torch
        return torch.full((count,), value, dtype=torch.int32, device=q.device)

    def host_range(self, x: Any) -> tuple[int, int] | None:
        if not x.is_cpu or x.numel() == 0:
            return None
        least, largest = x.aminmax()
        return int(least), int(largest)

    def allocator(self, q: Any) -> Allocator:
        torch = self._torch
        return lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=q.device)

    def stream(self, q: Any) -> int:
        # What torch.cuda.current_stream(device).cuda_stream gives, without making a Stream of it.
        return self._torch._C._cuda_getCurrentRawStream(q.get_device()) if q.is_cuda else 0

    def num_threads(self) -> int:
        threads: int = self._torch.get_num_threads()
        return threads


class Numpy(Framework):
    """NumPy, and CuPy where it is the same."""

    module = "numpy"

    def __init__(self) -> None:
        self._xp = importlib.import_module(self.module)
        self._dtypes = {self._xp.dtype("float32"), self._xp.dtype("float16")}

    def inputs(self, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        return self._input("q", q), self._input("k", k), self._input("v", v)

    def cache_inputs(
        self, q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any
    ) -> tuple[Any, Any, Any, Any, Any]:
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            self._require_elements(name, self._cache(name, cache))
        k = None if k is None else self._input("k", k)
        v = None if v is None else self._input("v", v)
        return self._input("q", q), k_cache, v_cache, k, v

    def _input(self, name: str, x: Any) -> Any:
        x = self._checked(name, x)
        return x if self._is_readable(x) else x.copy(order="C")

    def _cache(self, name: str, x: Any) -> Any:
        return self._checked(name, x, _FP8_DTYPES)

    def _checked(self, name: str, x: Any, others: Sequence[str] = ()) -> Any:
        self._require_plain(name, x)
        if x.dtype not in self._dtypes and x.dtype.name not in ("bfloat16", *others):
            raise _refuse_dtype(name, x.dtype)
        return x

    def extra(self, name: str, x: Any) -> Any:
        self._require_plain(name, x)
        super().extra(name, x)
        return x if x.flags.aligned and _counts_elements(x) else x.copy(order="C")

    def _require_elements(self, name: str, x: Any) -> None:
        """Of what is used where it is: a field of a structured array, say, may have other steps."""
        if not _counts_elements(x):
            raise ValueError(
                f"{name} has strides of {x.strides} bytes; to be used in place they must be "
                f"multiples of {x.itemsize}, the size of its elements"
            )

    def _require_plain(self, name: str, x: Any) -> None:
        if isinstance(x, self._xp.ma.MaskedArray):
            raise TypeError(f"{name} is a masked array; fill or drop its mask first")

    def _is_readable(self, x: Any) -> bool:
        unit = x.strides[-1:] == (x.itemsize,) or x.shape[-1:] == (1,)
        return unit and bool(x.flags.aligned)

    def writable(self, out: Any) -> Any:
        self._require_plain("out", out)
        self._require_elements("out", out)
        return out

    def empty_out(self, q: Any, v: Any) -> Any:
        shape = _out_shape(q.shape, v.shape)
        order = _axis_order(q.strides) if q.ndim and not q.flags.c_contiguous else range(q.ndim)
        dense = self._xp.empty([shape[i] for i in order], dtype=q.dtype)
        return dense.transpose(_inverse(order))

    def empty_lse(self, q: Any, layout: str) -> Any:
        return self._xp.empty(_lse_shape(q.shape, layout), dtype="float32")

    def int32(self, values: Sequence[int], q: Any) -> Any:
        return self._xp.array(values, dtype="int32")

    def host_range(self, x: Any) -> tuple[int, int] | None:
        return (int(x.min()), int(x.max())) if x.size else None

    def argument(self, x: Any) -> Any:
        if x.dtype in self._dtypes:
            return x
        if x.dtype.name == "bfloat16":
            return _fa101.as_bfloat16(x.view("uint16"))
        if x.dtype.name == "float8_e4m3fn":
            return _fa101.as_float8_e4m3fn(x.view("uint8"))
        return x

    def allocator(self, q: Any) -> Allocator:
        return functools.partial(self._xp.empty, dtype="uint8")


class Cupy(Numpy):
    module = "cupy"

    def _input(self, name: str, x: Any) -> Any:
        with x.device:
            return super()._input(name, x)

    def extra(self, name: str, x: Any) -> Any:
        return Framework.extra(self, name, x)

    def _require_plain(self, name: str, x: Any) -> None:
        pass

    def _is_readable(self, x: Any) -> bool:
        return bool(x.strides[-1:] == (x.itemsize,) or x.shape[-1:] == (1,))

    def empty_out(self, q: Any, v: Any) -> Any:
        with q.device:
            return super().empty_out(q, v)

    def empty_lse(self, q: Any, layout: str) -> Any:
        with q.device:
            return super().empty_lse(q, layout)

    def int32(self, values: Sequence[int], q: Any) -> Any:
        with q.device:
            return super().int32(values, q)

    def host_range(self, x: Any) -> tuple[int, int] | None:
        return None

    def argument(self, x: Any) -> Any:
        # -1: no waiting. Everything is on CuPy's current stream already, and an order with another
        # stream could not be captured in a CUDA graph.
        return x.__dlpack__(stream=-1)

    def allocator(self, q: Any) -> Allocator:
        def allocate(nbytes: int) -> Any:
            with q.device:
                return self.argument(self._xp.empty(nbytes, dtype="uint8"))

        return allocate

    def stream(self, q: Any) -> int:
        stream: int = self._xp.cuda.get_current_stream(q.device.id).ptr
        return stream


class Jax(Framework):
    """Concrete arrays only. JAX shows neither its stream nor its allocator, so on CUDA the inputs
    are ordered before the legacy default stream (__dlpack__ does that), the result is in memory of
    our own, and it is handed over when the device is done.
    """

    legacy_default_stream = 1

    def __init__(self) -> None:
        import jax
        import numpy

        self._jax = jax
        self._np = numpy

    def inputs(self, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        return self._input("q", q), self._input("k", k), self._input("v", v)

    def _input(self, name: str, x: Any, others: Sequence[str] = ()) -> Any:
        if x.dtype.name not in ("float32", "float16", "bfloat16", *others):
            raise _refuse_dtype(name, x.dtype)
        self._require_one_device(name, x)
        return x

    def cache_inputs(
        self, q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any
    ) -> tuple[Any, Any, Any, Any, Any]:
        if k is not None:
            raise ValueError(
                "k and v are given, but k_cache is a JAX array, which cannot be written in place"
            )
        q, k_cache = self._input("q", q), self._input("k_cache", k_cache, _FP8_DTYPES)
        return q, k_cache, self._input("v_cache", v_cache, _FP8_DTYPES), None, v

    def extra(self, name: str, x: Any) -> Any:
        self._require_one_device(name, x)
        return super().extra(name, x)

    def _require_one_device(self, name: str, x: Any) -> None:
        if len(x.devices()) != 1:
            raise ValueError(f"{name} is spread over {len(x.devices())} devices; it must be on one")

    def writable(self, out: Any) -> Any:
        raise ValueError("out is a JAX array, which is read-only")

    def _device(self, q: Any) -> Any:
        (device,) = q.devices()
        return device

    def _empty(self, shape: Sequence[int], dtype: Any, q: Any) -> Any:
        if self._device(q).platform == "cpu":
            return self._np.empty(shape, dtype)
        return _fa101.cuda_empty(shape, self._np.dtype(dtype).name, q.__dlpack_device__()[1])

    def empty_out(self, q: Any, v: Any) -> Any:
        return self._empty(_out_shape(q.shape, v.shape), q.dtype, q)

    def empty_lse(self, q: Any, layout: str) -> Any:
        return self._empty(_lse_shape(q.shape, layout), "float32", q)

    def int32(self, values: Sequence[int], q: Any) -> Any:
        return self._jax.device_put(self._np.array(values, "int32"), self._device(q))

    def host_range(self, x: Any) -> tuple[int, int] | None:
        on_host = self._device(x).platform == "cpu" and x.size
        return (int(x.min()), int(x.max())) if on_host else None

    def argument(self, x: Any) -> Any:
        if isinstance(x, self._np.ndarray):
            return _numpy().argument(x)
        if not isinstance(x, self._jax.Array):
            return x  # from cuda_empty
        if self._device(x).platform == "cpu":
            return x.block_until_ready().__dlpack__()
        return x.__dlpack__(stream=self.legacy_default_stream)

    def result(self, x: Any, q: Any) -> Any:
        device = self._device(q)
        if device.platform == "cpu":
            return self._jax.device_put(x, device)
        _fa101.cuda_synchronize(q.__dlpack_device__()[1])
        return self._jax.dlpack.from_dlpack(x)

    def allocator(self, q: Any) -> Allocator:
        return lambda nbytes: self._empty((nbytes,), "uint8", q)

    def stream(self, q: Any) -> int:
        return 0 if self._device(q).platform == "cpu" else self.legacy_default_stream


_torch = functools.cache(Torch)
_numpy = functools.cache(Numpy)
_cupy = functools.cache(Cupy)
_jax = functools.cache(Jax)
