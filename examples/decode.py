"""A Llama-shaped decoder with random weights generates token by token, twice: with its attention
through fa101 and a paged KV cache, and as transformers has it, through torch's SDPA.

    pip install transformers
    python examples/decode.py                                # a GPU if there is one, else the CPU
    python examples/decode.py --graph --batch 8 --layers 16  # a step as one CUDA graph

The model is transformers' own. It looks its attention up by name, so a function under a new name
is all it takes: it gets the queries, keys and values of the new tokens alone, rotated already,
writes keys and values into this layer's pages and attends to all that are there, in one call.
"""

import argparse
import inspect
import time

import torch
from transformers import AttentionInterface, DynamicCache, LlamaConfig, LlamaForCausalLM

import fa101


class PagedCache:
    """Pages of all layers, one table of them, and how many keys each sequence has: all on the
    device, so that a captured step reads what they are when it is replayed."""

    def __init__(self, config, batch, capacity, page_size, device, dtype):
        max_pages = -(-capacity // page_size)
        heads, head_dim = config.num_key_value_heads, config.head_dim
        shape = (config.num_hidden_layers, batch * max_pages, heads, page_size, head_dim)
        self.k, self.v = (torch.empty(shape, device=device, dtype=dtype) for _ in range(2))
        # Sequences take pages as they grow, so nobody's are neighbours for long.
        pages = torch.randperm(batch * max_pages, device=device, dtype=torch.int32)
        self.page_table = pages.view(batch, max_pages)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)


def fa101_attention(module, q, k, v, attention_mask, *, scaling, pages, **_):
    out = fa101.flash_attention_with_kvcache(
        q,
        pages.k[module.layer_idx],
        pages.v[module.layer_idx],
        k=k,
        v=v,
        seqlens_k=pages.lengths,
        page_table=pages.page_table,
        softmax_scale=scaling,
        layout="bhsd",
    )
    return out.transpose(1, 2), None


AttentionInterface.register("fa101", fa101_attention)


def through_fa101(model, prompt, num_tokens, page_size, use_graph):
    """Generates greedily; gives the tokens and the seconds after the prompt."""
    batch, seqlen = prompt.shape
    model.set_attn_implementation("fa101")
    pages = PagedCache(
        model.config, batch, seqlen + num_tokens + 1, page_size, prompt.device, model.dtype
    )

    def step(tokens):
        positions = pages.lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        logits = model(
            tokens, position_ids=positions, use_cache=False, logits_to_keep=1, pages=pages
        ).logits
        pages.lengths += tokens.shape[1]
        return logits[:, -1].argmax(-1, keepdim=True)

    token = step(prompt)
    generated = [token.clone()]
    next_step = lambda: token.copy_(step(token))  # noqa: E731
    if use_graph:
        next_step()  # what is set up once is set up before the capture
        generated.append(token.clone())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # records, runs nothing
            token.copy_(step(token))
        next_step = graph.replay
    begin = now(prompt.device)
    for _ in range(num_tokens - len(generated)):
        next_step()
        generated.append(token.clone())
    return torch.cat(generated, 1), (now(prompt.device) - begin) / (num_tokens - 1 - use_graph)


def through_sdpa(model, prompt, num_tokens):
    model.set_attn_implementation("sdpa")
    parameters = inspect.signature(LlamaForCausalLM.forward).parameters
    argument = "cache" if "cache" in parameters else "past_key_values"  # before transformers 5
    cache = {argument: DynamicCache(config=model.config)}

    def step(tokens):
        logits = model(tokens, **cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    generated = [step(prompt)]
    begin = now(prompt.device)
    for _ in range(num_tokens - 1):
        generated.append(step(generated[-1]))
    return torch.cat(generated, 1), (now(prompt.device) - begin) / (num_tokens - 1)


def now(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--batch", type=int, default=2, help="sequences [%(default)s]")
    parser.add_argument(
        "--prompt", type=int, default=100, help="tokens of the prompt [%(default)s]"
    )
    parser.add_argument(
        "--tokens", type=int, default=32, help="tokens to generate, 3 or more [%(default)s]"
    )
    parser.add_argument("--layers", type=int, default=4, help="of the model [%(default)s]")
    parser.add_argument("--page-size", type=int, default=64, help="keys in a page [%(default)s]")
    parser.add_argument("--graph", action="store_true", help="replay a CUDA graph of a step")
    options = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if options.graph and device.type == "cpu":
        parser.error("--graph needs a GPU")
    for name in ("batch", "prompt", "layers"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; it must be at least 1")
    if options.tokens < 3:
        parser.error(f"--tokens is {options.tokens}; it must be 3 or more, to time a step")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=options.layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
    )
    model = LlamaForCausalLM(config).to(device, dtype).eval()
    prompt = torch.randint(config.vocab_size, (options.batch, options.prompt), device=device)

    results = {}
    for name, generate in (
        ("fa101", lambda n: through_fa101(model, prompt, n, options.page_size, options.graph)),
        ("sdpa", lambda n: through_sdpa(model, prompt, n)),
    ):
        generate(min(4, options.tokens))  # warm
        results[name], seconds = generate(options.tokens)
        print(f"{name:6} {options.batch / seconds:8.1f} tokens/s, {1e3 * seconds:.2f} ms a step")
    same = (results["fa101"] == results["sdpa"]).float().mean().item()
    # Greedy decoding with random weights: where two logits nearly tie, rounding picks one, and all
    # that follows differs.
    print(f"{100 * same:.0f} % of the tokens are the same")


if __name__ == "__main__":
    main()
