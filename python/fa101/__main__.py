"""python -m fa101: what this installation is and what it runs on."""

from __future__ import annotations

import sys

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
    text.append("kernels")
    for kernel in fa101.kernels():
        archs = ", ".join(info["archs"].get(kernel["name"], []))
        built = f" [{archs}]" if archs else ""
        text.append(f"  {kernel['name']:10s} {kernel['device']:5s} {kernel['lesson']}{built}")
    return text


if __name__ == "__main__":
    sys.stdout.write("\n".join(lines()) + "\n")
