"""GPU tests are skipped, with the reason and their number, where no GPU can be used."""

import functools

import pytest


@functools.cache
def no_gpu_because():
    try:
        import torch

        import fa101
    except ImportError as error:
        return str(error)
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if not fa101.info()["gpus"]:
        return f"fa101 sees no GPU: {fa101.info()['no_gpu_because']}"
    return None


def pytest_collection_modifyitems(items):
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and (reason := no_gpu_because()):
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter):
    skipped = terminalreporter.stats.get("skipped", [])
    gpu = [report for report in skipped if "gpu" in report.keywords]
    if gpu and (reason := no_gpu_because()):
        terminalreporter.write_line(f"{len(gpu)} GPU tests did not run: {reason}")
