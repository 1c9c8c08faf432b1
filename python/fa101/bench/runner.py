"""One row: every contender is checked first, then those that passed are timed in turns."""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .peers import Contender, PlannedCall, UnfitError, plain_read
from .report import is_lost
from .suites import Case
from .timing import Call, GraphStopwatch, HostStopwatch, Stopwatch, Timer

# Largest error let through, in units of the root mean square of the output row it is in. Rounding
# P and O to a 16-bit dtype costs about half of it; one TF32 product in float32 ten times as much.
TOLERANCE = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 4e-2}

# Query-key pairs the float64 reference computes; where there are more, some heads are left out.
REFERENCE_PAIRS = {"cuda": 1 << 31, "cpu": 1 << 27}

# Numbers it holds at a time, of the scores as of K: half a gigabyte.
REFERENCE_NUMBERS = 1 << 26

# The contenders of a row take turns, so that clocks and temperature are shared.
ROUNDS = 5

# A CUDA graph walks over equal caches that together are so many times the L2: when it comes back to
# one, nothing of it is left there.
L2_TIMES = 4

# Calls in a graph, or more: what a replay costs besides them is then below their noise. Of calls
# that take over a millisecond it is anyway.
GRAPH_CALLS = 16

Result = dict[str, Any]


class WrongAnswerError(Exception):
    pass


@dataclass
class Guard:
    """Keeps a slow contender from eating the suite's time."""

    max_seconds: float  # of one call
    budget: float  # seconds of timing for a contender in a row
    host_loops: int = 0  # how often a HostTimer's many calls are measured
    rates: dict[tuple[str, str], float] = field(default_factory=dict)

    def admit(self, contender: Contender, case: Case) -> None:
        rate = self.rates.get((contender.name, case.dtype))
        if rate is not None and case.flops / rate > self.max_seconds:
            raise UnfitError(
                f"a call takes over --max-seconds {self.max_seconds:g} "
                f"at the {rate / 1e12:.3g} TFLOP/s reached before"
            )

    def learn(self, contender: Contender, case: Case, seconds: float) -> None:
        if not case.is_decode:
            key = contender.name, case.dtype
            self.rates[key] = max(self.rates.get(key, 0.0), case.flops / seconds)

    def repeats(self, seconds: float, flush_us: float) -> int:
        if self.host_loops:
            return self.host_loops
        in_budget = int(self.budget / (seconds + 1e-6 * flush_us))
        return max(3 if seconds > 0.05 else 7, min(200, in_budget))


@dataclass
class Entrant:
    """A contender that passed the check."""

    contender: Contender
    result: Result
    watch: Stopwatch
    repeats: int
    times: list[float] = field(default_factory=list)


