"""fa101: attention, one lesson per kernel, from the textbook to tensor cores.

    import torch, fa101
    q = k = v = torch.randn(1, 8, 1024, 64)
    out = fa101.flash_attention(q, k, v, causal=True)
"""

from fa101._fa101 import __version__, get_num_threads, info, kernels, set_num_threads
from fa101.functional import explain, flash_attention

__all__ = [
    "__version__",
    "explain",
    "flash_attention",
    "get_num_threads",
    "info",
    "kernels",
    "set_num_threads",
]
