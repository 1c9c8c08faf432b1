"""Importing: without a GPU, before and after torch, without torch; types and stubs."""

import inspect
import subprocess
from pathlib import Path

import pytest

import fa101
from fa101 import _fa101, functional
from helpers import run_python

EXTENSION = Path(_fa101.__file__)

USE = """
import sys, numpy as np, fa101
q = np.ones((1, 2, 3, 8), np.float32)
assert (fa101.flash_attention(q, q, 2 * q, causal=True) == 2).all()
"""


def test_import_needs_no_framework():
    """FA-095: not even NumPy."""
    run_python(
        "import sys, fa101\n"
        "loaded = {'torch', 'numpy', 'jax', 'cupy'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    run_python(USE + "assert 'torch' not in sys.modules and 'jax' not in sys.modules")


@pytest.mark.parametrize("first", ["import torch, fa101", "import fa101, torch"])
def test_import_order(first):
    """FA-095: ours before torch, torch before ours."""
    run_python(
        first + "\nq = torch.ones(1, 1, 2, 4)\nassert (fa101.flash_attention(q, q, q) == 1).all()"
    )


def symbols(*options):
    command = ["nm", "-D", "-C", *options, EXTENSION]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        pytest.skip("nm (binutils) is not installed")


def test_no_torch_symbols():
    """FA-095: DLPack only, so one wheel serves every torch."""
    undefined = symbols("--undefined-only")
    assert "PyObject" in undefined
    for prefix in (" c10::", " at::", " torch::"):
        assert prefix not in undefined


def test_no_driver_is_needed_to_import():
    """FA-033: neither the driver nor the CUDA runtime is a hard dependency."""
    needed = subprocess.run(["ldd", EXTENSION], capture_output=True, text=True, check=True).stdout
    for library in ("libcuda.so", "libcudart", "libtorch", "libc10"):
        assert library not in needed


def test_without_a_gpu():
    """FA-033: import and the CPU path work; what is missing is named."""
    run_python(
        USE
        + """
info = fa101.info()
assert info["gpus"] == [] and info["no_gpu_because"]
try:
    fa101._fa101.cuda_empty((1,), "float32", 0)
    raise SystemExit("no error")
except RuntimeError as error:
    assert str(error) == f"no usable GPU: {info['no_gpu_because']}", error
""",
        CUDA_VISIBLE_DEVICES="",
    )


@pytest.mark.gpu
def test_import_makes_no_context():
    """FA-033: no device file is open before the first CUDA call."""
    run_python(
        """
import os, fa101
fa101.kernels()
opened = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
          if os.path.islink(f"/proc/self/fd/{fd}")]
assert not [path for path in opened if "nvidia" in path], opened
"""
    )


def test_typed():
    """PEP 561: the marker and a stub with every function of the extension."""
    package = Path(fa101.__file__).parent
    assert (package / "py.typed").exists()
    stub = (EXTENSION.parent / "_fa101.pyi").read_text()
    for name, value in vars(_fa101).items():
        if callable(value):
            assert f"def {name}(" in stub or f"class {name}" in stub
    for name in ("flash_attention", "plan", "explain", "plan_with_kvcache", "explain_with_kvcache"):
        function = getattr(functional, name)
        assert getattr(fa101, name) is function
        assert function.__doc__
        hints = inspect.signature(function)
        assert all(p.annotation is not p.empty for p in hints.parameters.values())


def test_public_names():
    assert sorted(fa101.__all__) == fa101.__all__
    assert {name for name in vars(fa101) if name[0] != "_"} >= set(fa101.__all__) - {"__version__"}


def test_version():
    from importlib.metadata import PackageNotFoundError, version

    header = Path(__file__).parents[2] / "csrc/include/fa101/version.h"
    assert f'FA101_VERSION "{fa101.__version__}"' in header.read_text()
    try:
        assert version("fa101") == fa101.__version__
    except PackageNotFoundError:
        pytest.skip("fa101 is on the path, not installed")