class Inputs:
    """q, k and v of a case, in the layouts that are asked for and as many equal copies."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.base = make_inputs(case, device)
        self._made = {("bhsd", 0): self.base}

    def get(self, layout: str, copy: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        if (layout, copy) not in self._made:
            views = [x.transpose(1, 2) if layout == "bshd" else x for x in self.base]
            q, k, v = (x.clone(memory_format=torch.contiguous_format) for x in views)
            self._made[layout, copy] = q, k, v
        return self._made[layout, copy]


@dataclass
class Answer:
    """Attention in float64 of the (batch, head) pairs that were computed."""

    heads: list[int]
    expected: Tensor  # (pairs, seqlen_q, head_dim)


def run_case(
    case: Case,
    contenders: list[Contender],
    timer: Timer,
    guard: Guard,
    ceiling: dict[str, float],
    by_graph: bool = False,
) -> dict[str, Any]:
    """The row as it is stored: the case, and one result for each contender. `by_graph` times CUDA
    graphs beside the eager calls, and what only reads the cache beside the contenders."""
    inputs = Inputs(case, timer.device)
    answer = Answer(*reference(case, *inputs.base))
    results: list[Result] = []
    row = {
        **vars(case),
        "label": case.label,
        "flops": case.flops,
        "bytes": case.bytes,
        "heads_checked": len(answer.heads),
        "heads_in_all": case.batch * case.num_heads,
        "results": results,
    }
    caches = 0
    if by_graph:
        caches = row["caches"] = max(2, math.ceil(L2_TIMES * timer.l2_bytes / case.bytes))

    entrants: list[Entrant] = []
    for contender in contenders:
        results.append({"contender": contender.name, "is_peer": contender.is_peer})
        copies = caches
        if contender.itemsize_kv:
            results[-1]["itemsize_kv"] = contender.itemsize_kv
            copies *= 2  # of half the bytes
        entrants += admitted(contender, case, inputs, answer, timer, guard, results[-1], copies)
        if is_lost(row):
            return row
    if by_graph:
        row["plain_read"] = {}
        plain = plain_read()
        entrants += admitted(plain, case, inputs, None, timer, guard, row["plain_read"], caches)
        if is_lost(row):
            return row

    for turn in range(ROUNDS):
        for entrant in entrants if turn % 2 == 0 else reversed(entrants):
            share = math.ceil((entrant.repeats - len(entrant.times)) / (ROUNDS - turn))
            if share == 0 or "status" in entrant.result:
                continue
            contender = entrant.contender
            with verdict(contender, entrant.result, timer), contender.context():
                entrant.times += entrant.watch.measure(share)
            if is_lost(row):
                return row

    for entrant in entrants:
        if "status" not in entrant.result:
            entrant.result.update(figures(case, entrant, ceiling))
            if isinstance(entrant.watch, HostStopwatch):
                behind = math.ceil(entrant.watch.calls_behind)
                entrant.result.update(calls=entrant.watch.calls, calls_behind=behind)
    rivals = [result for result in results if "itemsize_kv" not in result]
    compare_with_best_peer([(result["is_peer"], result) for result in rivals])
    compare_with_best_peer([(result["is_peer"], result.get("graph", {})) for result in rivals])
    return row


def admitted(
    contender: Contender,
    case: Case,
    inputs: Inputs,
    answer: Answer | None,
    timer: Timer,
    guard: Guard,
    result: Result,
    caches: int,
) -> list[Entrant]:
    """The contender's eager call, and a CUDA graph over `caches` caches unless that is 0, as far as
    they pass. `answer` is None for what computes no attention."""
    entrants = []
    with verdict(contender, result, timer):
        guard.admit(contender, case)
        call = checked_call(contender, case, inputs, answer, timer, result)
        if isinstance(call, PlannedCall):
            result["plan"] = call.plan
        watch = timer.watch(call)
        with contender.context():
            seconds = 1e-3 * min(watch.measure(2))
        guard.learn(contender, case, seconds)
        guard.admit(contender, case)
        if seconds > guard.max_seconds:
            raise UnfitError(f"a call took {seconds:.3g} s; --max-seconds is {guard.max_seconds:g}")
        repeats = guard.repeats(seconds, timer.flush_us)
        entrants.append(Entrant(contender, result, watch, repeats))
    if caches == 0 or not entrants:
        return entrants
    graph = result["graph"] = {}
    with verdict(contender, graph, timer):
        passes = 1 if seconds > 1e-3 else math.ceil(GRAPH_CALLS / caches)
        replay = checked_graph(contender, case, inputs, answer, timer, caches, passes)
        graph["calls"] = replay.calls
        seconds = 1e-3 * replay.calls * min(replay.measure(2))
        entrants.append(Entrant(contender, graph, replay, guard.repeats(seconds, 0)))
    return entrants


def make_inputs(case: Case, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, case.dtype)

    def normal(heads: int, rows: int) -> Tensor:
        shape = (case.batch, heads, rows, case.head_dim)
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    q = normal(case.num_heads, case.seqlen_q)
    k, v = (normal(case.heads_kv, case.seqlen_k) for _ in "kv")
    if case.is_decode and case.dtype != "float32":  # what fp8 holds too, for all to be asked alike
        k, v = (x.to(torch.float8_e4m3fn).to(dtype) for x in (k, v))
    return q, k, v


def reference(case: Case, q: Tensor, k: Tensor, v: Tensor) -> tuple[list[int], Tensor]:
    """Attention in float64 on the same device: which (batch, head) pairs it covers, evenly spread,
    and their output (pairs, seqlen_q, head_dim)."""
    in_all = case.batch * case.num_heads
    pairs = case.seqlen_q * case.seqlen_k
    covered = max(1, min(in_all, REFERENCE_PAIRS[q.device.type] // pairs))
    heads = [i * in_all // covered for i in range(covered)]
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    group = case.num_heads // case.heads_kv  # consecutive query heads share a head of k and v
    heads_kv = [head // group for head in heads]
    expected = q.new_empty(covered, case.seqlen_q, case.head_dim, dtype=torch.float64)
    # Heads at a time, or else rows of one.
    together = max(1, REFERENCE_NUMBERS // max(pairs, case.seqlen_k * case.head_dim))
    rows = max(1, REFERENCE_NUMBERS // case.seqlen_k)
    keys = torch.arange(case.seqlen_k, device=q.device)
    for head in range(0, covered, together):
        part = slice(head, head + together)
        q64 = q[heads[part]].double()
        k64, v64 = (x[heads_kv[part]].double() for x in (k, v))
        q64 /= math.sqrt(case.head_dim)
        for row in range(0, case.seqlen_q, rows):
            scores = q64[:, row : row + rows] @ k64.mT
            if case.causal:
                last = torch.arange(row, row + scores.shape[1], device=q.device)
                last += case.seqlen_k - case.seqlen_q
                scores.masked_fill_(keys > last[:, None], -math.inf)
            expected[part, row : row + rows] = scores.softmax(-1) @ v64
    return heads, expected


def checked_call(
    contender: Contender,
    case: Case,
    inputs: Inputs,
    answer: Answer | None,
    timer: Timer,
    result: Result,
) -> Call:
    """The contender's call on these inputs, after its answer was found right."""
    q, k, v = inputs.get(contender.layout)
    with contender.context():
        call = contender.prepare(case, q, k, v)
        # An output allocated and left unwritten shall not find an earlier answer in its memory.
        torch.full_like(q, math.nan)
        out = call()
        timer.synchronize()
    if answer is not None:
        check(contender, case, out, answer, result)
    return call


