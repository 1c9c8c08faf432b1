"""What a user does with the source: pip, the source archive, CMake consumers, odd toolchains.

Slow (it compiles), so CI runs it apart from the other tests. FA101_PACKAGE_BUILD names a build tree
whose library the Python packages link to; by default build/.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(1200)

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("FA101_PACKAGE_BUILD", ROOT / "build"))
HAS_NVCC = shutil.which("nvcc") is not None
CPU_ONLY = "-Ccmake.define.FA101_CUDA=OFF"

USE = """
import numpy as np, fa101, sys
q = np.ones((1, 2, 3, 8), np.float32)
o = fa101.flash_attention(q, q, 2 * q, causal=True)
assert (o == 2).all() and "torch" not in sys.modules
"""


def run(*command, cwd=ROOT, check=True, **env):
    """The command's combined output; its failure is the test's."""
    done = subprocess.run(
        [str(c) for c in command],
        cwd=cwd,
        env={**os.environ, **{k: str(v) for k, v in env.items()}},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
    )
    assert not check or done.returncode == 0, done.stdout
    return done.stdout


def configure(tmp_path, *arguments, **env):
    """CMake's output on configuring the checkout, whether it succeeds or not."""
    options = ("-DBUILD_TESTING=OFF", "-DFA101_BUILD_PROFILER=OFF")
    return run(
        "cmake", "-S", ROOT, "-B", tmp_path / "configured", *options, *arguments, check=False, **env
    )


def one_line(text):
    return " ".join(text.split())


