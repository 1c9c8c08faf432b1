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

from .peers import Contender, PlannedCall, UnfitError
from .suites import Case
from .timing import Call, Stopwatch, Timer

# Largest error let through, in units of the root mean square of the output row it is in. Rounding
# P and O to a 16-bit dtype costs about half of it; one TF32 product in float32 ten times as much.
TOLERANCE = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 4e-2}

# Query-key pairs the float64 reference computes; where there are more, some heads are left out.
REFERENCE_PAIRS = {"cuda": 1 << 31, "cpu": 1 << 27}

# Numbers it holds at a time, of the scores as of K: half a gigabyte.
REFERENCE_NUMBERS = 1 << 26

# The contenders of a row take turns, so that clocks and temperature are shared.
ROUNDS = 5

Result = dict[str, Any]


class WrongAnswerError(Exception):
    pass


@dataclass
class Guard:
    """Keeps a slow contender from eating the suite's time."""

    max_seconds: float  # of one call
    budget: float  # seconds of timing for a contender in a row
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


def run_case(
    case: Case, contenders: list[Contender], timer: Timer, guard: Guard, ceiling: dict[str, float]
) -> dict[str, Any]:
    """The row as it is stored: the case, and one result for each contender."""
    inputs = make_inputs(case, timer.device)
    heads, expected = reference(case, *inputs)
    results: list[Result] = []
    row = {
        **vars(case),
        "label": case.label,
        "flops": case.flops,
        "bytes": case.bytes,
        "heads_checked": len(heads),
        "heads_in_all": case.batch * case.num_heads,
        "results": results,
    }

    entrants = []
    for contender in contenders:
        results.append({"contender": contender.name, "is_peer": contender.is_peer})
        with verdict(results[-1], timer):
            guard.admit(contender, case)
            call = checked_call(contender, case, inputs, heads, expected, timer, results[-1])
            if isinstance(call, PlannedCall):
                results[-1]["plan"] = call.plan
            watch = timer.watch(call)
            with contender.context():
                seconds = 1e-3 * min(watch.measure(2))
            guard.learn(contender, case, seconds)
            guard.admit(contender, case)
            if seconds > guard.max_seconds:
                raise UnfitError(
                    f"a call took {seconds:.3g} s; --max-seconds is {guard.max_seconds:g}"
                )
            repeats = guard.repeats(seconds, timer.flush_us)
            entrants.append(Entrant(contender, results[-1], watch, repeats))
        if results[-1].get("device_lost"):
            return row

    for turn in range(ROUNDS):
        for entrant in entrants if turn % 2 == 0 else reversed(entrants):
            share = math.ceil((entrant.repeats - len(entrant.times)) / (ROUNDS - turn))
            if share == 0 or "status" in entrant.result:
                continue
            with verdict(entrant.result, timer), entrant.contender.context():
                entrant.times += entrant.watch.measure(share)
            if entrant.result.get("device_lost"):
                return row

    for entrant in entrants:
        if "status" not in entrant.result:
            entrant.result.update(figures(case, entrant, ceiling))
    compare_with_best_peer(results)
    return row


def make_inputs(case: Case, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, case.dtype)

    def normal(heads: int, rows: int) -> Tensor:
        shape = (case.batch, heads, rows, case.head_dim)
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    q = normal(case.num_heads, case.seqlen_q)
    return q, normal(case.heads_kv, case.seqlen_k), normal(case.heads_kv, case.seqlen_k)


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
    inputs: tuple[Tensor, Tensor, Tensor],
    heads: list[int],
    expected: Tensor,
    timer: Timer,
    result: Result,
) -> Call:
    """The contender's call on these inputs, after its answer was found right."""
    bshd = contender.layout == "bshd"
    q, k, v = (x.transpose(1, 2).contiguous() for x in inputs) if bshd else inputs
    with contender.context():
        call = contender.prepare(case, q, k, v)
        # An output allocated and left unwritten shall not find an earlier answer in its memory.
        torch.full_like(q, math.nan)
        out = call()
        timer.synchronize()
    if bshd:
        out = out.transpose(1, 2)
    difference = (out.flatten(0, 1)[heads].double() - expected).abs()
    largest = (difference / expected.square().mean(-1, keepdim=True).sqrt()).max().item()
    if math.isfinite(largest):
        result.update(error=largest, max_abs_error=difference.max().item())
    if not largest <= TOLERANCE[case.dtype]:  # also when it is NaN
        raise WrongAnswerError(
            f"wrong by {largest:.3g} times the root mean square of a row; "
            f"{TOLERANCE[case.dtype]:g} allowed"
        )
    return call


def figures(case: Case, entrant: Entrant, ceiling: dict[str, float]) -> Result:
    median = statistics.median(entrant.times)
    deciles = statistics.quantiles(entrant.times, n=10, method="inclusive")
    rate = case.flops / (1e-3 * median)
    traffic = case.bytes / (1e-3 * median)
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


def compare_with_best_peer(results: list[Result]) -> None:
    """Adds the speed relative to the fastest peer's: 1 is parity, 2 is twice as fast."""
    timed = [result for result in results if result.get("status") == "ok"]
    best = min((result["median_ms"] for result in timed if result["is_peer"]), default=None)
    if best is not None:
        for result in timed:
            result["vs_best_peer"] = best / result["median_ms"]


@contextmanager
def verdict(result: Result, timer: Timer) -> Iterator[None]:
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
        status = "skipped" if result["is_peer"] else "failed"
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
