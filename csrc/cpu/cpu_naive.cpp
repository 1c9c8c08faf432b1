// The textbook, with the S x S matrix in memory and no tiles anywhere:
//
//     1.  S = softmax_scale * Q K^T        write S
//     2.  P = softmax(S)                   read S, write P
//     3.  O = P V                          read P
//
// Vectorised (a lane is a query) and threaded, but count the bytes. S makes four trips of
// Sq * Sk * 4 bytes a head: with S 2048 that is 67 MB, where Q, K, V and O together have 4 MB
// (D 128). And nothing is used twice while it is near: a vector of Q that was loaded meets one key,
// a vector of P one channel, so every FMA waits for a load, and each few queries walk through all
// of K and V again. On a CPU with large caches the second costs more than the first: half of the
// FMA peak is lost to it, and a tenth or more to the trips of S.
//
// Next rung, cpu_fa1: tiles, in the registers as well as in L1 and L2.
#include "cpu/cpu_families.h"
#include "cpu/parallel.h"
#include "cpu/tiles.h"

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

namespace fa101 {
namespace {

// Work on whole sequences is cut into chunks of this many keys (whole register tiles).
constexpr int64_t kChunk = 256;
static_assert(kChunk % kMaxRows == 0, "chunks of K must not pad into each other");

Tile tile(const Problem& problem, const DeviceInfo& device) {
    Tile tile;
    tile.block_m = simd_kernels(device.simd).panel;
    tile.block_n = static_cast<int>(problem.seqlen_k);  // no tiles
    tile.head_dim = static_cast<int>(problem.head_dim);
    tile.num_warps = device.num_threads;
    return tile;
}

// One head in memory.
struct HeadMatrices {
    HeadMatrices(Arena& arena, const Problem& problem)
        : lanes(round_up<int64_t>(problem.seqlen_q, kMaxVector)),
          keys(arena, problem.seqlen_k, problem),
          s(arena.floats(panel_floats(lanes, problem.seqlen_k))),
          row_max(arena.floats(lanes)),
          row_sum(arena.floats(lanes)) {}

    int64_t lanes;
    KeyTile keys;              // all of K and V, as float32
    float* s;                  // S^T, then P^T: panels [seqlen_k][width], one after the other
    float *row_max, *row_sum;  // [lanes]
};

// Heads whose matrices are in memory at a time: enough to fill 64 MB, so that short sequences do
// not start threads for every single head.
int64_t heads_at_once(const Problem& problem) {
    Arena one_head;
    HeadMatrices(one_head, problem);
    return std::clamp<int64_t>((int64_t{64} << 20) / std::max<int64_t>(one_head.bytes(), 1), 1,
                               problem.batch * problem.num_heads);
}

// One thread's buffers.
struct Buffers {
    Buffers(Arena& arena, const Problem& problem)
        : scratch(arena, kChunk, problem),
          q_panel(arena.floats(panel_floats(kMaxPanel, problem.head_dim))),
          o_panel(arena.floats(panel_floats(kMaxPanel, problem.head_dim_v))) {}

