"""The clocks: device events on a GPU, around calls or replays of a CUDA graph, the wall clock on a
CPU; cold caches on both. And the wall clock of the host that enqueues."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

MIB = 1 << 20
Call = Callable[[], object]


class Stopwatch(Protocol):
    """Bound to one call."""

    # The host's part of a call, microseconds, the best so far; 0 where the host is the device.
    host_us: float

    def measure(self, repeats: int) -> list[float]:
        """Milliseconds of each of so many calls, all caches flushed before each."""


class GraphStopwatch(Stopwatch, Protocol):
    """Bound to a CUDA graph; measure() gives milliseconds of a replay over the calls in it. Which
    caches are cold is up to the calls."""

    calls: int
    outputs: list[Any]  # what the captured calls returned; each replay writes there

    def replay(self) -> None: ...


class Timer(Protocol):
    device: torch.device
    flush_us: float  # what each repeat costs besides the call
    l2_bytes: int

    def watch(self, call: Call) -> Stopwatch: ...

    def capture(self, calls: list[Call]) -> GraphStopwatch: ...

    def synchronize(self) -> None: ...


class CudaTimer:
    """Device events on the current stream.

    Before each call 256 MiB are written, more than any L2. The same writes keep the device busy
    while the host prepares the call: as many as it needs, or the time that a slow Python wrapper
    takes on the host would count as device time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        on_gpu = device.type == "cuda"
        self.l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size if on_gpu else 0
        self._scratch = torch.empty(256 * MIB, dtype=torch.int8, device=device)
        self.flush_us = math.inf  # not known yet
        self.flush_us = 1e3 * statistics.median(self.watch(self.flush).measure(9))

    def watch(self, call: Call) -> CudaStopwatch:
        return CudaStopwatch(self, call)

    def capture(self, calls: list[Call]) -> CudaGraphStopwatch:
        return CudaGraphStopwatch(self, calls)

    def flush(self) -> None:
        self._scratch.zero_()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


class CudaStopwatch:
    def __init__(self, timer: CudaTimer, call: Call) -> None:
        self.host_us = 0.0
        self._timer = timer
        self._call = call

    def measure(self, repeats: int) -> list[float]:
        # 30 us: the host's own part of a repeat, events and launches.
        writes = 1 + min(16, int((self.host_us + 30) / self._timer.flush_us))
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        host = []
        self._timer.synchronize()
        for start, end in events:
            for _ in range(writes):
                self._timer.flush()
            start.record()
            begin = time.perf_counter()
            self._call()
            host.append(1e6 * (time.perf_counter() - begin))
            end.record()
        self._timer.synchronize()
        self.host_us = min(host) if self.host_us == 0 else min(self.host_us, *host)
        return [start.elapsed_time(end) for start, end in events]


class CudaGraphStopwatch:
    host_us = 0.0

    def __init__(self, timer: CudaTimer, calls: list[Call]) -> None:
        self.calls = len(calls)
        self._calls = calls  # every replay reads what they hold
        self.outputs: list[Any] = []
        self._timer = timer
        self._graph = torch.cuda.CUDAGraph()
        first: Exception | None = None
        try:
            # A capture that fails leaves its stream as the current one; the outer context does not.
            with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(self._graph):
                try:
                    for call in calls:
                        self.outputs.append(call())
                except Exception as error:
                    first = error
                    raise
        except Exception as error:
            # To end a capture that failed is an error as well, which hides why it failed.
            raise first or error from None

    def replay(self) -> None:
        self._graph.replay()

    def measure(self, repeats: int) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        self._timer.synchronize()
        # Keeps the device busy while the host enqueues the first replay; later ones queue up.
        self._timer.flush()
        for start, end in events:
            start.record()
            self._graph.replay()
            end.record()
        self._timer.synchronize()
        return [start.elapsed_time(end) / self.calls for start, end in events]


