// FlashAttention-1 (Dao et al. 2022, arXiv 2205.14135, algorithm 1) on a CPU.
//
//     for every head, in parallel
//         O = 0, l = 0, m = -inf                               in memory
//         for every tile of keys                               K_j, V_j: into L2, as float32
//             for every panel of queries that sees some        Q_i, O_i, l_i, m_i: in and out again
//                 S^T = K Q^T     P^T = 2^(S^T - m)
//                 O_i = (alpha l_i O_i + P V) / l_i'
//
// Against cpu_naive: a tile of keys stays in L2 while all queries meet it, S and P live in L1 for a
// moment and never travel, and the products run in register tiles whose operands are used several
// times; memory is O(N). But now O travels: it is read and written once for every tile of keys,
// 2 * Sq * Dv * 4 bytes * (Sk / Bc), and Q is read as often. With S 2048, D 128 and Bc 64 that is
// 32 times 3 MB a head, and each trip pays for two transpositions and for a division of O that only
// the last one needs.
//
// Next rung, cpu_fa2: queries in the outer loop. O stays where it is and is divided once; and
// blocks of queries are independent, so that one head alone keeps all threads busy.
#include "cpu/cpu_families.h"
#include "cpu/parallel.h"
#include "cpu/tiles.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace fa101 {
namespace {

Tile tile(const Problem& problem, const DeviceInfo& device) {
    Tile tile;
    tile.block_m = simd_kernels(device.simd).panel;
    tile.block_n = 64;
    tile.head_dim = static_cast<int>(problem.head_dim);
    tile.num_warps = device.num_threads;
    return tile;
}

// One thread's buffers: the tile of keys, one panel, and the head's O, m and l "in memory".
struct HeadState {
    HeadState(Arena& arena, const Tile& tile, const Problem& problem)
        : keys(arena, tile.block_n, problem),
          scratch(arena, tile.block_n, problem),
          q_panel(arena.floats(panel_floats(kMaxPanel, problem.head_dim))),
          o_panel(arena.floats(panel_floats(kMaxPanel, problem.head_dim_v))),
          o(arena.floats(problem.seqlen_q * problem.head_dim_v)),
          row_max(arena.floats(problem.seqlen_q + kMaxPanel)),
          row_sum(arena.floats(problem.seqlen_q + kMaxPanel)) {}

    KeyTile keys;
    Scratch scratch;
    float *q_panel, *o_panel;
    float* o;                  // [seqlen_q][head_dim_v]
    float *row_max, *row_sum;  // [seqlen_q]
};

int64_t workspace(const Plan& plan, const Problem& problem) {
    const Tile& tile = plan.tile;
    Arena arena;
    arena.make<HeadState>(tile.num_warps, tile, problem);
    return arena.bytes();
}

// O_i from memory, its normalisation undone.
void load_o(const SimdKernels& simd, const Problem& problem, const Panel& panel, HeadState& state) {
    const int64_t dv = problem.head_dim_v, ld = tile_stride(dv);
    simd.load_rows(DType::kFloat32, state.o + panel.begin * dv, dv, 1, panel.rows, dv,
                   state.row_sum + panel.begin, state.scratch.rows, ld);
    simd.transpose(state.scratch.rows, ld, panel.rows, dv, state.o_panel, panel.width);
}

void save_o(const SimdKernels& simd, const Problem& problem, const Panel& panel, HeadState& state) {
    const int64_t dv = problem.head_dim_v, ld = tile_stride(dv);
    for (int i = 0; i < panel.rows; ++i) {
        const float l = state.row_sum[panel.begin + i];
        state.scratch.row_scale[i] = l == 0.0f ? 0.0f : 1.0f / l;  // 0: nothing seen so far
    }
    simd.transpose(state.o_panel, panel.width, dv, panel.rows, state.scratch.rows, ld);
    simd.store_rows(DType::kFloat32, state.scratch.rows, ld, panel.rows, dv,
                    state.scratch.row_scale, state.o + panel.begin * dv, dv);
}

void attend_head(const SimdKernels& simd, const Problem& problem, const Tile& tile,
                 const Head& head, HeadState& state) {
    std::fill_n(state.o, problem.seqlen_q * problem.head_dim_v, 0.0f);
    std::fill_n(state.row_max, problem.seqlen_q + kMaxPanel,
                -std::numeric_limits<float>::infinity());
    std::fill_n(state.row_sum, problem.seqlen_q + kMaxPanel, 0.0f);

    for (int64_t begin = 0; begin == 0 || begin < head.num_keys(); begin += tile.block_n) {
        head.load_keys(begin, std::min<int64_t>(tile.block_n, head.num_keys() - begin), state.keys);
        int64_t rows;
        for (int64_t m_begin = 0; m_begin < problem.seqlen_q; m_begin += rows) {
            const Panel panel = head.panel(m_begin, problem.seqlen_q);
            rows = panel.rows;
            const KeyRange keys = head.keys(panel);
            // Without keys a panel meets the first tile, for its zeros.
            if (begin >= std::max<int64_t>(keys.end, 1)) continue;
            if (begin + tile.block_n <= keys.begin) continue;
            float* row_max = state.row_max + m_begin;
            float* row_sum = state.row_sum + m_begin;
            head.load_q(panel, state.scratch, state.q_panel);
            load_o(simd, problem, panel, state);
            head.attend(panel, state.q_panel, state.keys, state.scratch, row_max, row_sum,
                        state.o_panel);
            if (begin + tile.block_n < keys.end) {
                save_o(simd, problem, panel, state);
            } else {  // the panel has met its last key
                head.store_o(panel, state.o_panel, row_max, row_sum, state.scratch);
            }
        }
    }
}

}  // namespace

void run_cpu_fa1(const SimdKernels& simd, const Plan& plan, const Problem& problem,
                 const Tensors& tensors, void* workspace) {
    const Tile& tile = plan.tile;
    Arena arena(workspace);
    std::vector<HeadState> states = arena.make<HeadState>(tile.num_warps, tile, problem);
    const int64_t num_tasks = problem.batch * problem.num_heads;
    parallel_for(num_tasks, useful_threads(problem, num_tasks, tile.num_warps),
                 [&](int64_t task, int worker) {
                     const Head head(simd, problem, tensors, task);
                     attend_head(simd, problem, tile, head, states[worker]);
                 });
}

constexpr KernelFamily kCpuFa1Family = {
    "cpu_fa1",
    Strategy::kSplitQ,
    DeviceType::kCpu,
    "FlashAttention-1 on a CPU: tiles and online softmax, keys outer, O rescaled in memory",
    [](const Problem&, const DeviceInfo&) { return std::string(); },
    tile,
    /*splits=*/nullptr,
    workspace,
    [](const Plan& plan, const Problem& problem, const Tensors& tensors, void* workspace, Stream) {
        run_cpu_fa1(simd_kernels(cpu_simd_level()), plan, problem, tensors, workspace);
    },
    nullptr,
    /*reads_pages=*/true,
};

}  // namespace fa101
