"""The benchmark tool: what it calls right, how it times, what it prints and stores."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import types
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

import fa101
from fa101.bench import peers, report, runner, suites, tables, timing
from fa101.bench.__main__ import is_bad, main
from fa101.bench.peers import Contender, UnfitError
from fa101.bench.suites import Case

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
CASE = Case("small", 2, 3, 33, 33, 16, "float32", causal=True)
CEILING = {"float32": 1e11, "bytes": 1e10}


def stored_document():
    def result(name, ms, is_peer=False, **more):
        return {
            "contender": name, "is_peer": is_peer, "status": "ok", "median_ms": ms,
            "tflops": 1 / ms, "gbytes_per_s": 100 / ms, "share_of_ceiling": 0.1 / ms,
            "max_abs_error": 1e-3, "vs_best_peer": 0.5 / ms, **more,
        }  # fmt: skip

    def row(causal, results):
        case = Case("fa101", 8, 16, 256, 256, 64, "float16", causal)
        return {**vars(case), "label": case.label, "results": results}

    failed = {"contender": "fa1", "is_peer": False, "status": "failed", "reason": "wrong"}
    return {
        "suite": "seeds", "date": "2026-01-02T03:04:05+00:00", "commit": "0123456789abcdef",
        "fa101": "0.1.0", "cuda": "13.0", "torch": "2.11", "absent": {"fa3": "not here"},
        "device": {"type": "cuda", "name": "GPU X", "driver": "580"},
        "ceilings": {"float16": 7e14, "bytes": 4e12},
        "rows": [
            row(False, [result("naive", 10), result("fa2", 2), result("torch-flash", 0.5, True)]),
            row(True, [result("naive", 8), failed, result("torch-flash", 0.25, True)]),
        ],
    }  # fmt: skip


def sdpa(case, q, k, v):
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=case.causal)


def run(*contenders, case=CASE, guard=None):
    guard = guard or runner.Guard(max_seconds=5, budget=0.001)
    row = runner.run_case(case, list(contenders), timing.CpuTimer(), guard, CEILING)
    return {result["contender"]: result for result in row["results"]}


class TestSuites:
    def test_the_sources_shapes(self):
        seeds = {case.label: case for case in suites.SUITES["seeds"]}
        assert len(seeds) == 16
        for dtype in ("float16", "float32"):
            assert seeds[f"llama-7b full {dtype}"].flops == 4 * 32 * 4096**2 * 128
            assert seeds[f"fa101 causal {dtype}"].flops == 2 * 8 * 16 * 256**2 * 64
        decode = seeds["decode full float16"]
        assert decode.is_decode
        assert decode.bytes == 2 * 8 * 128 * (2 * 8192 + 2)

    def test_prefill_is_16k_tokens_of_2048(self):
        prefill = suites.SUITES["prefill"]
        assert len(prefill) == 36
        assert {case.batch * case.seqlen_q for case in prefill} == {16384}
        assert {case.num_heads * case.head_dim for case in prefill} == {2048}

    @pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 9), (9, 5), (1, 7)])
    def test_flops_count_the_pairs_a_causal_mask_shows(self, seqlen_q, seqlen_k):
        case = Case("c", 1, 1, seqlen_q, seqlen_k, 1, "float32", causal=True)
        visible = torch.ones(seqlen_q, seqlen_k).tril(seqlen_k - seqlen_q).sum()
        assert case.flops == 4 * visible

    def test_labels_tell_cases_apart(self):
        for cases in suites.SUITES.values():
            assert len({case.label for case in cases}) == len(cases)

    def test_filters_all_have_to_match(self):
        some = suites.select("prefill", ["d128", "causal"])
        assert {(case.head_dim, case.causal) for case in some} == {(128, True)}
        assert len(some) == 6


class TestReference:
    @pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(33, 33), (5, 40), (1, 8)])
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("pairs", [1 << 20, 1])
    @pytest.mark.parametrize("numbers", [1 << 20, 100, 1])  # at a time: all, some rows, one
    def test_is_attention(self, seqlen_q, seqlen_k, causal, pairs, numbers, monkeypatch):
        monkeypatch.setitem(runner.REFERENCE_PAIRS, "cpu", pairs)
        monkeypatch.setattr(runner, "REFERENCE_NUMBERS", numbers)
        case = Case("c", 2, 3, seqlen_q, seqlen_k, 16, "float32", causal)
        q, k, v = runner.make_inputs(case, CPU)
        mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
        mask = mask.tril(seqlen_k - seqlen_q) if causal else mask
        full = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=mask)
        heads, expected = runner.reference(case, q, k, v)
        assert heads == (list(range(6)) if pairs > 1 else [0])
        torch.testing.assert_close(expected, full.flatten(0, 1)[heads], atol=1e-12, rtol=0)


class TestRow:
    def test_right_answers_are_timed_and_compared(self):
        results = run(
            Contender("ours", sdpa, is_peer=False),
            Contender("a", sdpa),
            Contender("b", lambda case, q, k, v: slow(sdpa(case, q, k, v))),
        )
        assert {result["status"] for result in results.values()} == {"ok"}
        ours = results["ours"]
        assert len(ours["times_ms"]) >= 3
        assert ours["best_ms"] <= ours["p10_ms"] <= ours["median_ms"] <= ours["p90_ms"]
        best = min(results["a"]["median_ms"], results["b"]["median_ms"])
        for result in results.values():
            assert result["vs_best_peer"] == best / result["median_ms"]
        assert ours["tflops"] == pytest.approx(CASE.flops / ours["median_ms"] / 1e9)
        assert ours["share_of_ceiling"] == pytest.approx(ours["tflops"] / 0.1)
        assert 0 < ours["error"] < 1e-5

    @pytest.mark.parametrize("spoil", [1.001, float("nan")])
    def test_a_wrong_answer_is_not_timed(self, spoil):
        def prepare(case, q, k, v):
            call = sdpa(case, q, k, v)

            def wrong():
                out = call()
                out[1, 2, -1, 0] *= spoil * 2  # one element of all
                return out

            return wrong

        result = run(Contender("wrong", prepare, is_peer=False), Contender("a", sdpa))["wrong"]
        assert result["status"] == "failed"
        assert "root mean square" in result["reason"]
        assert "median_ms" not in result
        json.dumps(result, allow_nan=False)

    def test_who_raises_is_out_and_says_why(self):
        def refuses(error):
            def prepare(case, q, k, v):
                raise error

            return prepare

        results = run(
            Contender("unfit", refuses(UnfitError("wants float16")), is_peer=False),
            Contender("broken", refuses(RuntimeError("no. Because. And more")), is_peer=False),
            Contender("peer", refuses(RuntimeError("head dimension too large\nat x.cpp:1"))),
            Contender("huge", refuses(torch.OutOfMemoryError("CUDA out of memory. 34.0 GiB. x"))),
            Contender("a", sdpa),
        )
        assert {name: (r["status"], r.get("reason")) for name, r in results.items()} == {
            "unfit": ("skipped", "wants float16"),
            "broken": ("failed", "no. Because"),
            "peer": ("skipped", "head dimension too large"),
            "huge": ("skipped", "CUDA out of memory. 34.0 GiB"),
            "a": ("ok", None),
        }

    def test_a_lost_device_ends_the_row(self, monkeypatch):
        def crash():
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")

        timer = timing.CpuTimer()

        def prepare(case, q, k, v):
            monkeypatch.setattr(timer, "synchronize", crash)
            return crash

        contenders = [Contender("a", sdpa), Contender("b", prepare), Contender("c", sdpa)]
        guard = runner.Guard(max_seconds=5, budget=0.001)
        row = runner.run_case(CASE, contenders, timer, guard, CEILING)
        assert [r.get("status") for r in row["results"]] == [None, "failed"]
        assert report.is_lost(row)
        assert is_bad(row)
        document = {**stored_document(), "rows": [row], "absent": {}}
        assert report.notes(document) == [
            "b failed in small causal float32: CUDA error: an illegal memory access was encountered"
        ]
        report.show(document)

    def test_the_slow_are_left_out(self):
        guard = runner.Guard(max_seconds=0.01, budget=0.001)
        peer = Contender("slow", lambda case, q, k, v: slow(sdpa(case, q, k, v)))
        assert "over --max-seconds 0.01" in run(peer, guard=guard)["slow"]["reason"]
        # Now its rate is known: a case ten times as large is not even tried.
        large = Case("large", 20, 3, 33, 33, 16, "float32")
        peer = Contender("slow", lambda case, q, k, v: pytest.fail("tried"))
        assert run(peer, guard=guard, case=large)["slow"]["status"] == "skipped"

    def test_contenders_take_turns(self, monkeypatch):
        monkeypatch.setattr(runner.Guard, "repeats", lambda *_: 7)
        calls = []

        def prepare_as(name):
            def prepare(case, q, k, v):
                call = sdpa(case, q, k, v)
                return lambda: (calls.append(name), call())[1]

            return prepare

        run(Contender("a", prepare_as("a")), Contender("b", prepare_as("b")))
        turns = "".join(calls[-14:])
        # Seven repeats in five rounds of 2, 2, 1, 1, 1; the order alternates.
        assert turns == "aabb" + "bbaa" + "ab" + "ba" + "ab"

    def test_decode_is_measured_by_its_traffic(self):
        case = Case("decode", 1, 2, 1, 64, 16, "float32")
        result = run(Contender("a", sdpa), case=case)["a"]
        assert result["share_of_ceiling"] == pytest.approx(result["gbytes_per_s"] / 10)


class FakeGraph:
    """A CUDA graph whose replay is to call again; outputs stay where the first calls put them."""

    host_us = 0.0

    def __init__(self, calls, ms):
        self.calls, self._calls, self._ms = len(calls), calls, ms
        self.outputs = [call() for call in calls]

    def replay(self):
        for out, call in zip(self.outputs, self._calls, strict=True):
            out.copy_(call())

    def measure(self, repeats):
        return [self._ms] * repeats


class FakeGpu:
    device, flush_us, l2_bytes = CPU, 10, 20_000
    host_us = 0.0

    def __init__(self):
        self.graphs = []
        self.call_ms = 0.2

    def watch(self, call):
        return self

    def measure(self, repeats):
        return [self.call_ms] * repeats

    def synchronize(self):
        pass

    def capture(self, calls):
        self.graphs.append(FakeGraph(calls, ms=0.5 / (1 + len(self.graphs))))
        return self.graphs[-1]


class TestGraphs:
    """Their logic, where a graph is a list of calls."""

    CASE = Case("decode", 1, 4, 1, 64, 16, "float32", num_heads_kv=2)  # k and v: 16 kB

    @pytest.fixture
    def gpu(self, monkeypatch):
        monkeypatch.setattr(runner.Guard, "repeats", lambda *_: 5)
        return FakeGpu()

    def row(self, timer, *contenders):
        guard = runner.Guard(max_seconds=5, budget=0.001)
        return runner.run_case(self.CASE, list(contenders), timer, guard, CEILING, by_graph=True)

    @staticmethod
    def sdpa(case, q, k, v):
        return lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    @pytest.mark.parametrize("layout", ["bhsd", "bshd"])
    def test_walks_over_caches_that_are_together_four_times_the_l2(self, gpu, layout):
        seen = []

        def prepare(case, q, k, v):
            assert k.is_contiguous()
            shown = [x.transpose(1, 2) for x in (q, k, v)] if layout == "bshd" else (q, k, v)
            call = self.sdpa(case, *shown)

            def logged():
                seen.append((k.data_ptr(), v.data_ptr()))
                return call().transpose(1, 2) if layout == "bshd" else call()

            return logged

        row = self.row(gpu, Contender("a", prepare, layout=layout))
        assert row["caches"] == 5  # 80 000 bytes of 16 896 each
        (result,) = row["results"]
        assert result["status"] == result["graph"]["status"] == "ok"
        assert result["graph"]["calls"] == 20  # at least 16, and every cache as often
        seen.clear()
        gpu.graphs[0].replay()
        assert len(set(seen)) == 5
        assert seen == seen[:5] * 4

    def test_a_large_cache_has_one_other(self, gpu):
        gpu.l2_bytes = 1
        row = self.row(gpu, Contender("a", self.sdpa))
        assert row["caches"] == 2

    def test_slow_calls_go_over_the_caches_once(self, gpu):
        gpu.call_ms = 1.1
        row = self.row(gpu, Contender("a", self.sdpa))
        assert row["results"][0]["graph"]["calls"] == row["caches"]

    def test_both_ways_are_stored_and_compared(self, gpu):
        row = self.row(
            gpu,
            Contender("ours", self.sdpa, is_peer=False),
            Contender("a", self.sdpa),
        )
        ours = row["results"][0]
        graph = ours["graph"]
        assert graph["median_ms"] == 0.5
        assert graph["gbytes_per_s"] == pytest.approx(self.CASE.bytes / graph["median_ms"] / 1e6)
        assert graph["vs_best_peer"] == 0.5
        assert ours["median_ms"] == 0.2
        assert ours["vs_best_peer"] == 1

    def test_what_reads_the_cache_alone_is_in_the_row(self, gpu):
        row = self.row(gpu, Contender("a", self.sdpa))
        assert row["plain_read"]["status"] == row["plain_read"]["graph"]["status"] == "ok"
        q, k, v = runner.make_inputs(self.CASE, CPU)
        read = peers.plain_read().prepare(self.CASE, q, k, v)()
        torch.testing.assert_close(read, k.sum() + v.sum())

    def test_splits_are_judged_by_replays(self, gpu):
        def prepare_as(plan):
            return lambda *case_and_inputs: peers.PlannedCall(self.sdpa(*case_and_inputs), plan)

        row = self.row(
            gpu,
            *(
                Contender(name, prepare_as(plan), is_peer=False)
                for name, plan in (("auto", "3 splits"), ("splits-1", "1"), ("splits-4", "4"))
            ),
        )
        assert {result["median_ms"] for result in row["results"]} == {0.2}
        document = {**stored_document(), "suite": "splits", "rows": [row], "absent": {}}
        us = "us by graph replay"
        assert report.plans(document) == (
            ["case", "dtype", "auto takes", us, "fastest", us, "of the fastest"],
            [["decode", "float32", "3 splits", "500", "4", "167", "0.33"]],
        )
        row["results"][2]["graph"] = {"status": "failed", "reason": "wrong"}
        assert report.plans(document)[1][0][4:] == ["1", "250", "0.50"]
        report.show(document)

    def test_who_cannot_be_captured_says_why(self, gpu, monkeypatch):
        def capture(calls):
            raise RuntimeError("operation not permitted when stream is capturing\nand more")

        monkeypatch.setattr(gpu, "capture", capture)
        row = self.row(gpu, Contender("ours", self.sdpa, is_peer=False), Contender("a", self.sdpa))
        reason = "operation not permitted when stream is capturing"
        ours, peer = row["results"]
        assert ours["status"] == peer["status"] == "ok"
        assert ours["graph"] == {"status": "failed", "reason": reason}
        assert peer["graph"] == {"status": "skipped", "reason": reason}
        assert is_bad(row)
        document = {**stored_document(), "suite": "decode", "rows": [row], "absent": {}}
        assert report.notes(document)[:2] == [
            f"ours in a CUDA graph failed in decode full float32: {reason}",
            f"a in a CUDA graph skipped in decode full float32: {reason}",
        ]
        report.show(document)

    @pytest.mark.parametrize("spoiled", [0, -1])
    def test_every_answer_of_a_replay_is_checked(self, gpu, monkeypatch, spoiled):
        replay = FakeGraph.replay

        def wrong(graph):
            replay(graph)
            graph.outputs[spoiled][0, 3, 0, 0] += 1

        monkeypatch.setattr(FakeGraph, "replay", wrong)
        row = self.row(gpu, Contender("ours", self.sdpa, is_peer=False), Contender("a", self.sdpa))
        assert [r["graph"]["status"] for r in row["results"]] == ["failed"] * 2
        assert "root mean square" in row["results"][0]["graph"]["reason"]
        assert row["results"][0]["status"] == "ok"

    def test_a_replay_that_writes_nothing_is_wrong(self, gpu, monkeypatch):
        monkeypatch.setattr(FakeGraph, "replay", lambda graph: None)
        row = self.row(gpu, Contender("ours", self.sdpa, is_peer=False))
        assert "wrong by nan" in row["results"][0]["graph"]["reason"]

    def test_a_device_lost_in_a_replay_ends_the_row(self, gpu, monkeypatch):
        def crash(*_):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        def capture(calls):
            monkeypatch.setattr(gpu, "synchronize", crash)
            crash()

        monkeypatch.setattr(gpu, "capture", capture)
        row = self.row(gpu, Contender("a", self.sdpa), Contender("b", self.sdpa))
        assert [result["contender"] for result in row["results"]] == ["a"]
        assert report.is_lost(row)

    def test_the_others_are_measured_without(self):
        row = runner.run_case(
            self.CASE, [Contender("a", self.sdpa)], FakeGpu(), runner.Guard(5, 0.001), CEILING
        )
        assert "graph" not in row["results"][0]
        assert "plain_read" not in row


def slow(call):
    def later():
        time.sleep(0.02)
        return call()

    return later


class TestPeers:
    """Against stand-ins with the real signatures: what is asked, and in which layout."""

    @staticmethod
    def bshd(q, k, v, causal):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    @pytest.mark.parametrize("as_tuple", [False, True])
    @pytest.mark.parametrize("name", ["fa3_fwd_interface", "flash_attn_interface"])
    def test_flash_attn_3(self, monkeypatch, name, as_tuple):
        def flash_attn_func(q, k, v, softmax_scale=None, causal=False, *, num_splits=1):
            assert num_splits == 1
            out = self.bshd(q, k, v, causal)
            return (out, None) if as_tuple else out

        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**locals()))
        assert run(peers.flash_attn_3())["fa3"]["status"] == "ok"

    def test_flash_attn_2(self, monkeypatch):
        def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
            return self.bshd(q, k, v, causal)

        monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace(**locals()))
        assert run(peers.flash_attn_2())["flash-attn"]["status"] == "ok"

    @pytest.mark.parametrize(("batch", "seqlen_q"), [(1, 33), (2, 33)])
    def test_flashinfer(self, monkeypatch, batch, seqlen_q):
        bshd, asked = self.bshd, []

        def single_prefill_with_kv_cache(q, k, v, *, causal=False, kv_layout="NHD"):
            asked.append("single")
            return bshd(q[None], k[None], v[None], causal)[0]

        class BatchPrefillWithRaggedKVCacheWrapper:
            def __init__(self, float_workspace_buffer, kv_layout):
                assert kv_layout == "NHD"

            def plan(
                self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk,
                head_dim_vo=None, *, causal=False, q_data_type="float16",
            ):  # fmt: skip
                assert qo_indptr.tolist() == kv_indptr.tolist() == [0, 33, 66]
                assert (num_qo_heads, num_kv_heads, head_dim_qk) == (3, 3, 16)
                assert q_data_type == torch.float32
                self.causal = causal

            def run(self, q, k, v):
                asked.append("ragged")
                rows = (x.unflatten(0, (2, -1)) for x in (q, k, v))
                return bshd(*rows, self.causal).flatten(0, 1)

        monkeypatch.setitem(sys.modules, "flashinfer", types.SimpleNamespace(**locals()))
        case = Case("c", batch, 3, seqlen_q, 33, 16, "float32", causal=True)
        assert run(peers.flashinfer(), case=case)["flashinfer"]["status"] == "ok"
        assert set(asked) == {"single" if batch == 1 else "ragged"}

    @pytest.mark.parametrize("heads_kv", [2, 4])
    @pytest.mark.parametrize(("batch", "paged"), [(1, False), (1, True), (3, False), (3, True)])
    def test_flashinfer_decodes(self, monkeypatch, batch, paged, heads_kv):
        bshd, asked = self.bshd, []
        tensor_cores = heads_kv == 2

        def single_decode_with_kv_cache(q, k, v, kv_layout="NHD", *, use_tensor_cores=False):
            asked.append("single")
            assert use_tensor_cores == tensor_cores
            k, v = (x.repeat_interleave(4 // heads_kv, 1)[None] for x in (k, v))
            return bshd(q[None, None], k, v, False)[0, 0]

        class BatchDecodeWithPagedKVCacheWrapper:
            def __init__(
                self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False,
                use_tensor_cores=False, paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None,
                paged_kv_last_page_len_buffer=None,
            ):  # fmt: skip
                assert not float_workspace_buffer.any()
                assert (kv_layout, use_cuda_graph) == ("NHD", True)
                assert use_tensor_cores == tensor_cores
                assert paged_kv_indptr_buffer.shape == (batch + 1,)
                assert paged_kv_indices_buffer.shape == (batch * 4,)
                assert paged_kv_last_page_len_buffer.shape == (batch,)

            def plan(
                self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim,
                page_size, *, q_data_type="float16",
            ):  # fmt: skip
                types = {x.dtype for x in (indptr, indices, last_page_len)}
                assert types == {torch.int32}
                assert indptr.tolist() == [4 * i for i in range(batch + 1)]
                assert last_page_len.tolist() == [16] * batch
                assert (num_qo_heads, num_kv_heads, head_dim, page_size) == (4, heads_kv, 16, 16)
                assert q_data_type == torch.float32
                self.indices = indices

            def run(self, q, paged_kv_cache, *, out):
                asked.append("batch")
                assert q.shape == out.shape == (batch, 4, 16)
                assert paged == (self.indices.tolist() != list(range(4 * batch)))
                k, v = (
                    pages[self.indices.long()].view(batch, 64, heads_kv, 16)
                    .repeat_interleave(4 // heads_kv, 2) for pages in paged_kv_cache
                )  # fmt: skip
                out.copy_(bshd(q[:, None], k, v, False)[:, 0])

        monkeypatch.setitem(sys.modules, "flashinfer", types.SimpleNamespace(**locals()))
        case = Case("decode", batch, 4, 1, 64, 16, "float32", num_heads_kv=heads_kv)
        peer = peers.flashinfer_paged(16) if paged else peers.flashinfer()
        result = run(peer, case=case)[peer.name]
        assert result["status"] == "ok"
        assert result["plan"] == ("tensor cores" if tensor_cores else "CUDA cores")
        assert set(asked) == {"batch" if paged or batch > 1 else "single"}

    def test_flashinfer_pages_are_for_decode(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "flashinfer", types.SimpleNamespace())
        peer = peers.flashinfer_paged(16)
        assert run(peer)[peer.name]["reason"] == "only asked for decode"

    def test_the_absent_are_named(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "flash_attn", None)
        found, absent = peers.find_peers("cuda", ["torch-flash", "flash-attn"])
        assert [peer.name for peer in found] == ["torch-flash"]
        assert absent["flash-attn"].startswith("ModuleNotFoundError")

    def test_a_backend_alone(self):
        results = run(*peers.find_peers("cpu", ["torch-flash", "torch-math"])[0])
        assert results["torch-flash"]["status"] == results["torch-math"]["status"] == "ok"
        efficient = peers.torch_sdpa(SDPBackend.EFFICIENT_ATTENTION)
        assert run(efficient)["torch-efficient"]["status"] == "skipped"  # there is none on a CPU

    def test_a_backend_says_why_it_is_not_used(self, monkeypatch):
        def refuse(q, k, v, is_causal):
            for text in (
                "Flash attention kernel not used because:",
                "Expected fp16 or bf16. Got float.",
                "CuDNN attention kernel not used because:",
                "CuDNN attention has been runtime disabled.",
            ):
                warnings.warn(f"{text} (Triggered internally at x.cpp:1.)", stacklevel=2)
            raise RuntimeError("No available kernel. Aborting execution.")

        monkeypatch.setattr(F, "scaled_dot_product_attention", refuse)
        peer = peers.torch_sdpa(SDPBackend.FLASH_ATTENTION)
        q, k, v = runner.make_inputs(CASE, CPU)
        with pytest.raises(UnfitError, match="Expected fp16 or bf16. Got float.$"):
            peer.prepare(CASE, q, k, v)

    def test_math_on_a_cpu_is_kept_from_filling_the_memory(self):
        peer = peers.torch_sdpa(SDPBackend.MATH)
        inputs = runner.make_inputs(CASE, CPU)
        decode = Case("64 caches of 8k keys", 64, 32, 1, 8192, 128, "bfloat16", num_heads_kv=8)
        prefill = Case("32 heads' scores", 1, 32, 16384, 16384, 64, "bfloat16")
        for case, gib in ((decode, 32), (prefill, 64)):
            with pytest.raises(UnfitError, match=f"it would take about {gib} GiB"):
                peer.prepare(case, *inputs)
        assert peer.prepare(CASE, *inputs)().isfinite().all()


class FakeEvent:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


class TestPages:
    @pytest.mark.parametrize(("page_size", "name"), [(None, "cached"), (16, "paged-16")])
    def test_are_shuffled_and_right(self, page_size, name):
        case = Case("decode", 2, 4, 1, 64, 16, "float32", num_heads_kv=2)
        assert run(peers.fa101_cached(page_size), case=case)[name]["status"] == "ok"

    def test_must_be_whole(self):
        case = Case("decode", 2, 4, 1, 40, 16, "float32", num_heads_kv=2)
        result = run(peers.fa101_cached(16), case=case)["paged-16"]
        assert result["status"] == "skipped"
        assert "no whole pages of 16" in result["reason"]


class TestFp8:
    def test_answers_decode_and_counts_its_own_bytes(self):
        case = Case("decode", 2, 4, 1, 64, 16, "bfloat16", num_heads_kv=2)
        result = run(peers.fa101_fp8(), case=case)["fp8"]
        assert result["status"] == "ok"
        assert "vs_best_peer" not in result
        traffic = result["gbytes_per_s"] * result["median_ms"] * 1e6
        assert traffic == pytest.approx(2 * 16 * (4 * 2 * 2 + 2 * 2 * 64))

    def test_is_for_16_bits(self):
        case = Case("decode", 2, 4, 1, 64, 16, "float32", num_heads_kv=2)
        assert run(peers.fa101_fp8(), case=case)["fp8"]["status"] == "skipped"


class TestCudaTimer:
    """Its logic, on a machine where the device is the host."""

    def test_flushes_cover_the_hosts_time(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        timer = timing.CudaTimer(CPU)
        assert timer.flush_us > 0
        flushes = []
        monkeypatch.setattr(timer, "flush", lambda: flushes.append(1))
        timer.flush_us = 1000
        watch = timer.watch(lambda: time.sleep(0.0051))
        times = watch.measure(2)
        assert len(flushes) == 2  # nothing is known of the call yet
        assert min(times) > 5
        assert watch.host_us > 5000
        expected = 1 + min(16, int((watch.host_us + 30) / 1000))
        flushes.clear()
        watch.measure(1)
        assert len(flushes) == expected > 5


class TestHostTimer:
    @pytest.fixture
    def device(self, monkeypatch):
        """A queue of 1000 launches before a device, in a time of their own."""

        class Device:
            host_us, device_us = 10, 3

            def __init__(self):
                self.now = self.done_at = 0.0
                self.calls = 0

            def call(self):
                self.calls += 1
                self.now = max(self.now + self.host_us, self.done_at - 1000 * self.device_us)
                self.done_at = max(self.done_at, self.now) + self.device_us

            def synchronize(self):
                self.now = max(self.now, self.done_at)

        device = Device()
        monkeypatch.setattr(timing.time, "perf_counter", lambda: 1e-6 * device.now)
        return device

    @pytest.fixture
    def watch(self, device, monkeypatch):
        timer = timing.HostTimer(CPU)
        monkeypatch.setattr(timer, "synchronize", device.synchronize)
        return timer.watch(device.call)

    def test_is_the_wall_clock_of_10000_calls(self, device, watch):
        assert watch.measure(2) == pytest.approx([0.01] * 2)
        assert watch.calls == 10_000
        assert device.calls == 100 + 2 * 10_000
        assert watch.calls_behind < 1

    def test_knows_when_it_waited_for_the_device(self, device, watch):
        device.device_us = 20
        assert watch.measure(1) == pytest.approx([0.018], rel=0.01)  # the first 2000 in 10 us
        assert 900 < watch.calls_behind < 1200

    def test_slow_calls_are_fewer(self, device, watch):
        device.host_us = 1000
        assert watch.measure(1) == pytest.approx([1])
        assert watch.calls == pytest.approx(2000, abs=1)

    @pytest.mark.parametrize("case", suites.SUITES["host"], ids=lambda case: case.name)
    def test_the_calls_users_make_are_right(self, case, monkeypatch):
        monkeypatch.setattr(timing.HostTimer, "CALLS", 2)
        guard = runner.Guard(max_seconds=5, budget=1, host_loops=3)
        contenders = peers.fa101_calls()
        row = runner.run_case(case, contenders, timing.HostTimer(CPU), guard, CEILING)
        assert [result["status"] for result in row["results"]] == ["ok"] * 4
        assert [len(result["times_ms"]) for result in row["results"]] == [3] * 4
        assert [result["calls"] for result in row["results"]] == [2] * 4

    @pytest.mark.gpu
    @pytest.mark.parametrize("case", suites.SUITES["host"], ids=lambda case: case.name)
    def test_an_eager_call_costs_the_host_little(self, case):
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            timer = timing.HostTimer(torch.device("cuda"))
            guard = runner.Guard(max_seconds=5, budget=1, host_loops=3)
            row = runner.run_case(case, peers.fa101_calls(), timer, guard, CEILING)
        assert {result["status"] for result in row["results"]} == {"ok"}
        assert {result["calls"] for result in row["results"]} == {10_000}
        # A bound that no host of a GPU misses by being slow, only by a wait for the device.
        assert all(result["best_ms"] < 0.1 for result in row["results"])


@pytest.mark.gpu
class TestCudaGraph:
    @pytest.fixture
    def timer(self):
        with torch.cuda.stream(torch.cuda.Stream()):
            yield timing.CudaTimer(torch.device("cuda"))

    def test_replays_its_calls(self, timer):
        x = torch.zeros(1 << 24, device="cuda")
        graph = timer.capture([lambda: x.add_(1)] * 3)
        assert (graph.calls, len(graph.outputs)) == (3, 3)
        timer.synchronize()
        assert x[0] == 0  # captured, not run
        times = graph.measure(4)
        assert x[-1] == 12
        assert len(times) == 4
        # 128 MiB read and written; the rate of no GPU, and of none that is idle half the time.
        assert 2**27 / 20e12 < 1e-3 * min(times) < 2**27 / 0.1e12

    def test_a_capture_that_fails_says_why_and_harms_nothing(self, timer):
        x = torch.ones(1000, device="cuda")

        def bad():
            return x.sum().item()

        with pytest.raises(RuntimeError, match="captur"):
            timer.capture([bad])

        def unfit():
            raise UnfitError("wants float16")

        with pytest.raises(UnfitError, match="wants float16"):
            timer.capture([unfit])
        assert timer.capture([lambda: x.mul_(2)]).measure(1)
        assert x.sum().item() == 2000

    def test_splits_are_measured_by_replays(self, monkeypatch, tmp_path):
        case = Case("tiny", 1, 8, 1, 1024, 128, "bfloat16", num_heads_kv=8)
        monkeypatch.setitem(suites.SUITES, "splits", (case,))
        stored = tmp_path / "splits.json"
        assert main(["--suite", "splits", "--quick", "--json", str(stored)]) == 0
        document = report.load(stored)
        (row,) = document["rows"]
        for result in row["results"]:
            assert ("graph" in result) == (result["status"] == "ok")
        assert report.find(row, "auto")["graph"]["status"] == "ok"
        assert report.plans(document)[1]

    def test_decode_is_measured_both_ways(self, monkeypatch, tmp_path):
        case = Case("tiny", 2, 8, 1, 8192, 128, "bfloat16", num_heads_kv=4)  # 33 MB
        monkeypatch.setitem(suites.SUITES, "decode", (case,))
        stored = tmp_path / "decode.json"
        assert main(["--suite", "decode", "--quick", "--json", str(stored)]) == 0
        document = report.load(stored)
        (row,) = document["rows"]
        assert row["caches"] * row["bytes"] >= 4 * document["device"]["l2_mib"] * 2**20
        fastest = report.find(row, "fa2_cute")
        assert fastest["graph"]["status"] == row["plain_read"]["graph"]["status"] == "ok"
        # Nothing of a cache is in the L2: no faster than 1.3 times what memory gives to a copy.
        rate = fastest["graph"]["gbytes_per_s"]
        assert rate < 1.3e-9 * document["ceilings"]["bytes"]
        for name in ("fa2_cute", "paged-16", "torch-flash"):
            result = report.find(row, name)
            assert result["graph"]["median_ms"] < 1.5 * result["median_ms"]


@pytest.fixture
def tiny(monkeypatch):
    cases = tuple(Case("tiny", 1, 2, 40, 40, 16, "float32", causal) for causal in (False, True))
    monkeypatch.setitem(suites.SUITES, "cpu", cases)
    monkeypatch.setattr(timing, "ceilings", lambda timer, dtypes: CEILING)


@pytest.mark.usefixtures("tiny")
class TestCommand:
    def test_measures_stores_and_shows(self, tmp_path, capsys):
        stored, drawn = tmp_path / "r" / "cpu.json", tmp_path / "cpu.svg"
        code = main(["--suite", "cpu", "--quick", "--json", str(stored), "--plot", str(drawn)])
        assert code == 0
        shown = capsys.readouterr().out
        kernels = [k["name"] for k in fa101.kernels() if k["device"] == "cpu"]
        assert kernels
        for name in [*kernels, "torch-flash", "tiny", "causal"]:
            assert name in shown
        document = report.load(stored)
        assert document["torch"] == torch.__version__
        assert document["device"]["name"] in shown
        assert len(document["rows"]) == 2
        for row in document["rows"]:
            assert row["heads_checked"] == 2
            for result in row["results"]:
                assert result["status"] == "ok"
                assert len(result["times_ms"]) >= 3
        assert drawn.read_text().startswith("<?xml")
        # And from what was stored.
        assert main(["--load", str(stored)]) == 0
        assert capsys.readouterr().out == shown

    def test_a_wrong_kernel_exits_1(self, monkeypatch, capsys):
        right = fa101.flash_attention
        monkeypatch.setattr(fa101, "flash_attention", lambda *a, **k: right(*a, **k).mul_(1.01))
        assert main(["--suite", "cpu", "--peers", "none", "--filter", "full"]) == 1
        assert "FAILED" not in capsys.readouterr().err

    def test_the_planner_is_judged_by_all_it_could_have_taken(self, monkeypatch, tmp_path, capsys):
        monkeypatch.setitem(suites.SUITES, "auto", suites.SUITES["cpu"])
        stored = tmp_path / "auto.json"
        assert (
            main(["--suite", "auto", "--device", "cpu", "--peers", "none", "--json", str(stored)])
            == 0
        )
        document = report.load(stored)
        names = [result["contender"] for result in document["rows"][0]["results"]]
        assert names[0] == "auto"
        assert "cpu_fa2:split_q" in names
        header, lines = report.plans(document)
        assert header[2] == "auto takes"
        assert [line[2] for line in lines] == ["cpu_fa2 split_q"] * 2
        assert all(float(line[-1]) > 0 for line in lines)
        assert "of the fastest" in capsys.readouterr().out

    def test_names_are_picked(self, tmp_path):
        stored = tmp_path / "cpu.json"
        kernel = next(k["name"] for k in fa101.kernels() if k["device"] == "cpu")
        main(["--suite", "cpu", "--kernels", kernel, "--peers", "torch-math", "--filter", "causal",
              "--json", str(stored)])  # fmt: skip
        (row,) = report.load(stored)["rows"]
        assert [result["contender"] for result in row["results"]] == [kernel, "torch-math"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--suite", "nonsense"], "invalid choice"),
            (["--suite", "cpu", "--kernels", "fa9"], "--kernels fa9: here are"),
            (["--suite", "cpu", "--peers", "fa3"], "--peers fa3: here are torch-flash, torch-math"),
            (["--suite", "cpu", "--filter", "d9999"], "--filter d9999"),
            (["--suite", "cpu", "--device", "tpu"], "--device tpu: it must be cpu, cuda or cuda:N"),
            (["--suite", "cpu", "--max-seconds", "inf"], "--max-seconds: inf is not a time"),
            (["--suite", "cpu", "--max-seconds", "0"], "--max-seconds: 0 is not a time"),
            ([], "required"),
            (["--load", "f", "--filter", "d128"], "--filter is for --suite; --load shows all"),
            (["--load", "f", "--quick"], "--quick is for --suite"),
            (["--load", "f", "--max-seconds", "2"], "--max-seconds is for --suite"),
        ],
    )
    def test_bad_arguments_exit_2_naming_them(self, arguments, message, capsys):
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        assert exit_.value.code == 2
        assert message in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (None, "No such file"),
            ("not json", "Expecting value"),
            ('{"rows": []}', "it is no result that --json stored"),
            ("[1]", "it is no result that --json stored"),
            (json.dumps({**stored_document(), "rows": [1]}), "it is no result that --json"),
            (json.dumps({**stored_document(), "rows": []}), "it is no result that --json"),
            (json.dumps({**stored_document(), "rows": 5}), "it is no result that --json"),
            (json.dumps({**stored_document(), "device": {}}), "it is no result that --json"),
            ("[" * 100_000, "it is no result that --json stored"),
            (b"\xff\xfe", "can't decode"),
        ],
    )
    def test_what_cannot_be_loaded_is_named(self, text, message, tmp_path, capsys):
        stored = tmp_path / "stored.json"
        if text is not None:
            stored.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(SystemExit) as exit_:
            main(["--load", str(stored)])
        assert exit_.value.code == 2
        assert f"--load {stored}: " in (shown := capsys.readouterr().err)
        assert message in shown

    @pytest.mark.parametrize(
        ("name", "message"), [("a.gif", "it must end in .svg"), ("file/a.svg", "exists")]
    )
    def test_what_cannot_be_drawn_is_named(self, name, message, tmp_path, capsys):
        stored = tmp_path / "stored.json"
        report.save(stored_document(), stored)
        (tmp_path / "file").write_text("")
        drawn = tmp_path / name
        with pytest.raises(SystemExit) as exit_:
            main(["--load", str(stored), "--plot", str(drawn)])
        assert exit_.value.code == 2
        assert f"--plot {drawn}: " in (shown := capsys.readouterr().err)
        assert message in shown

    def test_where_nothing_can_be_stored_is_named(self, tmp_path, capsys):
        stored = tmp_path / "stored.json"
        report.save(stored_document(), stored)
        for arguments in (["--load", str(stored)], ["--suite", "cpu", "--peers", "none"]):
            with pytest.raises(SystemExit) as exit_:
                main([*arguments, "--json", str(tmp_path)])
            assert exit_.value.code == 2
            assert f"--json {tmp_path}: [Errno" in capsys.readouterr().err

    def test_a_gpu_suite_without_a_gpu_says_what_to_do(self, monkeypatch, capsys):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(SystemExit):
            main(["--suite", "prefill"])
        assert "torch sees no GPU; --device cpu" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["torch", "rich"])
def test_what_is_missing_is_named(missing):
    program = (
        f"import sys; sys.modules[{missing!r}] = None; import fa101.bench.__main__ as bench; "
        "sys.exit(bench.main(['--suite', 'cpu']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"fa101.bench needs {missing}: pip install 'fa101[bench]'\n"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu(dtype, monkeypatch, tmp_path):
    case = Case("tiny", 2, 4, 300, 300, 64, dtype, causal=True)
    monkeypatch.setitem(suites.SUITES, "prefill", (case,))
    stored = tmp_path / "gpu.json"
    assert main(["--suite", "prefill", "--quick", "--json", str(stored)]) == 0
    document = report.load(stored)
    timed = {r["contender"]: r for r in document["rows"][0]["results"] if r["status"] == "ok"}
    assert {"naive", "fa1", "fa2", "torch-efficient", "torch-math"} <= set(timed)
    assert all(0 < result["median_ms"] < 100 for result in timed.values())


def decode_document():
    def way(ms, gbytes, **more):
        return {"status": "ok", "median_ms": ms, "gbytes_per_s": gbytes, **more}

    def both(name, graph, eager, is_peer=False):
        return {"contender": name, "is_peer": is_peer, **eager, "graph": graph}

    refused = {"status": "skipped", "reason": "no capture"}
    case = Case("cache", 8, 32, 1, 8192, 128, "bfloat16", num_heads_kv=8)
    return {
        **stored_document(),
        "suite": "decode",
        "rows": [
            {
                **vars(case),
                "label": case.label,
                "plain_read": {**way(0.025, 2400), "graph": way(0.02, 3000)},
                "results": [
                    both("fa2_cute", way(0.03, 2000, vs_best_peer=1.333), way(0.033, 1800)),
                    both("torch-flash", refused, way(0.04, 1500), is_peer=True),
                    both("fa3", way(0.04, 1500, vs_best_peer=1.0), way(0.044, 1400), is_peer=True),
                ],
            }
        ],
    }


def host_document():
    def result(name, best_ms, median_ms, calls_behind):
        times = {"best_ms": best_ms, "median_ms": median_ms, "calls_behind": calls_behind}
        return {"contender": name, "is_peer": False, "status": "ok", **times}

    case = Case("tiny", 1, 8, 64, 64, 64, "bfloat16")
    results = [result("prompt", 0.009, 0.01, 1), result("late", 0.04, 0.05, 300)]
    row = {**vars(case), "label": case.label, "results": results}
    return {**stored_document(), "suite": "host", "rows": [row]}


class TestPlots:
    @pytest.fixture
    def drawn(self, monkeypatch, tmp_path):
        """What plot() draws: the axis and the bars of every contender, labelled rows in order."""
        from matplotlib import pyplot

        def draw(document):
            figures = []
            monkeypatch.setattr(pyplot, "close", figures.append)
            report.plot(document, tmp_path / "drawn.svg")
            (axes,) = figures[0].axes
            bars = {c.get_label(): [bar.get_height() for bar in c] for c in axes.containers}
            return axes.get_ylabel(), bars

        yield draw
        monkeypatch.undo()
        pyplot.close("all")

    def test_rates(self, drawn):
        assert drawn(stored_document()) == (
            "TFLOP/s",
            {
                "naive": [0.1, 0.125],
                "fa2": [0.5, 0],
                "torch-flash": [2, 4],
            },
        )

    def test_decode_is_bytes_of_replays(self, drawn):
        assert drawn(decode_document()) == (
            "GB/s by graph replay",
            {"plain read": [3000], "fa2_cute": [2000], "torch-flash": [0], "fa3": [1500]},
        )

    @pytest.mark.parametrize(
        ("suite", "label", "naive"),
        [
            ("host", "us of the host for a call", [10_000, 8_000]),
            ("auto", "us", [10_000, 8_000]),
        ],
    )
    def test_others_are_times(self, drawn, suite, label, naive):
        shown, bars = drawn({**stored_document(), "suite": suite})
        assert (shown, bars["naive"]) == (label, naive)

    def test_splits_are_times_of_replays(self, drawn):
        label, bars = drawn({**decode_document(), "suite": "splits"})
        assert label == "us by graph replay"
        assert bars == {"fa2_cute": [30], "torch-flash": [0], "fa3": [40]}


class TestTables:
    @pytest.fixture
    def results(self, tmp_path):
        (tmp_path / "gpu-x").mkdir()
        report.save(decode_document(), tmp_path / "gpu-x" / "decode.json")
        report.save(stored_document(), tmp_path / "gpu-x" / "seeds.json")
        report.save(host_document(), tmp_path / "gpu-x" / "host.json")
        shipped = ROOT / "benchmarks" / "results" / "sources.json"
        (tmp_path / "sources.json").write_text(shipped.read_text())
        return tmp_path

    @pytest.mark.parametrize(
        ("ask", "line"),
        [
            ("matrix gpu-x/seeds.json full",
             "| fa101 | full | float16 | 10.0 (0.100) | 2.00 (0.500) | 0.500 (2.00) | 0.25 | 5 % "
             "|"),
            ("ladder gpu-x/seeds.json full", "| fa2 | 2.00 | 0.500 | 5.00 | 5 % | 1.0e-03 |"),
            ("decode gpu-x/decode.json",
             "| cache | 20.0 (3000) / 25.0 | 30.0 (2000) / 33.0 | - / 40.0 | 40.0 (1500) / 44.0 "
             "| 1.33 | 67 % |"),
            ("host gpu-x/host.json", "| us of the host for a call, best / median | tiny |"),
            ("host gpu-x/host.json", "| prompt | 9.0 / 10.0 |"),
            ("host gpu-x/host.json", "| late | 40.0 / 50.0 (the device's) |"),
            ("masks gpu-x/seeds.json",
             "| fa101 | float16 | 0.100 / 0.125 | 0.500 / - | 2.00 / 4.00 |"),
            ("sources gpu-x/seeds.json",
             "| [flash-attn-101](https://github.com/HuyNguyen-hust/flash-attn-101) | "
             "fa101 causal float16 | naive attention | 53.8 ms on an A100 80GB PCIe slice "
             "(MIG 1g.10gb) | `naive` | 8.00 ms on GPU X |"),
        ],
    )  # fmt: skip
    def test_views(self, results, ask, line):
        text = tables.generate(ask, results)
        assert line in text.splitlines()
        assert text.endswith(
            "GPU X, driver 580, CUDA 13.0, torch 2.11, fa101 0.1.0, commit 0123456789, "
            "2026-01-02.\n"
        )

    def test_only_what_is_between_the_marks_changes(self, results, tmp_path, capsys):
        page = tmp_path / "README.md"
        ask = "<!-- bench: matrix gpu-x/seeds.json full -->\n"
        page.write_text(f"before\n{ask}typed by hand\n<!-- /bench -->\nafter\n")
        where = [str(page), "--results", str(results)]
        assert tables.main([*where, "--check"]) == 1
        assert "typed by hand" in page.read_text()
        assert tables.main(where) == 0
        text = page.read_text()
        assert text.startswith(f"before\n{ask}| case |")
        assert text.endswith("<!-- /bench -->\nafter\n")
        assert "typed by hand" not in text
        assert tables.main([*where, "--check"]) == 0

    def test_pictures_are_drawn_beside_the_page(self, results, tmp_path):
        page = tmp_path / "README.md"
        page.write_text("<!-- bench: plot gpu-x/seeds.json img/a.svg -->\n<!-- /bench -->\n")
        where = [str(page), "--results", str(results)]
        assert tables.main([*where, "--check"]) == 1
        assert not (tmp_path / "img").exists()
        assert tables.main(where) == 0
        assert "](img/a.svg)\n" in page.read_text()
        first = (tmp_path / "img" / "a.svg").read_bytes()
        assert first.startswith(b"<?xml")
        page.write_text(page.read_text().replace("![", "!!["))
        assert tables.main(where) == 0
        assert (tmp_path / "img" / "a.svg").read_bytes() == first

    @pytest.mark.parametrize("ask", ["nothing gpu-x/seeds.json", "matrix gpu-x/seeds.json d7"])
    def test_what_cannot_be_made_is_an_error(self, results, tmp_path, ask):
        page = tmp_path / "README.md"
        page.write_text(f"<!-- bench: {ask} -->\n<!-- /bench -->\n")
        with pytest.raises(SystemExit):
            tables.main([str(page), "--results", str(results)])

    def test_a_page_that_is_not_there_is_named(self, tmp_path, capsys):
        with pytest.raises(SystemExit) as exit_:
            tables.main([str(tmp_path / "nope.md")])
        assert exit_.value.code == 2
        assert f"error: {tmp_path / 'nope.md'}: " in capsys.readouterr().err

    def test_the_projects_own_pages_are_up_to_date(self):
        pages = [str(path) for path in (ROOT / "README.md", *ROOT.glob("docs/*.md"))]
        pages = [path for path in pages if Path(path).exists()]
        where = ["--results", str(ROOT / "benchmarks" / "results")]
        assert tables.main([*pages, *where, "--check"]) == 0

    def test_failures_and_the_absent_are_told(self):
        notes = report.notes(stored_document())
        assert notes == ["fa1 failed in fa101 causal float16: wrong", "fa3 absent: not here"]

    def test_lists_of_numbers_are_stored_on_one_line(self, tmp_path):
        document = {"rows": [{"times_ms": [1.5, 2e-05, 3], "label": "[1,\n2]", "results": [{}]}]}
        report.save(document, tmp_path / "x.json")
        text = (tmp_path / "x.json").read_text()
        assert "[ 1.5, 2e-05, 3 ]" in text
        assert json.loads(text) == document
