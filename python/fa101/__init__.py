"""Attention, one lesson per kernel, from the textbook to tensor cores.

>>> import numpy as np, fa101
>>> q = k = v = np.ones((1, 8, 1024, 64), np.float32)
>>> fa101.flash_attention(q, k, v, causal=True).shape
(1, 8, 1024, 64)
"""

from fa101._fa101 import __version__, get_num_threads, info, kernels, set_num_threads
from fa101.functional import (
    explain,
    explain_with_kvcache,
    flash_attention,
    flash_attention_with_kvcache,
    plan,
    plan_with_kvcache,
)

__all__ = [
    "__version__",
    "explain",
    "explain_with_kvcache",
    "flash_attention",
    "flash_attention_with_kvcache",
    "get_num_threads",
    "info",
    "kernels",
    "plan",
    "plan_with_kvcache",
    "set_num_threads",
]