    Scratch scratch;
    float *q_panel, *o_panel;
};

int64_t workspace(const Plan& plan, const Problem& problem) {
    const Tile& tile = plan.tile;
    Arena arena;
    arena.make<HeadMatrices>(heads_at_once(problem), problem);
    arena.make<Buffers>(tile.num_warps, problem);
    return arena.bytes();
}

std::string supports(const Problem& problem, const DeviceInfo&) {
    constexpr double kMaxBytes = 1e15;  // past any machine, and far below the ends of 64 bits
    const double bytes =
        4.0 * static_cast<double>(problem.seqlen_q) * static_cast<double>(problem.seqlen_k);
    if (bytes <= kMaxBytes) return "";
    return "S of one head, " + std::to_string(problem.seqlen_q) + " x " +
           std::to_string(problem.seqlen_k) + " floats, takes more than 1e15 bytes";
}

}  // namespace

void run_cpu_naive(const SimdKernels& simd, const Plan& plan, const Problem& problem,
                   const Tensors& tensors, void* workspace) {
    const int64_t seqlen_q = problem.seqlen_q, seqlen_k = problem.seqlen_k;
    const int num_threads = plan.tile.num_warps;
    Arena arena(workspace);
    std::vector<HeadMatrices> matrices = arena.make<HeadMatrices>(heads_at_once(problem), problem);
    std::vector<Buffers> buffers = arena.make<Buffers>(num_threads, problem);

    const int64_t num_heads = problem.batch * problem.num_heads;
    const int64_t group = static_cast<int64_t>(matrices.size());
    for (int64_t first = 0; first < num_heads; first += group) {
        const int64_t heads = std::min(group, num_heads - first);

        // Calls body for chunks or panels 0, step, 2 step, ... < end of every head, in parallel.
        const auto for_each = [&](int64_t end, int64_t step, auto body) {
            const int64_t per_head = ceil_div(end, step);
            parallel_for(heads * per_head, useful_threads(problem, heads * per_head, num_threads),
                         [&](int64_t task, int worker) {
                             const int64_t index = task / per_head;
                             const Head head(simd, problem, tensors, first + index);
                             body(head, matrices[index], task % per_head * step, buffers[worker]);
                         });
        };
        const auto for_each_panel = [&](auto body) {
            for_each(seqlen_q, simd.panel,
                     [&](const Head& head, HeadMatrices& m, int64_t begin, Buffers& buffers) {
                         body(head, head.panel(begin, seqlen_q), m,
                              m.s + panel_floats(begin, seqlen_k), buffers);
                     });
        };

        // 0. float32 copies of K and V.
        for_each(seqlen_k, kChunk, [&](const Head& head, HeadMatrices& m, int64_t begin, Buffers&) {
            KeyTile chunk = m.keys;
            chunk.k += begin * tile_stride(problem.head_dim);
            chunk.v += begin * tile_stride(problem.head_dim_v);
            const int64_t n = std::min(kChunk, head.num_keys() - begin);
            if (n > 0) head.load_keys(begin, n, chunk);
        });

        // 1. S = softmax_scale * Q K^T
        for_each_panel(
            [&](const Head& head, const Panel& panel, HeadMatrices& m, float* s, Buffers& buffers) {
                const KeyRange keys = head.keys(panel);
                const int64_t ld = tile_stride(problem.head_dim);
                head.load_q(panel, buffers.scratch, buffers.q_panel);
                simd.scores_untiled(m.keys.k + keys.begin * ld, ld, keys.end - keys.begin,
                                    problem.head_dim, buffers.q_panel, panel.width,
                                    s + keys.begin * panel.width);
            });

        // 2. P = softmax(S), but for the division by l, which is left to the end of 3. A chunk is
        // the most that bias and mask have room for.
        for_each_panel(
            [&](const Head& head, const Panel& panel, HeadMatrices& m, float* s, Buffers& buffers) {
                const Scratch& scratch = buffers.scratch;
                const KeyRange keys = head.keys(panel);
                for (int64_t begin = keys.begin; begin < keys.end; begin += kChunk) {
                    head.finish_scores(panel, begin, std::min(kChunk, keys.end - begin), scratch,
                                       s + begin * panel.width);
                }
                float* row_max = m.row_max + panel.begin;
                float* row_sum = m.row_sum + panel.begin;
                std::fill_n(row_max, panel.width, -std::numeric_limits<float>::infinity());
                std::fill_n(row_sum, panel.width, 0.0f);
                simd.softmax(s + keys.begin * panel.width, keys.end - keys.begin, panel.width,
                             row_max, row_sum, scratch.alpha);
            });

        // 3. O = P V, a chunk at a time: a single sum over all keys would lose digits.
        for_each_panel(
            [&](const Head& head, const Panel& panel, HeadMatrices& m, float* s, Buffers& buffers) {
                const Scratch& scratch = buffers.scratch;
                const int64_t dv = problem.head_dim_v;
                const KeyRange keys = head.keys(panel);
                std::fill_n(buffers.o_panel, panel_floats(panel.width, dv), 0.0f);
                std::fill_n(scratch.alpha, panel.width, 1.0f);
                for (int64_t begin = keys.begin; begin < keys.end; begin += kChunk) {
                    head.add_values(simd.accumulate_untiled, panel, begin,
                                    std::min(kChunk, keys.end - begin),
                                    m.keys.v + begin * tile_stride(dv), s + begin * panel.width,
                                    scratch, buffers.o_panel);
                }
                head.store_o(panel, buffers.o_panel, m.row_max + panel.begin,
                             m.row_sum + panel.begin, scratch);
            });
    }
}

constexpr KernelFamily kCpuNaiveFamily = {
    "cpu_naive",
    Strategy::kSplitQ,
    DeviceType::kCpu,
    "the textbook on a CPU: three passes, the S x S matrix in memory",
    supports,
    tile,
    /*splits=*/nullptr,
    workspace,
    [](const Plan& plan, const Problem& problem, const Tensors& tensors, void* workspace, Stream) {
        run_cpu_naive(simd_kernels(cpu_simd_level()), plan, problem, tensors, workspace);
    },
    nullptr,
    /*reads_pages=*/true,
};

}  // namespace fa101
