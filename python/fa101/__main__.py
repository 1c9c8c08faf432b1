"""python -m fa101: what this installation is and what it runs on."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import fa101


def lines() -> list[str]:
    info = fa101.info()
    cpu = info["cpu"]
    text = [
        f"fa101    {info['version']}",
        f"CUDA     {info['cuda'] or 'not in this build'}",
        f"CUTLASS  {info['cutlass'] or 'not in this build'}",
        f"CPU      {cpu['name']}, {cpu['simd']} (built: {', '.join(cpu['simd_built'])}), "
        f"{cpu['num_threads']} threads",
    ]
    for index, gpu in enumerate(info["gpus"]):
        text.append(
            f"cuda:{index}   {gpu['name']}, sm_{gpu['arch']}, {gpu['sms']} SMs, "
            f"{gpu['memory_bytes'] / 2**30:.0f} GiB"
        )
    if not info["gpus"]:
        text.append(f"GPU      none: {info['no_gpu_because']}")
    text.append("kernels, and what runs them here")
    for kernel in fa101.kernels():
        archs = info["archs"].get(kernel["name"], [])
        built = f" [{', '.join(archs)}]" if archs else ""
        where = runs_on(kernel, info["gpus"], bool(archs))
        text.append(f"  {kernel['name']:10s} {where:10s} {kernel['lesson']}{built}")
    return text


def runs_on(kernel: dict[str, Any], gpus: list[dict[str, Any]], built: bool) -> str:
    if kernel["device"] == "cpu":
        return "CPU"
    if not built:
        return "not built"
    if not gpus:
        return "no GPU"
    able = [f"cuda:{i}" for i, gpu in enumerate(gpus) if kernel["name"] in gpu["kernels"]]
    return "GPU" if len(able) == len(gpus) else ", ".join(able) or "other GPU"


if __name__ == "__main__":
    assert __doc__
    _, _, what = __doc__.partition(": ")
    argparse.ArgumentParser(prog="python -m fa101", description=f"Prints {what}").parse_args()
    sys.stdout.write("\n".join(lines()) + "\n")
