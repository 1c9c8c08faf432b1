// FlashAttention-2 (Dao 2023, arXiv 2307.08691) on a CPU: the loops of cpu_fa1 swapped.
//
//     for every block of queries, in parallel                  Q^T and O^T stay in L2
//         for every tile of keys it sees                       K and V tile: into L2, as float32
//             for every panel of the block's queries           S^T: L1
//                 S^T = K Q^T     P^T = 2^(S^T - m)     O^T = alpha O^T + V^T P^T
//         O = O^T / l                                          once
//
// Traffic. A block of M queries reads every K and V once: Sq / M * Sk * (D + Dv) elements from L3
// or memory, and Q and O once each; S never leaves L1. With M = 256 an element that comes in meets
// 256 FMAs, 16 cycles of an AVX-512 unit: memory is no longer the limit, and the inner loops run at
// the speed of the FMA units. cpu_fa1 moves O (and Q) once per tile of keys instead, and has only
// batch * heads tasks for its threads.
//
// Next rung: none on a CPU. The register tile (simd_kernels.cpp) runs at the FMA peak; what is left
// is the softmax (19 FMA slots a logit against 2 D in the products), the copying of K and V, which
// for short sequences is their first trip from memory, and on the diagonal the half of a panel's
// logits that is computed for nothing.
#include "cpu/cpu_families.h"
#include "cpu/parallel.h"
#include "cpu/tiles.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace fa101 {
namespace {

Tile tile(const Problem& problem, const DeviceInfo& device) {
    // The panels of a block and the tiles it meets share L2 (512 KB and more on servers): 256 KB
    // for the first, 128 KB for the second. Beyond 256 queries nothing is gained.
    const int64_t row_bytes = 4 * (problem.head_dim + problem.head_dim_v);
    int64_t block_m = std::clamp<int64_t>((256 << 10) / row_bytes, 32, 256);
    block_m = std::min(block_m, problem.seqlen_q);
    // Several tasks a thread, so that all finish together.
    const int64_t heads = problem.batch * problem.num_heads;
    while (block_m > 32 && heads * ceil_div(problem.seqlen_q, block_m) < 4 * device.num_threads) {
        block_m /= 2;
    }
    Tile tile;
    tile.block_m = static_cast<int>(round_up<int64_t>(block_m, kMaxVector));
    tile.block_n = static_cast<int>(std::clamp<int64_t>((128 << 10) / row_bytes, 32, 128));
    tile.head_dim = static_cast<int>(problem.head_dim);
    tile.num_warps = device.num_threads;
    return tile;
}

// One thread's buffers.
struct Block {
    Block(Arena& arena, const Tile& tile, const Problem& problem)
        : keys(arena, tile.block_n, problem),
          scratch(arena, tile.block_n, problem),
          q(arena.floats(panel_floats(tile.block_m, problem.head_dim))),
          o(arena.floats(panel_floats(tile.block_m, problem.head_dim_v))),
          row_max(arena.floats(tile.block_m)),
          row_sum(arena.floats(tile.block_m)) {}

    KeyTile keys;
    Scratch scratch;
    float *q, *o;              // the panels, one after the other
    float *row_max, *row_sum;  // [block_m]
};

int64_t workspace(const Plan& plan, const Problem& problem) {
    const Tile& tile = plan.tile;
    Arena arena;
    arena.make<Block>(tile.num_warps, tile, problem);
    return arena.bytes();
}

void attend_block(const Head& head, const Problem& problem, const Tile& tile, int64_t m_begin,
                  Block& block) {
    const int64_t m_end = std::min(m_begin + tile.block_m, problem.seqlen_q);
    const auto for_each_panel = [&](auto body) {
        int64_t rows;
        for (int64_t begin = m_begin; begin < m_end; begin += rows) {
            const Panel panel = head.panel(begin, m_end);
            const int64_t lane = begin - m_begin;
            body(panel, block.q + panel_floats(lane, problem.head_dim),
                 block.o + panel_floats(lane, problem.head_dim_v), block.row_max + lane,
                 block.row_sum + lane);
            rows = panel.rows;
        }
    };

    std::fill_n(block.o, panel_floats(tile.block_m, problem.head_dim_v), 0.0f);
    std::fill_n(block.row_max, tile.block_m, -std::numeric_limits<float>::infinity());
    std::fill_n(block.row_sum, tile.block_m, 0.0f);
    for_each_panel([&](const Panel& panel, float* q, float*, float*, float*) {
        head.load_q(panel, block.scratch, q);
    });

    // Tiles start at multiples of their size: were it at keys.begin, bits would depend on block_m,
    // which depends on the number of threads.
    const KeyRange keys = head.keys(m_begin, m_end);
    for (int64_t begin = keys.begin / tile.block_n * tile.block_n; begin < keys.end;
         begin += tile.block_n) {
        head.load_keys(begin, std::min<int64_t>(tile.block_n, keys.end - begin), block.keys);
        for_each_panel([&](const Panel& panel, float* q, float* o, float* m, float* l) {
            head.attend(panel, q, block.keys, block.scratch, m, l, o);
        });
    }

    for_each_panel([&](const Panel& panel, float*, float* o, float* m, float* l) {
        head.store_o(panel, o, m, l, block.scratch);
    });
}

}  // namespace

void run_cpu_fa2(const SimdKernels& simd, const Plan& plan, const Problem& problem,
                 const Tensors& tensors, void* workspace) {
    const Tile& tile = plan.tile;
    Arena arena(workspace);
    std::vector<Block> blocks = arena.make<Block>(tile.num_warps, tile, problem);
    const int64_t m_blocks = ceil_div<int64_t>(problem.seqlen_q, tile.block_m);
    const int64_t num_tasks = problem.batch * problem.num_heads * m_blocks;
    parallel_for(num_tasks, useful_threads(problem, num_tasks, tile.num_warps),
                 [&](int64_t task, int worker) {
                     const Head head(simd, problem, tensors, task / m_blocks);
                     // The last block of a head sees the most keys: long tasks first.
                     const int64_t m_block = m_blocks - 1 - task % m_blocks;
                     attend_block(head, problem, tile, m_block * tile.block_m, blocks[worker]);
                 });
}

constexpr KernelFamily kCpuFa2Family = {
    "cpu_fa2",
    Strategy::kSplitQ,
    DeviceType::kCpu,
    "FlashAttention-2 on a CPU: queries outer, tiles in L1 and L2, a register-blocked inner loop",
    [](const Problem&, const DeviceInfo&) { return std::string(); },
    tile,
    /*splits=*/nullptr,
    workspace,
    [](const Plan& plan, const Problem& problem, const Tensors& tensors, void* workspace, Stream) {
        run_cpu_fa2(simd_kernels(cpu_simd_level()), plan, problem, tensors, workspace);
    },
    nullptr,
    /*reads_pages=*/true,
};

}  // namespace fa101
