"""The problems that are measured. Plain data, no PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_ITEM_SIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Case:
    """One row of a table. ``causal`` aligns the diagonal bottom right, as a KV cache needs."""

    name: str
    batch: int
    num_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    dtype: str
    causal: bool = False
    num_heads_kv: int = 0  # 0: as many as num_heads

    @property
    def heads_kv(self) -> int:
        return self.num_heads_kv or self.num_heads

    @property
    def mask(self) -> str:
        return "causal" if self.causal else "full"

    @property
    def label(self) -> str:
        """What ``--filter`` and the tables' filters look into."""
        return f"{self.name} {self.mask} {self.dtype}"

    @property
    def is_decode(self) -> bool:
        """One query reads the whole cache: memory is the limit, not arithmetic."""
        return self.seqlen_q == 1

    @property
    def flops(self) -> float:
        """Two products of 2 D operations a visible pair; by convention a square causal mask
        shows exactly half, diagonal and all."""
        pairs: float = self.seqlen_q * self.seqlen_k
        if self.causal and self.seqlen_q == self.seqlen_k:
            pairs /= 2
        elif self.causal:
            offset = self.seqlen_k - self.seqlen_q
            pairs = sum(max(0, i + 1 + offset) for i in range(self.seqlen_q))
        return 4.0 * self.batch * self.num_heads * pairs * self.head_dim

    @property
    def bytes(self) -> int:
        """The least traffic: q, k and v read once, o written once."""
        return self.bytes_with(_ITEM_SIZE[self.dtype])

    def bytes_with(self, itemsize_kv: int) -> int:
        """The same where an element of k and v has so many bytes."""
        rows_q, rows_kv = self.num_heads * 2 * self.seqlen_q, self.heads_kv * 2 * self.seqlen_k
        row_bytes = rows_q * _ITEM_SIZE[self.dtype] + rows_kv * itemsize_kv
        return self.batch * row_bytes * self.head_dim


# The shapes of the two projects fa101 grew out of: batch, heads, seqlen_q, seqlen_k, head_dim.
_SEEDS = {
    "fa101": (8, 16, 256, 256, 64),
    "llama-7b": (1, 32, 4096, 4096, 128),
    "bert-large": (8, 32, 2048, 2048, 128),
    "gpt-4": (1, 16, 2048, 2048, 256),
    "large-head": (1, 8, 1024, 1024, 512),
    "massive-head": (1, 4, 512, 512, 1024),
    "decode": (1, 8, 1, 8192, 128),
}


def _seeds() -> Iterator[Case]:
    for dtype in ("float16", "float32"):
        for name, shape in _SEEDS.items():
            yield Case(name, *shape, dtype)
            if name == "fa101":
                yield Case(name, *shape, dtype, causal=True)


def _sixteen_k_tokens(
    head_dims: tuple[int, ...], seqlens: tuple[int, ...], dtype: str
) -> Iterator[Case]:
    """The grid of the FlashAttention papers: 16k tokens in all, hidden size 2048."""
    for head_dim in head_dims:
        for causal in (False, True):
            for seqlen in seqlens:
                name = f"d{head_dim} s{seqlen}"
                batch, heads = 16384 // seqlen, 2048 // head_dim
                yield Case(name, batch, heads, seqlen, seqlen, head_dim, dtype, causal)


def _cpu() -> Iterator[Case]:
    for shape in ((1, 8, 2048, 2048, 128), (8, 16, 256, 256, 64), (1, 8, 1024, 1024, 64)):
        batch, heads, seqlen, _, head_dim = shape
        for causal in (False, True):
            yield Case(f"b{batch} h{heads} s{seqlen} d{head_dim}", *shape, "float32", causal)


def _large_d() -> Iterator[Case]:
    yield Case("large-head", 1, 8, 1024, 1024, 512, "float16")
    yield Case("massive-head", 1, 4, 512, 512, 1024, "float16")
    for head_dim in (320, 512, 768, 1024):
        for causal in (False, True):
            yield Case(f"d{head_dim} s8192", 1, 32, 8192, 8192, head_dim, "float16", causal)


# One query against a cache: batch, heads, heads_kv, keys.
_DECODE = (
    (1, 8, 8, 8192),
    (1, 32, 8, 8192),
    (1, 32, 8, 65536),
    (8, 32, 8, 8192),
    (1, 64, 8, 131072),
    (16, 32, 32, 4096),
    (64, 32, 8, 8192),
)


