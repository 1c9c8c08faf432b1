"""The clocks: device events on a GPU, the wall clock on a CPU, cold caches on both."""

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


class Timer(Protocol):
    device: torch.device
    flush_us: float  # what each repeat costs besides the call

    def watch(self, call: Call) -> Stopwatch: ...

    def synchronize(self) -> None: ...


class CudaTimer:
    """Device events on the current stream.

    Before each call 256 MiB are written, more than any L2. The same writes keep the device busy
    while the host prepares the call: as many as it needs, or the time that a slow Python wrapper
    takes on the host would count as device time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._scratch = torch.empty(256 * MIB, dtype=torch.int8, device=device)
        self.flush_us = math.inf  # not known yet
        self.flush_us = 1e3 * statistics.median(self.watch(self.flush).measure(9))

    def watch(self, call: Call) -> CudaStopwatch:
        return CudaStopwatch(self, call)

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


class CpuTimer:
    """The wall clock.

    Thread pools spin for a while after their work is done and would take cores from the next
    contender: before each call one thread writes 64 MiB (the caches), then sleeps.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._scratch: Any = np.empty(64 * MIB, dtype=np.int8)
        self.flush_us = 1e3 * min(self.watch(self.flush).measure(2))

    def watch(self, call: Call) -> CpuStopwatch:
        return CpuStopwatch(self, call)

    def flush(self) -> None:
        self._scratch.fill(0)
        time.sleep(0.02)

    def synchronize(self) -> None:
        pass


class CpuStopwatch:
    def __init__(self, timer: CpuTimer, call: Call) -> None:
        self.host_us = 0.0
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