class CpuTimer:
    """The wall clock.

    Thread pools spin for a while after their work is done and would take cores from the next
    contender: before each call one thread writes 64 MiB (the caches), then sleeps.
    """

    l2_bytes = 0

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._scratch: Any = np.empty(64 * MIB, dtype=np.int8)
        self.flush_us = 1e3 * min(self.watch(self.flush).measure(2))

    def watch(self, call: Call) -> WallStopwatch:
        return WallStopwatch(self, call)

    def capture(self, calls: list[Call]) -> GraphStopwatch:
        raise RuntimeError("a CPU has no CUDA graphs")

    def flush(self) -> None:
        self._scratch.fill(0)
        time.sleep(0.02)

    def synchronize(self) -> None:
        pass


class HostTimer:
    """What a call costs the host: the wall clock of 10,000 calls enqueued one after the other, over
    the calls. On a CPU a call returns when it is done, and that is the time of the whole call."""

    CALLS = 10_000
    MOST_SECONDS = 2.0  # for them; fewer calls where they take longer

    flush_us = 0.0
    l2_bytes = 0

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def watch(self, call: Call) -> HostStopwatch:
        return HostStopwatch(self, call)

    def capture(self, calls: list[Call]) -> GraphStopwatch:
        raise RuntimeError("the host's time is measured of eager calls")

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class HostStopwatch:
    host_us = 0.0

    def __init__(self, timer: HostTimer, call: Call) -> None:
        self.calls = 0  # in a row; not known yet
        # How far the device was behind at the end, at most. Many calls are a queue that was full:
        # the driver holds about a thousand launches, then the host waits.
        self.calls_behind = 0.0
        self._timer = timer
        self._call = call

    def measure(self, repeats: int) -> list[float]:
        if self.calls == 0:
            few = min(100, self._timer.CALLS)
            in_time = int(self._timer.MOST_SECONDS / self._enqueue(few)[0])
            self.calls = max(few, min(self._timer.CALLS, in_time))
        times = []
        for _ in range(repeats):
            seconds, wait = self._enqueue(self.calls)
            times.append(1e3 * seconds)
            self.calls_behind = max(self.calls_behind, wait / seconds)
        return times

    def _enqueue(self, calls: int) -> tuple[float, float]:
        """Seconds of a call, and how long the device went on after the last."""
        self._timer.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            self._call()
        enqueued = time.perf_counter()
        self._timer.synchronize()
        return (enqueued - begin) / calls, time.perf_counter() - enqueued


class WallStopwatch:
    host_us = 0.0

    def __init__(self, timer: CpuTimer, call: Call) -> None:
        self._timer = timer
        self._call = call

    def measure(self, repeats: int) -> list[float]:
        times = []
        for _ in range(repeats):
            self._timer.flush()
            begin = time.perf_counter()
            self._call()
            times.append(1e3 * (time.perf_counter() - begin))
        return times


def make_timer(device: torch.device) -> Timer:
    return CudaTimer(device) if device.type == "cuda" else CpuTimer()


def ceilings(timer: Timer, dtypes: set[str]) -> dict[str, float]:
    """What the device reaches today: FLOP/s of torch's matrix product in each dtype (no TF32 in
    float32: torch's default), and bytes/s of a copy, read and written ("bytes"). On a CPU 16-bit
    numbers are for storage and float32 is the ceiling of all."""
    on_gpu = timer.device.type == "cuda"
    n = 8192 if on_gpu else 2048
    reached = {}
    for dtype in sorted(dtypes) if on_gpu else ["float32"]:
        a, b = (torch.randn(n, n, device=timer.device).to(getattr(torch, dtype)) for _ in "ab")
        out = torch.empty_like(a)
        reached[dtype] = 2.0 * n**3 / _best_seconds(timer, partial(torch.mm, a, b, out=out))
    source = torch.ones((2048 if on_gpu else 256) * MIB, dtype=torch.int8, device=timer.device)
    target = torch.empty_like(source)
    reached["bytes"] = 2.0 * source.numel() / _best_seconds(timer, lambda: target.copy_(source))
    return reached


def _best_seconds(timer: Timer, call: Call) -> float:
    watch = timer.watch(call)
    warm = min(watch.measure(2))
    return 1e-3 * min(watch.measure(max(1, min(10, math.ceil(1000 / warm)))))
