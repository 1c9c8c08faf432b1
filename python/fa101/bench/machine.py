"""On what a table was measured: without it a figure means nothing."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import fa101


def describe(device: torch.device) -> dict[str, Any]:
    info = fa101.info()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "fa101": info["version"],
        "cuda": info["cuda"],
        "cutlass": info["cutlass"],
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "device": _gpu(device) if device.type == "cuda" else _cpu(info["cpu"]),
    }


def gpu_state(device: torch.device) -> dict[str, Any]:
    """Clocks, power and temperature now; empty without NVML (package nvidia-ml-py)."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device).uuid
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        return {
            "driver": nvml.nvmlSystemGetDriverVersion(),
            "sm_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "memory_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            "power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            "temperature_c": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        }
    except Exception:  # not installed, not permitted, not known to this GPU: only facts are lost
        return {}


def _gpu(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    return {
        "type": "cuda",
        "name": properties.name,
        "arch": f"sm_{properties.major}{properties.minor}",
        "sms": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "l2_mib": properties.L2_cache_size / 2**20,
        **gpu_state(device),
    }


def _cpu(cpu: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "cpu",
        "name": cpu["name"],
        "simd": cpu["simd"],
        "threads": min(cpu["num_threads"], torch.get_num_threads()),
        "load_average": os.getloadavg()[0],  # well above 0: others took part of the machine
    }


def _commit() -> str | None:
    """Of the checkout this package is in, if it is in one."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        folder = Path(__file__).parent
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()
