"""Python threads, the GIL, fork, and limits on threads."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import fa101
from helpers import DEVICES, qkv, run_python

SHAPES = [(1, 2, 33, 65, 16), (2, 1, 130, 31, 64), (1, 4, 1, 300, 40), (3, 2, 64, 64, 8)]


@pytest.mark.parametrize("device", DEVICES)
def test_threads_do_not_meet(device):
    """FA-043: 16 threads, different shapes, dtypes and (on CUDA) streams; all equal the serial."""
    problems = []
    for i in range(16):
        dtype = (torch.float32, torch.float16)[i % 2]
        q, k, v = qkv(*SHAPES[i % len(SHAPES)], dtype=dtype, device=device, seed=i)
        problems.append((q, k, v, fa101.flash_attention(q, k, v, causal=True)))
    if device == "cuda":
        torch.cuda.synchronize()

    def repeat(problem):
        q, k, v, expected = problem
        with torch.cuda.stream(torch.cuda.Stream() if device == "cuda" else None):
            for _ in range(50):
                if not torch.equal(fa101.flash_attention(q, k, v, causal=True), expected):
                    return False
        return True

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(repeat, problems))


class Busy:
    """A long call in another thread."""

    def __init__(self, **options):
        self.q, self.k, self.v = qkv(1, 4, 2048, 2048, 64)
        self.options = options

    def __enter__(self):
        self.thread = threading.Thread(target=self.call)
        self.thread.start()
        return self

    def call(self):
        fa101.flash_attention(self.q, self.k, self.v, kernel="cpu_naive", **self.options)

    def is_running(self):
        return self.thread.is_alive()

    def __exit__(self, *_):
        self.thread.join()


def test_gil_is_released():
    """FA-043: another thread keeps counting while a call runs."""
    longest, ticks = 0.0, 0
    with Busy() as busy:
        last = time.perf_counter()
        while busy.is_running():
            time.sleep(1e-4)
            now = time.perf_counter()
            longest, last, ticks = max(longest, now - last), now, ticks + 1
    started = time.perf_counter()
    busy.call()
    whole = time.perf_counter() - started
    assert ticks > 20
    assert longest < max(0.5 * whole, 0.05)


def most_threads_during_a_call():
    """How many threads the process had at most, less what it had before."""
    idle = len(os.listdir("/proc/self/task"))
    most = 0
    with Busy() as busy:
        while busy.is_running():
            most = max(most, len(os.listdir("/proc/self/task")))
    return most - idle


def test_exit_in_the_middle_of_calls():
    """FA-091: daemon threads that compute when the interpreter ends: exit code 0, not a word."""
    run_python(
        """
import threading, time
import numpy as np, fa101
q = np.ones((2, 4, 512, 64), np.float32)
def call_for_ever():
    while True:
        fa101.flash_attention(q, q, q)
for _ in range(3):
    threading.Thread(target=call_for_ever, daemon=True).start()
time.sleep(0.2)
""",
        quiet=True,
    )


def test_thread_limits():
    """FA-090: set_num_threads and torch's limit are honoured. The calling thread is one of them."""
    before, torch_before = fa101.get_num_threads(), torch.get_num_threads()
    try:
        fa101.set_num_threads(1)
        assert fa101.get_num_threads() == 1
        assert most_threads_during_a_call() <= 1
        fa101.set_num_threads(4)
        torch.set_num_threads(1)
        assert most_threads_during_a_call() <= 1
        torch.set_num_threads(3)
        assert 2 <= most_threads_during_a_call() <= 3
    finally:
        fa101.set_num_threads(before)
        torch.set_num_threads(torch_before)
    for n in (0, -1):
        with pytest.raises(ValueError, match=f"n is {n}; it must be at least 1"):
            fa101.set_num_threads(n)


def test_thread_count_does_not_change_bits():
    q, k, v = qkv(2, 4, 300, 300, 64)
    before = fa101.get_num_threads()
    results = []
    try:
        for n in (1, 2, 3, 7):
            fa101.set_num_threads(n)
            results.append(fa101.flash_attention(q.numpy(), k.numpy(), v.numpy(), causal=True))
    finally:
        fa101.set_num_threads(before)
    assert all((r == results[0]).all() for r in results)


@pytest.mark.parametrize(
    ("variable", "value", "threads"),
    [("OMP_NUM_THREADS", "1", 1), ("FA101_NUM_THREADS", "3", 3), ("OMP_NUM_THREADS", "5,2", 5)],
)
def test_environment(variable, value, threads):
    code = "import fa101; print(fa101.get_num_threads())"
    assert run_python(code, **{variable: value}) == f"{threads}\n"


def test_fork():
    """FA-090: a child forked after a threaded call computes the same; so does a spawned one."""
    run_python(
        """
import multiprocessing, os, signal, sys
import numpy as np, fa101

def compute(seed):
    q, k, v = np.random.default_rng(seed).standard_normal((3, 2, 4, 256, 64), np.float32)
    return fa101.flash_attention(q, k, v, causal=True)

expected = compute(0)
child = os.fork()
if child == 0:
    signal.alarm(30)
    os._exit(0 if (compute(0) == expected).all() else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    )


def test_spawn(tmp_path):
    script = tmp_path / "spawned.py"
    script.write_text(
        """
import multiprocessing
import numpy as np, fa101

def compute(seed):
    q, k, v = np.random.default_rng(seed).standard_normal((3, 1, 2, 64, 16), np.float32)
    return fa101.flash_attention(q, k, v)

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        results = pool.map(compute, [0, 1])
    assert all((r == compute(i)).all() for i, r in enumerate(results))
"""
    )
    subprocess.run([sys.executable, script], check=True, timeout=60)