def _decode() -> Iterator[Case]:
    for batch, heads, heads_kv, keys in _DECODE:
        name = f"b{batch} h{heads}/{heads_kv} s{keys}"
        yield Case(name, batch, heads, 1, keys, 128, "bfloat16", num_heads_kv=heads_kv)


def _auto() -> Iterator[Case]:
    """Shapes on both sides of every border of the planner: prefill, chunks of it, decode."""
    for head_dim in (64, 128, 256):
        for batch, seqlen in ((1, 128), (1, 1024), (16, 512), (1, 8192)):
            name = f"d{head_dim} prefill b{batch} s{seqlen}"
            yield Case(name, batch, 16, seqlen, seqlen, head_dim, "bfloat16", causal=True)
        for seqlen_k in (1024, 16384):
            for batch in (1, 8, 64):
                name = f"d{head_dim} decode b{batch} s{seqlen_k}"
                yield Case(name, batch, 32, 1, seqlen_k, head_dim, "bfloat16", num_heads_kv=8)
            for seqlen_q in (8, 64, 256):
                name = f"d{head_dim} chunk of {seqlen_q} s{seqlen_k}"
                yield Case(name, 1, 32, seqlen_q, seqlen_k, head_dim, "bfloat16", True, 8)
    for dtype, head_dims in (("bfloat16", (512, 1024)), ("float32", (64, 128))):
        for head_dim in head_dims:
            yield Case(f"d{head_dim} prefill b1 s1024", 1, 16, 1024, 1024, head_dim, dtype, True)
            yield Case(f"d{head_dim} decode b1 s8192", 1, 8, 1, 8192, head_dim, dtype)
            yield Case(f"d{head_dim} chunk of 64 s4096", 1, 8, 64, 4096, head_dim, dtype, True)


def _chunks() -> Iterator[Case]:
    """Grouped heads: a chunk of every prompt of a batch against its cache, and whole prompts."""
    grid = [(128, batch, heads) for batch in (1, 8, 32) for heads in (32, 64)]
    for head_dim, batch, heads in [*grid, (64, 8, 32), (256, 8, 32)]:
        for seqlen_q in (16, 32, 64, 128, 256):
            name = f"d{head_dim} b{batch} h{heads}/8 chunk of {seqlen_q} s8192"
            yield Case(name, batch, heads, seqlen_q, 8192, head_dim, "bfloat16", True, 8)
    for heads in (32, 64):
        for seqlen in (128, 512, 2048, 8192):
            name = f"d128 b{16384 // seqlen} h{heads}/8 prompt of {seqlen}"
            yield Case(name, 16384 // seqlen, heads, seqlen, seqlen, 128, "bfloat16", True, 8)


def _host() -> Iterator[Case]:
    """So small that a GPU is done before the host has enqueued the next call."""
    yield Case("prefill b1 s64", 1, 8, 64, 64, 64, "bfloat16", causal=True)
    yield Case("decode b1 s128", 1, 8, 1, 128, 128, "bfloat16")


def _splits() -> Iterator[Case]:
    """Where to search for the best number of splits."""
    for batch in (1, 2, 4, 8, 16, 32):
        for heads in (8, 32):
            for keys in (1024, 4096, 16384, 65536, 131072):
                name = f"b{batch} h{heads}/8 s{keys}"
                yield Case(name, batch, heads, 1, keys, 128, "bfloat16", num_heads_kv=8)


SUITES: dict[str, tuple[Case, ...]] = {
    "seeds": tuple(_seeds()),
    "prefill": tuple(
        _sixteen_k_tokens((64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384), "bfloat16")
    ),
    "decode": tuple(_decode()),
    "splits": tuple(_splits()),
    "large-d": tuple(_large_d()),
    "fp32": tuple(_sixteen_k_tokens((64, 128), (1024, 4096), "float32")),
    "auto": tuple(_auto()),
    "chunks": tuple(_chunks()),
    "host": tuple(_host()),
    "cpu": tuple(_cpu()),
}


def select(suite: str, filters: list[str]) -> list[Case]:
    """The suite's cases whose label holds every filter: ``["d128", "causal"]``."""
    return [case for case in SUITES[suite] if all(text in case.label for text in filters)]
