"""[0] What users call. Decides what is asked and where the result goes; what is valid is decided
below, in make_params.cpp, once for Python and C++.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, overload

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
    options = _options(
        causal, window, align, softmax_scale, softcap, layout, "auto", kernel, strategy, return_lse
    )
    framework = framework_of("q", q)
    answer = framework.short_way(q, k, v, bias, mask, seqlens_k, out, return_lse, layout, options)
    if answer is not None:
        return answer
    if not _are_alike((q, k, v), (bias, mask, seqlens_k, out)):
        optional = {"bias": bias, "mask": mask, "seqlens_k": seqlens_k, "out": out}
        _require_framework(framework, {"q": q, "k": k, "v": v}, optional)
    q, k, v = framework.inputs(q, k, v)
    target = framework.empty_out(q, v) if out is None else framework.writable(out)
    lse = framework.empty_lse(q, layout) if return_lse else None
    bias = _extra(framework, "bias", bias)
    mask = _extra(framework, "mask", mask)
    seqlens_k = _extra(framework, "seqlens_k", seqlens_k)
    _fa101.forward(
        *framework.arguments(q, k, v, target, lse, bias, mask, seqlens_k),
        options,
        framework.stream(q),
        framework.allocator(q),
        framework.num_threads(),
    )
    if out is None:
        out = framework.result(target, q)
    else:
        framework.written(out)
    return (out, framework.result(lse, q)) if return_lse else out


@overload
def flash_attention_with_kvcache(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    *,
    k: Array | None = ...,
    v: Array | None = ...,
    seqlens_k: Array | int | Sequence[int] | None = ...,
    page_table: Array | None = ...,
    k_descale: Array | None = ...,
    v_descale: Array | None = ...,
    causal: bool = ...,
    align: str = ...,
    window: tuple[int | None, int | None] | None = ...,
    softmax_scale: float | None = ...,
    softcap: float = ...,
    layout: str = ...,
    num_splits: int | Literal["auto"] = ...,
    rotary: tuple[Array, Array, bool] | None = ...,
    return_lse: Literal[False] = ...,
    out: Array | None = ...,
) -> Array: ...


@overload
def flash_attention_with_kvcache(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    *,
    k: Array | None = ...,
    v: Array | None = ...,
    seqlens_k: Array | int | Sequence[int] | None = ...,
    page_table: Array | None = ...,
    k_descale: Array | None = ...,
    v_descale: Array | None = ...,
    causal: bool = ...,
    align: str = ...,
    window: tuple[int | None, int | None] | None = ...,
    softmax_scale: float | None = ...,
    softcap: float = ...,
    layout: str = ...,
    num_splits: int | Literal["auto"] = ...,
    rotary: tuple[Array, Array, bool] | None = ...,
    return_lse: Literal[True],
    out: Array | None = ...,
) -> tuple[Array, Array]: ...


def flash_attention_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    k: Any = None,
    v: Any = None,
    seqlens_k: Any = None,
    page_table: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    causal: bool = True,
    align: str = "bottom_right",
    window: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    layout: str = "bshd",
    num_splits: Any = "auto",
    rotary: Any = None,
    return_lse: bool = False,
    out: Any = None,
) -> Any:
    """flash_attention of new queries over a KV cache, which new keys may join first.

    Shapes, for layout="bshd" (for "bhsd" swap the two axes in the middle):
        q                 (batch, seqlen_q, heads, head_dim)
        k_cache, v_cache  (batch, capacity, heads_kv, head_dim and head_dim_v)
          or, as pages    (num_pages, page_size, heads_kv, head_dim and head_dim_v)
        k, v              (batch, seqlen_new, heads_kv, head_dim and head_dim_v)
        page_table        (batch, max_pages), int32
        k_descale, v_descale  (heads_kv,) or (batch, heads_kv), float32
        out               (batch, seqlen_q, heads, head_dim_v)
        lse               (batch, heads, seqlen_q), float32, in either layout
    Arrays, dtypes, devices, streams and what the other arguments mean are as in flash_attention,
    but the diagonal ends at the last key (align="bottom_right"). The caches are never copied: their
    last axis must be contiguous. Inside torch.autocast they keep their dtype.

    seqlens_k: how many keys the cache holds for each batch entry before this call; None is all it
        has room for. An int32 array (batch,), read on the device: nothing waits for it, and a
        captured CUDA graph follows it. Or an int or a list, for which a CUDA graph does not.
        Values on the host (a NumPy array or CPU tensor, too) are checked against the capacity;
        on a device they count as the nearest of 0 and the capacity.
    k, v: new keys, written into the cache at rows seqlens_k[b], seqlens_k[b] + 1, ... and attended
        like the others, so that seqlen_new more are there. Rows beyond the capacity (which only
        lengths on a device can ask for) are dropped. seqlens_k itself is the caller's to advance.
    page_table: the keys of entry b are those of the pages page_table[b, 0], page_table[b, 1], ...;
        page_size is a power of two from 16 on, the capacity max_pages * page_size. Entries past a
        sequence's last key are not read. An entry outside of [0, num_pages) gives values that mean
        nothing, but no memory outside of the cache is read, and nothing is written for it. Entries
        may share pages, but new keys go to pages of one entry: nothing orders what one entry
        writes and another reads.
    k_descale, v_descale: for caches of float8_e4m3fn (the E4M3 of the OCP's 8-bit floating point
        specification): an element of a head stands for its value times the descale of the head, a
        positive number read on the device (name and shape as in FlashAttention-3); None is 1. New
        keys, once rotated, and values are divided by it and rounded to the nearest, ties to even;
        beyond +-448 they become +-448, NaN stays NaN. max |k| / 448 of a head uses all codes. q, k,
        v and out are float16 or bfloat16 then. A cache of uint8 is taken for the bits of
        float8_e4m3fn if its descale is given: for CuPy, and NumPy without ml_dtypes, which have no
        such dtype.
    rotary: (cos, sin, interleaved): rotary position embedding (Su et al., arXiv 2104.09864) of k on
        its way into the cache, and of q. cos and sin are (positions, rotary_dim / 2), float32 or
        the dtype of q, with a position for each key there is room for; rotary_dim is at most
        head_dim, columns beyond it stay. Columns i and i + rotary_dim / 2 turn together;
        interleaved: 2i and 2i + 1. Key i is at position seqlens_k + i, and so is query i, but not
        past the last position there is; without causal and window all queries are at position
        seqlens_k.
    num_splits: into how many parts the keys are cut, on CUDA; on the CPU only "auto" and 1 are
        answered. "auto" takes as many as fill the device. An integer cuts the keys that a tile of
        queries sees into so many parts, or into fewer where there are fewer steps, of 16 to 128
        keys, as the kernel has them. With seqlens_k the cuts depend on the sequence's own length,
        batch, heads, seqlen_q, head_dim and the device alone: a sequence gets the same bits in a
        cache of any capacity and in any company of the same number.

    On CUDA pages and caches in fp8 need a head_dim of at most 256.
    """
    options = _options(
        causal, window, align, softmax_scale, softcap, layout, num_splits, "auto", "auto",
        return_lse,
    )  # fmt: skip
    cos, sin, interleaved = (None, None, False) if rotary is None else _rotary(rotary)
    answer = framework_of("q", q).short_way_with_kvcache(
        q, k_cache, v_cache, k, v, seqlens_k, page_table, k_descale, v_descale, cos, sin,
        interleaved, out, return_lse, layout, options,
    )  # fmt: skip
    if answer is not None:
        return answer
    framework, arrays = _cached_arrays(
        q, k_cache, v_cache, k, v, seqlens_k, page_table, k_descale, v_descale, cos, sin, layout,
        out,
    )  # fmt: skip
    q, k_cache, v_cache, k, v, *others = arrays
    target = framework.empty_out(q, v_cache) if out is None else framework.writable(out)
    lse = framework.empty_lse(q, layout) if return_lse else None
    q_rotated = None if cos is None else framework.empty_out(q, q)
    _fa101.forward_with_kvcache(
        *framework.arguments(q, k_cache, v_cache, target, lse, k, v, *others, q_rotated),
        interleaved,
        options,
        framework.stream(q),
        framework.allocator(q),
        framework.num_threads(),
    )
    if k is not None:
        framework.written(k_cache)
        framework.written(v_cache)
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
    return_lse: bool = False,
    out: Any = None,
) -> _fa101.Plan:
    """How flash_attention would run with these arguments: kernel, tile, workspace, and why.
    Writes nothing."""
    options = _options(
        causal, window, align, softmax_scale, softcap, layout, "auto", kernel, strategy, return_lse
    )
    framework = framework_of("q", q)
    optional = {"bias": bias, "mask": mask, "seqlens_k": seqlens_k, "out": out}
    _require_framework(framework, {"q": q, "k": k, "v": v}, optional)
    q, k, v = framework.inputs(q, k, v)
    target = framework.empty_out(q, v) if out is None else framework.writable(out)
    bias = _extra(framework, "bias", bias)
    mask = _extra(framework, "mask", mask)
    seqlens_k = _extra(framework, "seqlens_k", seqlens_k)
    return _fa101.explain(
        *framework.arguments(q, k, v, target, None, bias, mask, seqlens_k),
        options,
        framework.num_threads(),
    )


def plan_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    k: Any = None,
    v: Any = None,
    seqlens_k: Any = None,
    page_table: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    causal: bool = True,
    align: str = "bottom_right",
    window: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    layout: str = "bshd",
    num_splits: Any = "auto",
    rotary: Any = None,
    return_lse: bool = False,
    out: Any = None,
) -> _fa101.Plan:
    """How flash_attention_with_kvcache would run with these arguments. Writes nothing."""
    options = _options(
        causal, window, align, softmax_scale, softcap, layout, num_splits, "auto", "auto",
        return_lse,
    )  # fmt: skip
    cos, sin, interleaved = _rotary(rotary)
    framework, arrays = _cached_arrays(
        q, k_cache, v_cache, k, v, seqlens_k, page_table, k_descale, v_descale, cos, sin, layout,
        out,
    )  # fmt: skip
    q, k_cache, v_cache, k, v, *others = arrays
    target = framework.empty_out(q, v_cache) if out is None else framework.writable(out)
    q_rotated = None if cos is None else framework.empty_out(q, q)
    return _fa101.explain_with_kvcache(
        *framework.arguments(q, k_cache, v_cache, target, None, k, v, *others, q_rotated),
        interleaved,
        options,
        framework.num_threads(),
    )


def explain(q: Any, k: Any, v: Any, **options: Any) -> _fa101.Plan:
    """plan(), also printed."""
    answer = plan(q, k, v, **options)
    print(answer, end="")
    return answer


def explain_with_kvcache(q: Any, k_cache: Any, v_cache: Any, **options: Any) -> _fa101.Plan:
    """plan_with_kvcache(), also printed."""
    answer = plan_with_kvcache(q, k_cache, v_cache, **options)
    print(answer, end="")
    return answer


def _cached_arrays(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    seqlens_k: Any,
    page_table: Any,
    k_descale: Any,
    v_descale: Any,
    cos: Any,
    sin: Any,
    layout: str,
    out: Any,
) -> tuple[Framework, tuple[Any, ...]]:
    """The framework of a call with a cache; q, k_cache, v_cache, k, v, seqlens_k, page_table,
    k_descale, v_descale, cos and sin, checked and None where they are not there."""
    on_host = (
        type(seqlens_k) is not type(q)
        and isinstance(seqlens_k, (Integral, Sequence))
        and not isinstance(seqlens_k, (str, bytes, bytearray))
    )
    lengths = None if on_host else seqlens_k
    framework = framework_of("q", q)
    if lengths is not None and type(lengths).__module__ == "builtins":
        raise TypeError(f"seqlens_k is {seqlens_k!r}; it must be {_LENGTHS_RULE}")
    scales = (k_descale, v_descale)
    if not _are_alike((q, k_cache, v_cache), (page_table, cos, sin, lengths, k, v, out, *scales)):
        optional = {"page_table": page_table, "cos": cos, "sin": sin, "seqlens_k": lengths}
        optional |= {"k": k, "v": v, "out": out, "k_descale": k_descale, "v_descale": v_descale}
        _require_framework(framework, {"q": q, "k_cache": k_cache, "v_cache": v_cache}, optional)
    q, k_cache, v_cache, k, v = framework.cache_inputs(q, k_cache, v_cache, k, v)
    page_table = _extra(framework, "page_table", page_table)
    cos, sin = _extra(framework, "cos", cos), _extra(framework, "sin", sin)
    k_descale = _extra(framework, "k_descale", k_descale)
    v_descale = _extra(framework, "v_descale", v_descale)
    if on_host:
        room = _room(k_cache, page_table, k, layout)
        batch = q.shape[0] if q.shape else 0
        lengths = framework.int32(_lengths(seqlens_k, batch, room), q)
    elif lengths is not None:
        lengths = framework.extra("seqlens_k", lengths)
        if (found := framework.host_range(lengths)) is not None:
            _require_room("seqlens_k", found, _room(k_cache, page_table, k, layout))
    others = (lengths, page_table, k_descale, v_descale, cos, sin)
    return framework, (q, k_cache, v_cache, k, v, *others)


def _extra(framework: Framework, name: str, x: Any) -> Any:
    return None if x is None else framework.extra(name, x)


def _checked_options(
    causal: Any,
    window: Any,
    align: Any,
    softmax_scale: Any,
    softcap: Any,
    layout: Any,
    num_splits: Any,
    kernel: Any,
    strategy: Any,
    return_lse: Any,
) -> _fa101.Options:
    _require_type("causal", causal, bool, "True or False")
    _require_type("return_lse", return_lse, bool, "True or False")
    for name, text in (
        ("align", align), ("layout", layout), ("kernel", kernel), ("strategy", strategy)
    ):  # fmt: skip
        _require_type(name, text, str, "a string")
        if not text.isprintable():  # C++ would end the error's text at a NUL
            raise ValueError(f"{name} is {text!r}; it must be a name, of printable characters")
    if softmax_scale is not None:
        softmax_scale = _number("softmax_scale", softmax_scale, "a number or None")
    cap = _number("softcap", softcap, "a number (0: none)")
    if cap != 0 and not 1e-20 <= cap <= 1e20:
        raise ValueError(f"softcap is {softcap!r}; it must be 0 (none) or between 1e-20 and 1e20")
    splits = _num_splits(num_splits)
    return _fa101.Options(
        causal, *_window(window), align, softmax_scale, cap, layout, splits, kernel, strategy
    )


# What a call asks besides its arrays, checked; what was asked before is found again.
_options = functools.partial(_fa101.remember, {}, _checked_options)


def _num_splits(value: Any) -> int:
    """0 for "auto"."""
    rule = "'auto' or an integer from 1 to 2**63 - 1"
    if isinstance(value, str):
        if value == "auto":
            return 0
        raise ValueError(f"num_splits is {value!r}; it must be {rule}")
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"num_splits is {value!r}; it must be {rule}")
    if not 1 <= int(value) < 2**63:
        raise ValueError(f"num_splits is {value!r}; it must be {rule}")
    return int(value)


def _rotary(rotary: Any) -> tuple[Any, Any, bool]:
    if rotary is None:
        return None, None, False
    rule = "a triple (cos, sin, interleaved) of two arrays and a bool, or None"
    if not isinstance(rotary, (tuple, list)) or len(rotary) != 3:
        raise TypeError(f"rotary is a {_kind(rotary)}; it must be {rule}")
    cos, sin, interleaved = rotary
    if cos is None or sin is None:
        raise TypeError(f"rotary's {'cos' if cos is None else 'sin'} is None; it must be {rule}")
    if not isinstance(interleaved, bool):
        raise TypeError(f"rotary's interleaved is {interleaved!r}; it must be True or False")
    return cos, sin, interleaved


class _Room(NamedTuple):
    """Rows of a cache for each batch entry, and how many of them are about to be filled."""

    capacity: int
    new: int


def _room(k_cache: Any, page_table: Any, k: Any, layout: str) -> _Room | None:
    """None where the shapes are not what make_params.cpp lets pass."""
    rows = 1 if layout == "bshd" else 2
    if len(k_cache.shape) != 4 or (k is not None and len(k.shape) != 4):
        return None
    if page_table is not None and len(page_table.shape) != 2:
        return None
    pages = 1 if page_table is None else page_table.shape[1]
    return _Room(pages * k_cache.shape[rows], 0 if k is None else k.shape[rows])


_LENGTHS_RULE = "an int32 array, an int or a list of ints"


def _lengths(seqlens_k: Any, batch: int, room: _Room | None) -> list[int]:
    """seqlens_k from the host, checked, one for each batch entry."""
    listed = [seqlens_k] * batch if isinstance(seqlens_k, Integral) else seqlens_k
    for length in listed:
        if isinstance(length, bool) or not isinstance(length, Integral):
            raise TypeError(f"seqlens_k is {seqlens_k!r}; it must be {_LENGTHS_RULE}")
    lengths = [int(length) for length in listed]
    if room is None or room.new > room.capacity:
        return [0] * len(lengths)  # refused in make_params.cpp, whatever they are
    _require_room("seqlens_k", lengths, room)
    return lengths


def _require_room(name: str, lengths: Sequence[int], room: _Room | None) -> None:
    if room is None or room.new > room.capacity:
        return  # refused in make_params.cpp
    for length in lengths:
        if not 0 <= length <= room.capacity - room.new:
            raise ValueError(
                f"{name} has {length}; it must be from 0 to {room.capacity - room.new}: "
                f"the cache's capacity is {room.capacity} keys, and {room.new} are new"
            )


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


def _are_alike(required: tuple[Any, ...], optional: tuple[Any, ...]) -> bool:
    """Whether all are of one type; `optional` ones may be None. False says nothing."""
    kind = type(required[0])
    for x in required:
        if type(x) is not kind:
            return False
    for x in optional:  # noqa: SIM110, all() takes four times as long
        if x is not None and type(x) is not kind:
            return False
    return True


def _require_framework(
    framework: Framework, required: Mapping[str, Any], optional: Mapping[str, Any]
) -> None:
    """That all arrays, q among them, come from it; `optional` ones may be None."""
    present = {name: x for name, x in optional.items() if x is not None}
    for name, x in {**required, **present}.items():
        if framework_of(name, x) is not framework:
            raise TypeError(
                f"{name} is a {_kind(x)} but q is a {_kind(required['q'])}; "
                "all arrays must be of one kind"
            )


def _kind(x: Any) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}"