@pytest.fixture(scope="session")
def checkout(tmp_path_factory):
    """The committed and new files, without anything built or fetched, in a path with spaces."""
    copy = tmp_path_factory.mktemp("path with spaces") / "fa101"
    names = run("git", "ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    for name in names:
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    return copy


@pytest.fixture
def python(tmp_path):
    """A fresh virtual environment's interpreter: NumPy, but no torch and no build tools."""
    venv.create(tmp_path / "new venv", with_pip=True)
    interpreter = tmp_path / "new venv" / "bin" / "python"
    run(interpreter, "-m", "pip", "install", "-q", "numpy")
    return interpreter


@pytest.fixture(scope="session")
def sdist(checkout, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    hook = "import sys, scikit_build_core.build as b; b.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", hook, folder, cwd=checkout)
    (archive,) = folder.glob("fa101-*.tar.gz")
    return archive


@pytest.fixture(scope="session")
def wheel(checkout, tmp_path_factory):
    """A wheel whose extension is linked to the library in BUILD."""
    folder = tmp_path_factory.mktemp("wheel")
    run(
        *(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"),
        *("-w", folder, f"-Ccmake.define.FA101_PREBUILT={BUILD}", checkout),
    )
    (archive,) = folder.glob("fa101-*.whl")
    return archive


@pytest.fixture(scope="session")
def extension(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("extension")
    zipfile.ZipFile(wheel).extractall(folder)
    (module,) = folder.glob("fa101/_fa101*.so")
    return module


def test_wheel_is_small_and_holds_the_package_alone(wheel):
    assert wheel.stat().st_size < 20e6
    names = zipfile.ZipFile(wheel).namelist()
    assert {"fa101/__init__.py", "fa101/_fa101.pyi", "fa101/py.typed"} <= set(names)
    assert any(n.endswith("licenses/LICENSE") for n in names)
    outside = [n for n in names if not re.match(r"fa101(-[^/]*\.dist-info)?/", n)]
    assert not outside
    assert not [n for n in names if n.endswith((".a", ".h", ".cmake", ".cpp", ".cu"))]


def test_extension_needs_no_cuda_library_and_no_torch(extension):
    assert not re.search(r"libcuda|libcudart|libtorch|libc10", run("ldd", extension))
    undefined = run("nm", "-DC", "--undefined-only", extension)
    assert not re.search(r"\b(c10|at|torch)::", undefined)


def test_extension_exports_its_entry_point_alone(extension):
    exported = run("nm", "-DC", "--defined-only", extension).splitlines()
    names = [line.split(maxsplit=2)[2] for line in exported]
    assert "PyInit__fa101" in names
    assert not [n for n in names if n.startswith(("fa101::", "cuda", "__cuda"))]


def test_wheel_installs_and_runs_without_torch(wheel, python):
    run(python, "-m", "pip", "install", "-q", wheel)
    run(python, "-c", USE, cwd=wheel.parent)
    assert "fa101" in run(python, "-m", "fa101", cwd=wheel.parent)


@pytest.mark.parametrize(("first", "second"), [("fa101", "torch"), ("torch", "fa101")])
def test_either_import_order(first, second):
    pytest.importorskip("torch")
    use = "q = torch.ones(1, 1, 2, 8); assert (fa101.flash_attention(q, q, q) == 1).all()"
    run(sys.executable, "-c", f"import {first}, {second}; {use}", cwd=ROOT / "tests")


def test_editable_install_without_isolation(checkout, python, tmp_path):
    """Against a built library, in an environment that has only the build requirements."""
    run(python, "-m", "pip", "install", "-q", "scikit-build-core", "nanobind", "cmake", "ninja")
    run(
        *(python, "-m", "pip", "install", "-q", "--no-build-isolation", "-e", checkout),
        f"-Ccmake.define.FA101_PREBUILT={BUILD}",
    )
    run(python, "-c", USE, cwd=tmp_path)
    (checkout / "python/fa101/_probe.py").write_text("there = True\n")
    run(python, "-c", "import fa101._probe as p; assert p.there", cwd=tmp_path)


def test_install_with_isolation_from_the_checkout(checkout, python, tmp_path):
    """The whole library, CPU only, with CUDA_HOME and CUDACXX pointing to nothing."""
    nowhere = tmp_path / "nowhere"
    run(
        *(python, "-m", "pip", "install", "-q", CPU_ONLY, checkout),
        CUDA_HOME=nowhere,
        CUDACXX=nowhere / "nvcc",
    )
    run(python, "-c", USE, cwd=tmp_path)


def test_sdist_builds_without_network(sdist, tmp_path):
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "un packed")
    (source,) = (tmp_path / "un packed").iterdir()
    headers = source / "third_party/cutlass/include"
    assert (headers / "cute/tensor.hpp").exists()
    assert "NVIDIA" in (headers / "LICENSE.txt").read_text()
    offline = {"PIP_NO_INDEX": 1, "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    run(
        *(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"),
        *("-w", tmp_path, CPU_ONLY, source),
        **offline,
    )
    if HAS_NVCC:  # the CUDA code itself is compiled elsewhere; here only that nothing is missing
        output = run(
            *("cmake", "-S", source, "-B", tmp_path / "cuda", "-DFA101_CUDA=ON"),
            *("-DBUILD_TESTING=OFF", "-DFA101_BUILD_PROFILER=OFF"),
            **offline,
        )
        assert "fetching" not in output
        assert "unpacking" not in output


@pytest.mark.skipif(not HAS_NVCC, reason="no nvcc")
def test_missing_cutlass_is_one_error_with_the_command(checkout, tmp_path):
    shutil.rmtree(checkout / "third_party/cutlass/include", ignore_errors=True)
    output = run(
        *("cmake", "-S", checkout, "-B", tmp_path / "build", "-DFA101_CUDA=ON"),
        *("-DBUILD_TESTING=OFF", "-DFA101_BUILD_PROFILER=OFF"),
        check=False,
        **{"PIP_NO_INDEX": 1, "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull},
    )
    assert output.count("CMake Error") == 1
    assert "pip download --no-deps --require-hashes" in one_line(output)


def test_no_cuda_compiler_found(tmp_path):
    nowhere = tmp_path / "nowhere"
    for env in ({"CUDACXX": nowhere / "nvcc"}, {"CUDACXX": "", "CUDA_HOME": nowhere}):
        output = configure(tmp_path, "-DFA101_CUDA=AUTO", **env)
        assert "fa101: CPU only" in output
        assert "CMake Error" not in output
        output = one_line(configure(tmp_path, "-DFA101_CUDA=ON", **env))
        assert output.count("CMake Error") == 1
        assert "-DFA101_CUDA=OFF" in output
        assert str(nowhere) in output.replace(" ", "")


def test_pip_shows_no_python_traceback_of_ours_when_cuda_is_missing(checkout, tmp_path):
    output = run(
        *(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"),
        *("-w", tmp_path, "-Ccmake.define.FA101_CUDA=ON", checkout),
        check=False,
        CUDACXX=tmp_path / "nvcc",
    )
    assert "-DFA101_CUDA=OFF" in one_line(output)
    assert "Traceback" not in output


@pytest.mark.skipif(not HAS_NVCC, reason="no nvcc")
@pytest.mark.parametrize("archs", ["native", "99", "60", "80;abc", "90x"])
def test_unknown_architectures(archs, tmp_path):
    output = one_line(configure(tmp_path, f"-DFA101_ARCHS={archs}"))
    assert output.count("CMake Error") == 1
    assert f"FA101_ARCHS={archs}" in output
    assert archs == "native" or re.search(r"CUDA \d+\.\d+", output)


@pytest.mark.skipif(not HAS_NVCC, reason="no nvcc")
@pytest.mark.parametrize("archs", ["", "90", "90a", "75-real", "80-real;86;90-virtual"])
def test_known_architectures(archs, tmp_path):
    assert "CMake Error" not in configure(tmp_path, f"-DFA101_ARCHS={archs}")


@pytest.mark.parametrize("dims", ["", "80", "64;512", "all"])
def test_unknown_head_dims(dims, tmp_path):
    output = one_line(configure(tmp_path, "-DFA101_CUDA=OFF", f"-DFA101_HEAD_DIMS={dims}"))
    assert output.count("CMake Error") == 1
    assert "FA101_HEAD_DIMS" in output


@pytest.mark.skipif(not HAS_NVCC, reason="no nvcc")
def test_number_of_compilers(tmp_path):
    assert re.search(r"at most \d+ CUDA compilers", configure(tmp_path))
    assert "at most 3 CUDA compilers" in configure(tmp_path, CMAKE_BUILD_PARALLEL_LEVEL=3)
    for wrong in ("abc", "0", "-1"):
        output = configure(tmp_path, CMAKE_BUILD_PARALLEL_LEVEL=wrong)
        assert f"CMAKE_BUILD_PARALLEL_LEVEL is '{wrong}'" in output


CONSUMER = """
cmake_minimum_required(VERSION 3.25)
project(consumer LANGUAGES CXX)
include(FetchContent)
FetchContent_Declare(fa101 SOURCE_DIR "${FA101_SOURCE}")
FetchContent_MakeAvailable(fa101)
foreach(extra profile-attention _fa101 test_plan)
    if(TARGET ${extra})
        message(FATAL_ERROR "a consumer gets the library alone, not ${extra}")
    endif()
endforeach()
# One static library in two shared ones that meet in one process: it must be position independent.
foreach(half one two)
    add_library(${half} SHARED half.cpp)
    target_compile_definitions(${half} PRIVATE half=${half})
    target_link_libraries(${half} PRIVATE fa101::fa101)
endforeach()
add_executable(both main.cpp)
target_link_libraries(both PRIVATE one two)
"""
HALF = """
#include <fa101/attention.h>
__attribute__((visibility("default"))) bool half(int count) {
    try {
        fa101::attention({}, {}, {}, {});
    } catch (const fa101::InvalidArgument&) {
        return fa101::kernels().size() > static_cast<size_t>(count);
    }
    return false;
}
"""


def test_fetched_into_another_project(checkout, tmp_path):
    (tmp_path / "CMakeLists.txt").write_text(CONSUMER)
    (tmp_path / "half.cpp").write_text(HALF)
    (tmp_path / "main.cpp").write_text(
        "bool one(int);\nbool two(int);\nint main() { return one(2) && two(2) ? 0 : 1; }\n"
    )
    build = tmp_path / "build"
    run("cmake", "-S", tmp_path, "-B", build, f"-DFA101_SOURCE={checkout}", "-DFA101_CUDA=OFF")
    run("cmake", "--build", build)
    run(build / "both")


def test_shared_library_installed_for_another_project(checkout, tmp_path):
    """Moved after installing; exports what the public headers declare and nothing else."""
    build, prefix = tmp_path / "build", tmp_path / "prefix"
    options = ("-DBUILD_SHARED_LIBS=ON", "-DBUILD_TESTING=OFF", "-DFA101_BUILD_PROFILER=OFF")
    run("cmake", "-S", checkout, "-B", build, "-DFA101_CUDA=OFF", *options)
    run("cmake", "--build", build)
    run("cmake", "--install", build, "--prefix", prefix)
    prefix = prefix.rename(tmp_path / "moved")
    run(
        *("cmake", "-S", checkout / "examples/cmake", "-B", tmp_path / "example"),
        f"-DCMAKE_PREFIX_PATH={prefix}",
    )
    run("cmake", "--build", tmp_path / "example")
    assert "o = (3.0000, 4.0000)" in run(tmp_path / "example/example")

    (library,) = prefix.glob("lib*/libfa101.so")
    headers = "".join(h.read_text() for h in (prefix / "include/fa101").glob("*.h"))
    for line in run("nm", "-DC", "--defined-only", library).splitlines():
        symbol = line.split(maxsplit=2)[2]
        name = re.match(r"(?:(?:typeinfo|vtable)(?: name)? for )?fa101::(?:\w+::)*~?(\w+)", symbol)
        assert name, f"{symbol} is exported"
        assert re.search(rf"\b{name[1]}\b", headers), f"{symbol} is exported"
