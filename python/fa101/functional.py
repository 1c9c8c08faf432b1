"""[0] What users call. Decides what is asked and where the result goes; what is valid is decided
below, in make_params.cpp, once for Python and C++.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, Literal, Protocol, TypeVar, overload

from fa101 import _fa101
from fa101._frameworks import Framework, framework_of


class SupportsDLPack(Protocol):
    """An array that others can read: torch, NumPy, CuPy and JAX arrays are."""

    def __dlpack__(self) -> Any: ...


Array = TypeVar("Array", bound=SupportsDLPack)


@overload
def flash_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = ...,
    window: tuple[int | None, int | None] | None = ...,
    align: str = ...,
    softmax_scale: float | None = ...,
    softcap: float = ...,
    bias: Array | None = ...,
    mask: Array | None = ...,
    seqlens_k: Array | None = ...,
    layout: str = ...,
    strategy: str = ...,
    kernel: str = ...,
    return_lse: Literal[False] = ...,
    out: Array | None = ...,
) -> Array: ...


@overload
def flash_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = ...,
    window: tuple[int | None, int | None] | None = ...,
    align: str = ...,
    softmax_scale: float | None = ...,
    softcap: float = ...,
    bias: Array | None = ...,
    mask: Array | None = ...,
    seqlens_k: Array | None = ...,
    layout: str = ...,
    strategy: str = ...,
    kernel: str = ...,
    return_lse: Literal[True],
    out: Array | None = ...,
) -> tuple[Array, Array]: ...


def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    align: str = "top_left",
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    bias: Any = None,
    mask: Any = None,
    seqlens_k: Any = None,
    layout: str = "bhsd",
    strategy: str = "auto",
    kernel: str = "auto",
    return_lse: bool = False,
    out: Any = None,
) -> Any:
    """softmax(softmax_scale * q @ k.T, softcapped, plus bias, masked) @ v, without the seqlen_q x
    seqlen_k matrix.

    Takes and returns torch tensors (CPU, CUDA), NumPy, CuPy or JAX arrays: all of one kind, on one
    device, in float32, float16 or bfloat16. Sums are kept in float32. On CUDA the work is enqueued
    on the caller's current stream and nothing waits for it (JAX, which shows no stream, excepted).

    Shapes, for layout="bhsd" (for "bshd" swap the two axes in the middle):
        q    (batch, heads, seqlen_q, head_dim)
        k    (batch, heads_kv, seqlen_k, head_dim)
        v    (batch, heads_kv, seqlen_k, head_dim_v)
        out  (batch, heads, seqlen_q, head_dim_v)
        lse  (batch, heads, seqlen_q), float32, in either layout
    heads is a multiple of heads_kv: query head h reads key/value head h // (heads // heads_kv).

    Any strides will do, zero and negative too; a tensor whose last axis is not contiguous is copied
    first. The result is dense, its axes in memory in the order of q's (an expanded axis counts as
    outermost), head_dim_v innermost; JAX has no strides. Inside torch.autocast inputs are cast to
    its dtype. No gradients yet: a tensor that requires grad is refused unless grad mode is off.

    causal: queries see keys up to a diagonal, which `align` starts in a corner:
        "top_left"      query i sees keys j <= i, as with torch's is_causal
        "bottom_right"  query i sees keys j <= i + seqlen_k - seqlen_q, as with flash-attn:
                        the last query sees every key
        With 2 queries and 5 keys, X visible:   top_left    bottom_right
                                                X....       XXXX.
                                                XX...       XXXXX
    window: (left, right): queries see that many keys to either side of the diagonal, None meaning
        no bound; with causal, none to the right. (127, 0) is a sliding window of 128.
    softmax_scale: None is 1 / sqrt(head_dim). Zero and negative scales are legal.
    softcap: > 0 bounds the scaled logits s smoothly: softcap * tanh(s / softcap) (Gemma 2).
    bias: float32 or the dtype of q, added to the logits after the softcap. It broadcasts to
        (batch, heads, seqlen_q, seqlen_k) in either layout: 2 to 4 axes, each as long or 1. -inf
        hides a key; the lowest finite float does, too, unless a row has nothing else.
    mask: bool, True where the query sees the key; broadcasts as bias does.
    seqlens_k: (batch,) int32: only the first seqlens_k[b] keys of batch entry b exist. The kernel
        reads it on the device, so nothing waits for it; values outside [0, seqlen_k] count as the
        nearer end. With align="bottom_right" the diagonal ends at the last key that exists.
    strategy, kernel: "auto", or a name from fa101.kernels(), which lists the strategies of each;
        fa101.explain says what "auto" picks.
    return_lse: also return log(sum(exp(logits))) of every query.
    out: an array to write the result into, and to return.

    A query that sees no key, or whose logits are all -inf, gives zeros, and lse -inf. What a query
    may not see has no effect on its result, even if it is NaN; what it sees propagates. A key that
    a bias of -inf hides is seen, with weight 0, and 0 * NaN is NaN; a mask hides it entirely.
    """
    options = _options(causal, window, align, softmax_scale, softcap, layout, strategy, kernel)
    _require_type("return_lse", return_lse, bool, "True or False")
    extras = {"bias": bias, "mask": mask, "seqlens_k": seqlens_k}
    framework = _common_framework(q=q, k=k, v=v, out=out, **extras)
    q, k, v = framework.inputs(q, k, v)
    target = framework.empty_out(q, v) if out is None else framework.writable(out)
    lse = framework.empty_lse(q, layout) if return_lse else None
    _forward(framework, q, k, v, target, lse, extras, options)
    if out is None:
        out = framework.result(target, q)
    else:
        framework.written(out)
    return (out, framework.result(lse, q)) if return_lse else out


def plan(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    align: str = "top_left",
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    bias: Any = None,
    mask: Any = None,
    seqlens_k: Any = None,
    layout: str = "bhsd",
    strategy: str = "auto",
    kernel: str = "auto",
) -> _fa101.Plan:
    """How flash_attention would run with these arguments: kernel, tile, workspace, and why."""
    options = _options(causal, window, align, softmax_scale, softcap, layout, strategy, kernel)
    extras = {"bias": bias, "mask": mask, "seqlens_k": seqlens_k}
    framework = _common_framework(q=q, k=k, v=v, **extras)
    q, k, v = framework.inputs(q, k, v)
    arrays = [framework.argument(x) for x in (q, k, v, framework.empty_out(q, v))]
    return _fa101.explain(
        *arrays,
        None,
        **_arguments(framework, extras),
        **options,
        num_threads=framework.num_threads(),
    )


def explain(q: Any, k: Any, v: Any, **options: Any) -> _fa101.Plan:
    """plan(), also printed."""
    answer = plan(q, k, v, **options)
    print(answer, end="")
    return answer


def _forward(
    framework: Framework,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    extras: Mapping[str, Any],
    options: Mapping[str, Any],
) -> None:
    """Writes into `out` and `lse`; everything above it only decides what they are."""
    argument = framework.argument
    _fa101.forward(
        argument(q),
        argument(k),
        argument(v),
        argument(out),
        None if lse is None else argument(lse),
        **_arguments(framework, extras),
        **options,
        stream=framework.stream(q),
        allocate=framework.allocator(q),
        num_threads=framework.num_threads(),
    )


def _arguments(framework: Framework, extras: Mapping[str, Any]) -> dict[str, Any]:
    """What the binding gets for those of the optional arrays that are there."""
    return {
        name: framework.argument(framework.extra(name, x))
        for name, x in extras.items()
        if x is not None
    }


def _options(
    causal: Any,
    window: Any,
    align: Any,
    softmax_scale: Any,
    softcap: Any,
    layout: Any,
    strategy: Any,
    kernel: Any,
) -> dict[str, Any]:
    _require_type("causal", causal, bool, "True or False")
    _require_type("align", align, str, "a string")
    _require_type("layout", layout, str, "a string")
    _require_type("strategy", strategy, str, "a string")
    _require_type("kernel", kernel, str, "a string")
    if softmax_scale is not None:
        softmax_scale = _number("softmax_scale", softmax_scale, "a number or None")
    cap = _number("softcap", softcap, "a number (0: none)")
    if cap != 0 and not 1e-20 <= cap <= 1e20:
        raise ValueError(f"softcap is {softcap!r}; it must be 0 (none) or between 1e-20 and 1e20")
    left, right = _window(window)
    return {
        "causal": causal,
        "window_left": left,
        "window_right": right,
        "align": align,
        "softmax_scale": softmax_scale,
        "softcap": cap,
        "layout": layout,
        "strategy": strategy,
        "kernel": kernel,
    }


def _require_type(name: str, value: Any, expected: type, words: str) -> None:
    if not isinstance(value, expected):
        raise TypeError(f"{name} is {value!r}; it must be {words}")


def _number(name: str, value: Any, words: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r}; it must be {words}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) < 3.4e38:  # float32's; NaN, too
        raise ValueError(f"{name} is {number!r}; it must be finite in float32")
    return number


def _window(window: Any) -> tuple[int | None, int | None]:
    """(left, right), checked; (None, None) for no window."""
    if window is None:
        return None, None
    rule = "a pair (left, right) of numbers of keys, or None for no bound"
    if not isinstance(window, (tuple, list)):
        raise TypeError(f"window is {window!r}; it must be {rule}")
    if len(window) != 2:
        raise ValueError(f"window is {window!r}; it must be {rule}")
    for side in window:
        if side is None:
            continue
        if isinstance(side, bool) or not isinstance(side, Integral):
            raise TypeError(f"window is {window!r}; it must be {rule}")
        if side < 0:
            raise ValueError(f"window is {window!r}; its sides must be at least 0, or None")
    left, right = (None if side is None else min(int(side), 2**62) for side in window)
    return left, right


def _common_framework(*, q: Any, k: Any, v: Any, **optional: Any) -> Framework:
    """The framework that all arrays come from; `optional` ones may be None."""
    framework = framework_of("q", q)
    required = {"k": k, "v": v}
    present = {name: x for name, x in optional.items() if x is not None}
    for name, x in (required | present).items():
        if framework_of(name, x) is not framework:
            raise TypeError(
                f"{name} is a {_kind(x)} but q is a {_kind(q)}; all arrays must be of one kind"
            )
    return framework


def _kind(x: Any) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}"
