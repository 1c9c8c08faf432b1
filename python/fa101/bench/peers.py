"""Who answers a case: fa101's own kernels, and whatever else this machine has.

A contender is a name, a layout and ``prepare(case, q, k, v)``, which returns the call to time.
The runner hands q, k and v over in the contender's layout, so no conversion is ever timed.
A peer is a few lines; add one to ``PEERS`` and it is in every table.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .suites import Case

Call = Callable[[], Any]  # returns the output, a tensor in the contender's layout


@dataclass(frozen=True)
class PlannedCall:
    run: Call
    plan: str  # as in "fa2_cute split_kv, 16 splits"

    def __call__(self) -> Any:
        return self.run()


class UnfitError(Exception):
    """This contender is not asked this case; the message says why."""


@dataclass(frozen=True)
class Contender:
    name: str
    prepare: Callable[[Case, Tensor, Tensor, Tensor], Call]
    layout: str = "bhsd"
    is_peer: bool = True
    itemsize_kv: int = 0  # bytes of an element of its cache; 0: the case's, and it competes
    # Entered around a turn of calls, not around each.
    context: Callable[[], AbstractContextManager[None]] = nullcontext


def fa101_kernel(name: str) -> Contender:
    """ "auto", a kernel, whose strategy is then the planner's choice, or "kernel:strategy"."""
    import fa101

    kernel, _, strategy = name.partition(":")

    def prepare(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Call:
        options: dict[str, Any] = {"causal": case.causal, "align": "bottom_right"}
        options.update(kernel=kernel, strategy=strategy or "auto")
        try:
            plan = fa101.plan(q, k, v, **options)
        except (ValueError, RuntimeError) as error:  # unfit here, or no code for this device
            raise UnfitError(str(error)) from None
        out = torch.full_like(q, float("nan"))
        splits = f", {plan.num_splits} splits" if plan.num_splits > 1 else ""
        return PlannedCall(
            lambda: fa101.flash_attention(q, k, v, **options, out=out),
            f"{plan.kernel} {plan.strategy}{splits}",
        )

    return Contender(name, prepare, is_peer=False)


def fa101_contenders(device_type: str, suite: str) -> dict[str, Contender]:
    """What a suite times of fa101: its kernels; or, to judge a choice of its planner, "auto" beside
    all that it could have taken."""
    import fa101

    if suite == "splits":
        counts: list[int | str] = ["auto", 1, 2, 4, 8, 16, 32, 64, 128]
        return {contender.name: contender for contender in map(fa101_splits, counts)}
    if suite == "host":
        return {contender.name: contender for contender in fa101_calls()}
    kernels = [kernel for kernel in fa101.kernels() if kernel["device"] == device_type]
    names = [kernel["name"] for kernel in kernels]
    if suite in ("auto", "chunks"):
        names = ["auto"] + [f"{k['name']}:{s}" for k in kernels for s in k["strategies"]]
    contenders = {name: fa101_kernel(name) for name in names}
    if suite == "decode":
        contenders |= {c.name: c for c in map(fa101_cached, (None, 16, 64))}
        contenders["fp8"] = fa101_fp8()
    return contenders


def fa101_calls() -> list[Contender]:
    """What users call, as plainly as they can: the planner chooses."""
    import fa101

    def attention(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Call:
        return lambda: fa101.flash_attention(q, k, v, causal=case.causal, align="bottom_right")

    def attention_out(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Call:
        out = torch.full_like(q, float("nan"))
        return lambda: fa101.flash_attention(
            q, k, v, causal=case.causal, align="bottom_right", out=out
        )

    def cached(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Call:
        lengths = torch.full((case.batch,), case.seqlen_k, dtype=torch.int32, device=q.device)
        return lambda: fa101.flash_attention_with_kvcache(
            q, k, v, seqlens_k=lengths, causal=case.causal
        )

    def append(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Call:
        before = case.seqlen_k - 1
        lengths = torch.full((case.batch,), before, dtype=torch.int32, device=q.device)
        last = [x[:, before:].clone() for x in (k, v)]
        k, v = (x.clone() for x in (k, v))
        for x in (k, v):
            x[:, before:] = float("nan")  # where the new key goes
        return lambda: fa101.flash_attention_with_kvcache(
            q, k, v, k=last[0], v=last[1], seqlens_k=lengths, causal=case.causal
        )

    return [
        Contender("flash_attention", attention, is_peer=False),
        Contender("flash_attention out=", attention_out, is_peer=False),
        Contender("with_kvcache", cached, layout="bshd", is_peer=False),
        Contender("with_kvcache k, v", append, layout="bshd", is_peer=False),
    ]


def fa101_splits(num_splits: int | str) -> Contender:
    """flash_attention_with_kvcache by so many splits; "auto" by as many as it picks."""
    import fa101

    def prepare(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Call:
        options: dict[str, Any] = {"num_splits": num_splits, "layout": "bhsd"}
        out = torch.full_like(q, float("nan"))
        count = num_splits
        if isinstance(count, int) and 128 * count > case.seqlen_k:
            raise UnfitError("fewer than 128 keys a split")
        try:
            if count == "auto":
                count = fa101.plan(q, k, v, strategy="split_kv").num_splits
            fa101.flash_attention_with_kvcache(q, k, v, **options, out=out)
        except (ValueError, RuntimeError) as error:  # unfit here, or no code for this device
            raise UnfitError(str(error)) from None
        out.fill_(float("nan"))
        return PlannedCall(
            lambda: fa101.flash_attention_with_kvcache(q, k, v, **options, out=out),
            f"{count} splits",
        )

    name = "auto" if num_splits == "auto" else f"splits-{num_splits}"
    return Contender(name, prepare, is_peer=False)


def shuffled_pages(
    case: Case, page_size: int, k: Tensor, v: Tensor
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """k and v, (batch, seqlen_k, heads, head_dim), in pages in random order, and the places of the
    pages of all sequences, one after the other."""
    if case.seqlen_k % page_size:
        raise UnfitError(f"{case.seqlen_k} keys are no whole pages of {page_size}")
    # Not torch's own generator, which a capture that failed leaves unusable.
    generator = torch.Generator(k.device).manual_seed(0)
    count = case.batch * case.seqlen_k // page_size
    table = torch.randperm(count, generator=generator, device=k.device)

    def pages(x: Tensor) -> Tensor:
        rows = x.reshape(-1, page_size, *x.shape[2:])
        return torch.empty_like(rows).index_copy_(0, table, rows)

    return (pages(k), pages(v)), table.to(torch.int32)


def fa101_cached(page_size: int | None) -> Contender:
    """flash_attention_with_kvcache, lengths on the device, on the same keys in shuffled pages, or
    in one piece."""
    import fa101

    def prepare(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Call:
        lengths = torch.full((case.batch,), case.seqlen_k, dtype=torch.int32, device=k.device)
        options: dict[str, Any] = {"seqlens_k": lengths, "causal": case.causal}
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if page_size is not None:
            (k, v), table = shuffled_pages(case, page_size, k, v)
            options["page_table"] = table.view(case.batch, -1)
        out = torch.full_like(q, float("nan"))

        def call() -> Tensor:
            fa101.flash_attention_with_kvcache(
                q.transpose(1, 2), k, v, **options, out=out.transpose(1, 2)
            )
            return out

        try:
            call()
        except (NotImplementedError, RuntimeError) as error:  # unfit here, or no code for it
            raise UnfitError(str(error)) from None
        return call

    name = "cached" if page_size is None else f"paged-{page_size}"
    return Contender(name, prepare, is_peer=False)


def fa101_fp8() -> Contender:
    """flash_attention_with_kvcache on the same keys in fp8, which holds what decode is given."""
    import fa101

    def prepare(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Call:
        k, v = (x.to(torch.float8_e4m3fn) for x in (k, v))
        one = torch.ones(case.heads_kv, device=q.device)
        options = {"k_descale": one, "v_descale": one, "causal": case.causal, "layout": "bhsd"}
        out = torch.full_like(q, float("nan"))

        def call() -> Tensor:
            fa101.flash_attention_with_kvcache(q, k, v, **options, out=out)
            return out

        try:
            call()
        except (TypeError, NotImplementedError, RuntimeError) as error:  # float32; no code for it
            raise UnfitError(str(error)) from None
        out.fill_(float("nan"))
        return call

    return Contender("fp8", prepare, is_peer=False, itemsize_kv=1)


def torch_sdpa(backend: SDPBackend) -> Contender:
    def prepare(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Call:
        if case.causal and case.seqlen_q != case.seqlen_k:
            raise UnfitError("is_causal aligns the diagonal top left only")
        if backend is SDPBackend.MATH and q.is_cpu and cpu_math_bytes(case) > 8 << 30:
            raise UnfitError(f"it would take about {cpu_math_bytes(case) >> 30} GiB")
        grouped = {"enable_gqa": True} if case.heads_kv != case.num_heads else {}

        def call() -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, **grouped)

        # Why a backend is not used comes as a warning, and only then the error that none was.
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                call()
            except RuntimeError as error:
                texts = [str(w.message).split(" (Triggered internally")[0] for w in caught]
                whys = [t for t in texts if not t.endswith("because:") and "disabled" not in t]
                if whys and not isinstance(error, torch.OutOfMemoryError):
                    raise UnfitError(whys[0]) from None
                raise
        return call

    name = "torch-" + backend.name.removesuffix("_ATTENTION").lower()
    return Contender(name, prepare, context=lambda: sdpa_kernel(backend))


def cpu_math_bytes(case: Case) -> int:
    """What torch-math takes on a CPU, about, where nothing refuses it: k, v and the scores of every
    query head in float32, twice."""
    rows = 2 * case.seqlen_k * case.head_dim + case.seqlen_q * case.seqlen_k
    return 2 * 4 * case.batch * case.num_heads * rows


def flash_attn_3() -> Contender:
    try:
        func = importlib.import_module("fa3_fwd_interface").flash_attn_func
    except ModuleNotFoundError:
        func = importlib.import_module("flash_attn_interface").flash_attn_func

    def prepare(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Call:
        # Its heuristic (0) picks the splits where there are too few queries to fill the device.
        splits = 0 if case.seqlen_q < case.seqlen_k else 1

        def call() -> Tensor:
            out = func(q, k, v, causal=case.causal, num_splits=splits)
            return out[0] if isinstance(out, tuple) else out  # older versions add the lse

        return call

    return Contender("fa3", prepare, layout="bshd")


def flash_attn_2() -> Contender:
    func = importlib.import_module("flash_attn").flash_attn_func

    def prepare(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Call:
        return lambda: func(q, k, v, causal=case.causal)

    return Contender("flash-attn", prepare, layout="bshd")


def flashinfer() -> Contender:
    module = importlib.import_module("flashinfer")

    def prepare(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Call:
        if case.batch == 1 and case.is_decode:
            options = {"use_tensor_cores": _is_grouped(case)}
            return PlannedCall(
                lambda: module.single_decode_with_kv_cache(q[0, 0], k[0], v[0], **options)[
                    None, None
                ],
                _cores(case),
            )
        if case.is_decode:
            table = torch.arange(k.shape[0] * k.shape[1] // 16, device=q.device)
            return _flashinfer_pages(module, case, q, k, v, table.to(torch.int32), 16)
        if case.batch == 1:
            return lambda: module.single_prefill_with_kv_cache(
                q[0], k[0], v[0], causal=case.causal
            )[None]
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device=q.device)
        wrapper = module.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        starts = torch.arange(case.batch + 1, dtype=torch.int32, device=q.device)
        wrapper.plan(
            starts * case.seqlen_q,
            starts * case.seqlen_k,
            case.num_heads,
            case.heads_kv,
            case.head_dim,
            causal=case.causal,
            q_data_type=q.dtype,
        )
        ragged = [x.flatten(0, 1) for x in (q, k, v)]
        return lambda: wrapper.run(*ragged).view_as(q)

    return Contender("flashinfer", prepare, layout="bshd")


def flashinfer_paged(page_size: int) -> Contender:
    """FlashInfer on the same keys in shuffled pages."""
    module = importlib.import_module("flashinfer")

    def prepare(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Call:
        if not case.is_decode:
            raise UnfitError("only asked for decode")
        (k, v), table = shuffled_pages(case, page_size, k, v)
        return _flashinfer_pages(module, case, q, k, v, table, page_size)

    return Contender(f"flashinfer-paged-{page_size}", prepare, layout="bshd")


def _flashinfer_pages(
    module: Any, case: Case, q: Tensor, k: Tensor, v: Tensor, table: Tensor, page_size: int
) -> Call:
    """Its batch decode, planned; the pages of all sequences follow each other in `table`. A cache
    that is contiguous is one whose pages do, too."""
    if case.seqlen_k % page_size:
        raise UnfitError(f"{case.seqlen_k} keys are no whole pages of {page_size}")
    each = case.seqlen_k // page_size
    starts = each * torch.arange(case.batch + 1, dtype=torch.int32, device=q.device)
    last = torch.full_like(starts[1:], page_size)
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(128 << 20, dtype=torch.uint8, device=q.device),  # it asks for zeros
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=_is_grouped(case),
        paged_kv_indptr_buffer=torch.empty_like(starts),
        paged_kv_indices_buffer=torch.empty_like(table),
        paged_kv_last_page_len_buffer=torch.empty_like(last),
    )
    wrapper.plan(
        starts,
        table,
        last,
        case.num_heads,
        case.heads_kv,
        case.head_dim,
        page_size,
        q_data_type=q.dtype,
    )
    pages = tuple(x.view(-1, page_size, *x.shape[2:]) for x in (k, v))
    queries, out = q[:, 0], torch.full_like(q, float("nan"))

    def call() -> Tensor:
        wrapper.run(queries, pages, out=out[:, 0])
        return out

    return PlannedCall(call, _cores(case))


def _is_grouped(case: Case) -> bool:
    """Where FlashInfer is fastest on tensor cores, by its own documentation."""
    return case.num_heads > case.heads_kv


def _cores(case: Case) -> str:
    return "tensor cores" if _is_grouped(case) else "CUDA cores"


def plain_read() -> Contender:
    """Reads k and v, adds them up, and that is all: what any attention takes at least. The bits are
    taken for float32 numbers, the dtype that torch adds fastest."""

    def prepare(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Call:
        numbers = torch.stack((k, v)).view(torch.float32)
        return lambda: torch.sum(numbers)

    return Contender("plain read", prepare)


# name: how to get it, and the device types it serves.
PEERS: dict[str, tuple[Callable[[], Contender], tuple[str, ...]]] = {
    "torch-flash": (lambda: torch_sdpa(SDPBackend.FLASH_ATTENTION), ("cpu", "cuda")),
    "torch-cudnn": (lambda: torch_sdpa(SDPBackend.CUDNN_ATTENTION), ("cuda",)),
    "torch-efficient": (lambda: torch_sdpa(SDPBackend.EFFICIENT_ATTENTION), ("cuda",)),
    "torch-math": (lambda: torch_sdpa(SDPBackend.MATH), ("cpu", "cuda")),
    "fa3": (flash_attn_3, ("cuda",)),
    "flash-attn": (flash_attn_2, ("cuda",)),
    "flashinfer": (flashinfer, ("cuda",)),
    "flashinfer-paged-16": (lambda: flashinfer_paged(16), ("cuda",)),
}


def find_peers(device_type: str, names: list[str]) -> tuple[list[Contender], dict[str, str]]:
    """The named peers that serve the device and can be imported, and why the others are absent."""
    found: list[Contender] = []
    absent: dict[str, str] = {}
    for name in names:
        load, device_types = PEERS[name]
        if device_type not in device_types:
            continue
        try:
            found.append(load())
        except Exception as error:  # a wheel built against another torch raises anything
            absent[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found, absent