def checked_graph(
    contender: Contender,
    case: Case,
    inputs: Inputs,
    answer: Answer | None,
    timer: Timer,
    caches: int,
    passes: int,
) -> GraphStopwatch:
    """A CUDA graph of one call on each of the caches, so many times, after all that a replay writes
    was found right."""
    with contender.context():
        copies = [inputs.get(contender.layout, copy) for copy in range(caches)]
        calls = [contender.prepare(case, *copy) for copy in copies]
        for call in calls:  # what a first call loads or allocates for good is no part of the graph
            call()
        graph = timer.capture(calls * passes)
    if answer is not None:
        for out in graph.outputs:
            out.fill_(math.nan)
        graph.replay()
        timer.synchronize()
        for out in graph.outputs:
            check(contender, case, out, answer, {})
    return graph


def check(contender: Contender, case: Case, out: Tensor, answer: Answer, result: Result) -> None:
    if contender.layout == "bshd":
        out = out.transpose(1, 2)
    difference = (out.flatten(0, 1)[answer.heads].double() - answer.expected).abs()
    size = answer.expected.square().mean(-1, keepdim=True).sqrt()
    largest = (difference / size).max().item()
    if math.isfinite(largest):
        result.update(error=largest, max_abs_error=difference.max().item())
    if not largest <= TOLERANCE[case.dtype]:  # also when it is NaN
        raise WrongAnswerError(
            f"wrong by {largest:.3g} times the root mean square of a row; "
            f"{TOLERANCE[case.dtype]:g} allowed"
        )


def figures(case: Case, entrant: Entrant, ceiling: dict[str, float]) -> Result:
    median = statistics.median(entrant.times)
    deciles = statistics.quantiles(entrant.times, n=10, method="inclusive")
    rate = case.flops / (1e-3 * median)
    itemsize_kv = entrant.contender.itemsize_kv
    traffic = (case.bytes_with(itemsize_kv) if itemsize_kv else case.bytes) / (1e-3 * median)
    peak = ceiling.get(case.dtype) or ceiling["float32"]  # a CPU has only that one
    share = traffic / ceiling["bytes"] if case.is_decode else rate / peak
    return {
        "status": "ok",
        "median_ms": median,
        "best_ms": min(entrant.times),
        "p10_ms": deciles[0],
        "p90_ms": deciles[-1],
        "host_us": entrant.watch.host_us or None,
        "tflops": rate / 1e12,
        "gbytes_per_s": traffic / 1e9,
        "share_of_ceiling": share,
        "times_ms": [float(f"{t:.5g}") for t in entrant.times],
    }


def compare_with_best_peer(results: list[tuple[bool, Result]]) -> None:
    """Adds the speed relative to the fastest peer's: 1 is parity, 2 is twice as fast."""
    timed = [(is_peer, result) for is_peer, result in results if result.get("status") == "ok"]
    best = min((result["median_ms"] for is_peer, result in timed if is_peer), default=None)
    if best is not None:
        for _, result in timed:
            result["vs_best_peer"] = best / result["median_ms"]


@contextmanager
def verdict(contender: Contender, result: Result, timer: Timer) -> Iterator[None]:
    """Turns what a contender raises into its result: skipped or failed, and why."""
    try:
        yield
        return
    except UnfitError as error:
        result.update(status="skipped", reason=str(error))
        return
    except WrongAnswerError as error:
        result.update(status="failed", reason=str(error))
        return
    except (torch.OutOfMemoryError, MemoryError) as error:
        result.update(status="skipped", reason=in_short(error))
    except Exception as error:
        # A peer refuses a case by raising; fa101 was asked beforehand and has no excuse.
        status = "skipped" if contender.is_peer else "failed"
        result.update(status=status, reason=in_short(error))
    gc.collect()
    try:
        timer.synchronize()
        if timer.device.type == "cuda":
            torch.cuda.empty_cache()
    except RuntimeError:  # an illegal address, say: the CUDA context is beyond use
        result.update(status="failed", device_lost=True)


def in_short(error: BaseException) -> str:
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ". ".join(line.split(". ")[:2]).removesuffix(".")
