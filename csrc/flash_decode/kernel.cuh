// Lesson 4: few queries. Decoding asks one query (or a few) per head of a long cache: 4 * head_dim
// FLOP a key and query against 4 * head_dim bytes a key, so memory sets the pace and the only aim
// is to keep all of its bandwidth busy. Two things change from lesson 3:
//
//   1. One tile of queries gives one block per head, too few for the GPU. So the keys are split
//      over blocks too, into as many equal pieces as fill it (key_splits.h); each writes its part
//      of O, normalised, and its lse, and the last blocks of the grid (merge.cuh) merge them,
//      exactly: O = sum_i 2^(lse_i - lse) O_i. A short sequence is not split: its part is the
//      result.
//   2. With grouped heads, group_size query heads read the same K and V. They are rows of one tile,
//      so the keys are read once: row r is query r / group_size of head r % group_size.
//
//      rows (query, head)             keys ->   split 0     split 1     split 2
//      16 rows: a block of 4 warps (or 2)       0123 0123 | 0123 0123 | 0123 0123   warp of a step
//      64 rows: 16 to each warp                 all  all  | all  all  | all  all
//
// A *team* is the threads that share keys. Up to 16 rows (the smallest mma) it is a warp: each has
// its own keys, stages, m, l and O, never waits for another, and all are merged at the end
// through shared memory. With more rows it is the block, as in lesson 3.
//
// Bytes: K and V once per tile of rows. A split writes 4 * head_dim_v bytes a row, which are read
// again; see min_keys in splits.h for what that costs. A multiprocessor's share of an H200's 4.8
// TB/s is 36 KB a microsecond, about what a load takes to arrive, so more than that must be on its
// way at any time: kStages - 1 tiles ahead, in two blocks a multiprocessor, are 128 KB. K and V are
// separate groups of cp.async: Q K^T starts when K is there.
//
// Registers, at head_dim 128: O 16 x 128 / 32 lanes = 64, Q 32, S 8 or 32. Q goes straight from
// global memory to the lanes that multiply it: it is small, and read once.
//
// With a paged cache an address is a load away: the page comes from the caller's table. 16 keys
// never lie in two pages, so a warp reads the entries of many steps at once, one a lane, long
// before it needs them, and shuffles hand them out.
//
// In fp8 the bytes are half of it, on their way and in shared memory; codes become 16-bit elements
// between ldmatrix, which moves pairs of them, and the product. So a lane gets other columns than
// it would: of K the step's 4 t .. 4 t + 3 (t = lane % 4), in whose order Q is loaded, and of O
// too. The descales, one a block, are part of the softmax scale and of O on its way out. The kernel
// is compiled for pages alone: a cache in one piece is a page, the batch entry's.
//
// On Hopper a block starts while what is before it on the stream ends, and waits before it reads
// (common/dependent.cuh). Up to 4 new keys are written by each block that reads them
// (docs/design-notes.md).
//
// Where a split or a step begins depends on the sequence's own length, neither on the capacity of
// the cache nor on who else is in the batch, only on how many there are, and everything is added in
// a fixed order: in batches of one size a sequence has one result.
//
// Sources: Dao et al., Flash-Decoding (2023), for the split; Hong et al., FlashDecoding++ (arXiv
// 2311.01282), for filling the tile; Milakov & Gimelshein (arXiv 1805.02867), whose merge it is.
// Next rung: on Hopper, TMA would copy without threads and addresses; it would not be faster.
#pragma once

#include <fa101/kv_cache.h>
#include <fa101/params.h>

#include "common/bias_mask.h"
#include "common/dependent.cuh"
#include "common/float8.h"
#include "common/key_rows.h"
#include "common/mask.h"
#include "common/memory.cuh"
#include "common/online_softmax.h"
#include "cute/logits.cuh"
#include "cute/softmax.cuh"
#include "flash_decode/family.h"
#include "flash_decode/kernel_traits.h"
#include "flash_decode/merge.cuh"
#include "flash_decode/warp_mma.cuh"
#include "kv_cache.cuh"

#include <cute/tensor.hpp>

#include <cstdint>

namespace fa101::flash_decode {

template <class Traits, bool kPaged>
__global__ void __launch_bounds__(Traits::kNThreads, 2)
    flash_decode_kernel(const __grid_constant__ Problem problem,
                        const __grid_constant__ Tensors tensors,
                        const __grid_constant__ Partials partials,
                        const __grid_constant__ AppendParams new_keys) {
    using Element = typename Traits::Element;
    using Stored = typename Traits::Stored;
    constexpr bool kFp8 = Traits::kFp8;
    constexpr int kPieceCols = Traits::kPieceCols;
    constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
    constexpr int kHeadDim = Traits::kHeadDim, kStages = Traits::kStages;
    constexpr int kNumTeams = Traits::kNumTeams, kTileElements = Traits::kTileElements;
    constexpr int kCols = kHeadDim / 4;    // columns of O of a lane
    constexpr int kKeys = kBlockN / 4;     // keys of S of a lane
    constexpr int kSteps = kHeadDim / 16;  // of the product Q K^T

    extern __shared__ __align__(128) unsigned char smem[];
    if (static_cast<int>(blockIdx.x) >= partials.key_blocks) {
        return merge_parts<Traits>(problem, tensors, partials, smem);
    }

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int team = kNumTeams == 1 ? 0 : warp;
    const auto team_sync = [] {
        if constexpr (kNumTeams == 1) {
            __syncthreads();
        } else {
            __syncwarp();
        }
    };
    const auto team_any = [](bool x) -> bool {  // and a barrier
        if constexpr (kNumTeams == 1) {
            return __syncthreads_or(x);
        } else {
            __syncwarp();
            return __any_sync(0xffffffffu, x);
        }
    };

    // ---- Which rows and which keys ----
    // Tiles of rows are neighbours, so that their common keys come from L2. Splits that a short
    // sequence does not have come last.
    const int seqlen_q = static_cast<int>(problem.seqlen_q);
    const Divider& group = partials.group;
    const int group_size = static_cast<int>(group.divisor);
    const int num_rows = seqlen_q * group_size;
    struct TileIndex {
        int m_begin, split, bidh_kv, bidb;
    };
    const auto tile_index = [&](int block) -> TileIndex {
        const int split_batch_head = partials.m_blocks.quotient(block);
        const int batch_head = partials.batch_heads_kv.remainder(split_batch_head);
        return {partials.m_blocks.remainder(block) * kBlockM,
                partials.batch_heads_kv.quotient(split_batch_head),
                partials.heads_kv.remainder(batch_head), partials.heads_kv.quotient(batch_head)};
    };
    const auto query_of = [&](int row) { return group.quotient(row); };
    const auto head_of = [&](const TileIndex& tile, int row) {
        return tile.bidh_kv * group_size + group.remainder(row);
    };
    const auto index_of = [&](const TileIndex& tile, int row) {  // as in lse
        return (tile.bidb * problem.num_heads + head_of(tile, row)) * seqlen_q + query_of(row);
    };
    const TileIndex tile = tile_index(blockIdx.x);
    const int m_begin = tile.m_begin, split = tile.split, bidb = tile.bidb;
    start_next();
    if (tensors.seqlens_k_ptr != nullptr) wait_for_stream();  // where keys lie, the length tells

    const bool has_pages = kPaged && (!kFp8 || problem.page_size > 0);
    const Mask mask = mask_of(problem, tensors, bidb);
    if (has_pages) {
        // Which pages are this split's only the length tells, which comes from memory. So that both
        // are on their way, each split asks for a share of the table.
        constexpr int kSector = 32 / sizeof(int32_t);
        const Pages pages(problem, tensors, bidb);
        const int64_t entry = kSector * (split + int64_t{threadIdx.x} * partials.num_splits);
        if (entry <= pages.index_of(static_cast<int>(problem.seqlen_k) - 1)) {
            prefetch_l2(pages.table + entry);
        }
    }
    const int first_row = m_begin, last_row = min(m_begin + kBlockM, num_rows) - 1;
    const KeyRange tile_keys = keys_of_tile(mask, first_row, last_row, group);
    const int count = partials.keys.count(tile_keys, kBlockN);
    if (split >= count) return;
    const bool is_part = count > 1;
    const KeyRange keys = keys_of_split(tile_keys, split, count, kBlockN);
    const int n_begin = keys.begin, n_end = keys.end;
    // Keys that all rows see.
    const int full_begin = mask.key_begin(query_of(last_row));
    const int full_end = mask.key_end(query_of(first_row));

    // This team's steps: every kNumTeams-th block of keys.
    const int first_block = n_begin / kBlockN;
    const int n_block_begin =
        first_block + (team + kNumTeams - first_block % kNumTeams) % kNumTeams;
    const int n_block_end = n_begin < n_end ? ceil_div(n_end, kBlockN) : 0;

    // ---- Copies: a team's tiles of K and V ----
    Stored* const sK = reinterpret_cast<Stored*>(smem) + team * 2 * kStages * kTileElements;
    Stored* const sV = sK + kStages * kTileElements;
    const auto head_ptr = [&](const void* ptr, int64_t batch_stride, int64_t head_stride) {
        return static_cast<const Stored*>(ptr) + (kPaged ? 0 : bidb * batch_stride) +
               tile.bidh_kv * head_stride;
    };
    const Stored* const k_ptr =
        head_ptr(tensors.k_ptr, tensors.k_batch_stride, tensors.k_head_stride);
    const Stored* const v_ptr =
        head_ptr(tensors.v_ptr, tensors.v_batch_stride, tensors.v_head_stride);
    const int head_dim = static_cast<int>(problem.head_dim);
    const int head_dim_v = static_cast<int>(problem.head_dim_v);
    const bool aligned16 = problem.aligned16;
    // Read anew for every tile: addresses kept over the loop would cost 30 registers.
    const auto copy_row = [] {
        return reread_thread_index<Traits::kNThreads>() % Traits::kTeamThreads / Traits::kPieces;
    };
    const auto copy_piece = [] {
        return reread_thread_index<Traits::kNThreads>() % Traits::kPieces;
    };

    // Calls visit(row, piece) for what this thread copies of a tile.
    const auto for_each_piece = [&](auto visit) {
#pragma unroll 1
        for (int i = 0; i < Traits::kPasses * Traits::kPanels; ++i) {
            visit(copy_row() + i / Traits::kPanels * Traits::kRowsPerPass,
                  copy_piece() + i % Traits::kPanels * Traits::kPieces);
        }
    };
    const auto page_of = [&](int key) -> uint32_t {
        if (!has_pages) return bidb;
        return Pages(problem, tensors, bidb).page_of(key);
    };
    // The pages that a warp copies from: of its next steps, one a lane, and of one step.
    constexpr int kPagesPerStep = Traits::kPagesPerStep, kStepsOfPages = 32 / kPagesPerStep;
    static_assert(kStages <= kStepsOfPages, "the first steps have their pages");
    struct PageList {
        uint32_t page[kPagesPerStep];
    };
    const auto load_pages = [&](int n_block) -> uint32_t {
        if constexpr (!kPaged) return 0;
        const int first_row = 32 * warp % Traits::kTeamThreads / Traits::kPieces;
        const int key = (n_block + lane / kPagesPerStep * kNumTeams) * kBlockN +
                        Traits::first_row_of_page(first_row, lane % kPagesPerStep);
        return key < n_end ? page_of(key) : 0;
    };
    const auto pages_of = [&](uint32_t lane_pages, int step) {
        PageList list = {};
        if constexpr (kPaged) {
#pragma unroll
            for (int i = 0; i < kPagesPerStep; ++i) {
                list.page[i] = __shfl_sync(0xffffffffu, lane_pages, step * kPagesPerStep + i);
            }
        }
        return list;
    };
    // What to copy of K or V: row `key` of a tile is at row_ptr(key, page).
    struct Source {
        const Stored* ptr;
        int64_t page_stride, row_stride;
        int num_cols;
    };
    const auto row_ptr = [&](const Source& src, int key, uint32_t page) {
        if constexpr (kPaged) {
            const int row = key & (static_cast<int>(problem.page_size) - 1);
            return src.ptr + page * src.page_stride + row * src.row_stride;
        } else {
            return src.ptr + key * src.row_stride;
        }
    };
    // Keys from n_end on and columns past num_cols become zeros and are not read. The others are
    // read once, or by neighbours at about the same time, so L2 need not keep them.
    const auto load_tile = [&](Stored* dst_tile, const Source& src, int n_block,
                               const PageList& list) {
        if (aligned16) {
            // One address a page, the others at constant distances.
            const int first_row = copy_row(), first_piece = copy_piece();
            const int num_cols = src.num_cols - kPieceCols * first_piece;
            const uint32_t first_dst = copy_address(dst_tile + first_row * kHeadDim);
            const Stored* row_src = nullptr;
#pragma unroll
            for (int pass = 0; pass < Traits::kPasses; ++pass) {
                const int row = first_row + pass * Traits::kRowsPerPass;
                const int key = n_block * kBlockN + row;
                if (kPaged ? pass % Traits::kPassesPerPage == 0 : pass == 0) {
                    row_src = row_ptr(src, key, list.page[Traits::page_of_pass(pass)]) +
                              kPieceCols * first_piece;
                } else {
                    row_src += Traits::kRowsPerPass * src.row_stride;
                }
                const int offset =
                    pass * Traits::kRowsPerPass * kHeadDim + Traits::column(row, first_piece);
#pragma unroll
                for (int panel = 0; panel < Traits::kPanels; ++panel) {
                    const int col = panel * Traits::kPieces * kPieceCols;
                    cp_async16(first_dst + sizeof(Stored) * (offset + col), row_src + col,
                               key < n_end && col < num_cols);
                }
            }
        } else {
            for_each_piece([&](int row, int piece) {
                const int key = n_block * kBlockN + row;
                uint32_t page = 0;
                if constexpr (kPaged) {
                    if (key < n_end) page = page_of(key);
                }
                const Stored* const row_src = row_ptr(src, key, page) + kPieceCols * piece;
                Stored* const dst = dst_tile + Traits::offset(row, piece);
#pragma unroll
                for (int j = 0; j < kPieceCols; ++j) {
                    const bool inside = key < n_end && kPieceCols * piece + j < src.num_cols;
                    dst[j] = inside ? row_src[j] : Stored{};
                }
            });
        }
    };
    // K and V of a block, a group each; empty ones past the end, so that groups count steps.
    const auto load_kv = [&](int n_block, int stage, const PageList& list) {
        const bool is_there = n_block < n_block_end;
        if (is_there) {
            load_tile(sK + stage * kTileElements,
                      {k_ptr, tensors.k_batch_stride, tensors.k_row_stride, head_dim}, n_block,
                      list);
        }
        cp_async_commit();
        if (is_there) {
            load_tile(sV + stage * kTileElements,
                      {v_ptr, tensors.v_batch_stride, tensors.v_row_stride, head_dim_v}, n_block,
                      list);
        }
        cp_async_commit();
    };
    // Of what this thread has copied, so it needs no barrier before.
    const auto holds_nonfinite = [&](const Stored* tile_v) {
        uint32_t found = 0;
        for_each_piece([&](int row, int piece) {
            const auto words = *reinterpret_cast<const uint4*>(tile_v + Traits::offset(row, piece));
            found |= nonfinite<Stored>(words.x) | nonfinite<Stored>(words.y) |
                     nonfinite<Stored>(words.z) | nonfinite<Stored>(words.w);
        });
        return found != 0;
    };
    const auto clear_nonfinite = [&](Stored* tile_v) {
        for_each_piece([&](int row, int piece) {
            Stored* const elements = tile_v + Traits::offset(row, piece);
#pragma unroll
            for (int j = 0; j < kPieceCols; ++j) {
                if (is_nonfinite(elements[j])) elements[j] = Stored{};
            }
        });
    };
    wait_for_stream();
    uint32_t lane_pages = load_pages(n_block_begin);
    uint32_t next_pages = load_pages(n_block_begin + kStepsOfPages * kNumTeams);
    // While the pages are on their way: Q, to be there when it is read, behind the first copies. A
    // line a thread, of 64 long rows not all.
    const auto q_row = [&](int row) {
        return static_cast<const Element*>(tensors.q_ptr) + bidb * tensors.q_batch_stride +
               head_of(tile, row) * tensors.q_head_stride + query_of(row) * tensors.q_row_stride;
    };
    const int thread = static_cast<int>(threadIdx.x);
    const int line_col = 128 / static_cast<int>(sizeof(Element)) * (thread / kBlockM);
    if (line_col < head_dim) {
        prefetch_l1(q_row(min(m_begin + thread % kBlockM, num_rows - 1)) + line_col);
    }
    // A block can read new keys only if it has written them. So each writes those that it will read
    // (others may write the same bytes), and split 0 writes all, also those that nobody reads.
    if (kBlockM == 16 && new_keys.batch > 0) {
        const int num_new = static_cast<int>(new_keys.k.rows);
        const int first_new = static_cast<int>(num_cached(new_keys, bidb));
        const int begin = split == 0 ? 0 : max(n_begin - first_new, 0);
        const int end = split == 0 ? num_new : min(n_end - first_new, num_new);
        for (int i = 2 * begin + warp; i < 2 * end; i += Traits::kNThreads / 32) {
            const RowCopy* const copy = i % 2 == 0 ? &new_keys.k : &new_keys.v;
            const RowJob job = row_job(new_keys, copy, bidb, tile.bidh_kv, i / 2);
            if (job.has_room) copy_columns<Element>(new_keys, job, 0, lane);
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
        load_kv(n_block_begin + i * kNumTeams, i, pages_of(lane_pages, i));
    }
    int page_step = kStages - 1;

    // ---- This lane's two rows: Q, and the keys they see. Rows past the end repeat the last. ----
    const int warp_row = kNumTeams == 1 ? 16 * warp : 0;
    const auto row_of = [&](int m_begin, int r) {
        return min(m_begin + warp_row + lane / 4 + 8 * r, num_rows - 1);
    };
    uint32_t q[kSteps][4];  // as the A operand of each step
    int row_begin[2], row_end[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = row_of(m_begin, r), query = query_of(row);
        row_begin[r] = mask.key_begin(query);
        row_end[r] = mask.key_end(query);
        const Element* const q_ptr = q_row(row);
        const auto for_each_pair = [&](auto load) {
#pragma unroll
            for (int i = 0; i < 2 * kSteps; ++i) {
                const int col =
                    kFp8 ? 16 * (i / 2) + 4 * (lane % 4) + 2 * (i % 2) : 8 * i + 2 * (lane % 4);
                q[i / 2][i % 2 * 2 + r] = load(col);
            }
        };
        if (aligned16) {
            for_each_pair([&](int col) {
                return col < head_dim ? *reinterpret_cast<const uint32_t*>(q_ptr + col) : 0;
            });
        } else {
            const auto element = [&](int col) {
                return col < head_dim ? to_float(q_ptr[col]) : 0.0f;
            };
            for_each_pair([&](int col) { return pack<Element>(element(col), element(col + 1)); });
        }
    }
    if constexpr (kFp8) {  // as widen_e4m3 pairs columns
#pragma unroll
        for (int i = 0; i < 2 * kSteps; ++i) {
            uint32_t &even = q[i / 2][i % 2], &odd = q[i / 2][i % 2 + 2];
            const uint32_t first = even;
            even = __byte_perm(first, odd, 0x5410);
            odd = __byte_perm(first, odd, 0x7632);
        }
    }
    // Where registers are short, a lane keeps its part of Q in shared memory; nobody else reads it.
    uint4* const sQ =
        reinterpret_cast<uint4*>(smem + Traits::kSmemBytesKV) + warp * kSteps * 32 + lane;
    if constexpr (!Traits::kQInRegisters) {
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            sQ[32 * k] = make_uint4(q[k][0], q[k][1], q[k][2], q[k][3]);
        }
    }
    // The arrays of the caller for row r of this lane, hardly ever needed and worked out anew.
    struct Extras {
        int query;
        BiasMask arrays;
    };
    const auto extras = [&](int r) -> Extras {
        const TileIndex here = tile_index(reread_block_index());
        const int row = row_of(here.m_begin, r);
        return {query_of(row), BiasMask(problem, tensors, here.bidb, head_of(here, row))};
    };
    // Key of s(r, c) in its block, and column of o(r, c).
    const auto key_of = [&](int c) { return c / 2 * 8 + 2 * (lane % 4) + c % 2; };
    const auto col_of = [&](int c) {
        return kFp8 ? c / 4 * 16 + 4 * (lane % 4) + c % 2 * 2 + c / 2 % 2 : key_of(c);
    };
    const auto is_within = [&](int r, int key) { return row_begin[r] <= key && key < row_end[r]; };

    // ---- Main loop ----
    using namespace cute;
    Tensor o = make_tensor<float>(Shape<_2, Int<kCols>>{});
    clear(o);
    OnlineSoftmax<2> softmax;
    const int k_row = lane / 16 * 8 + lane % 8, k_piece = lane / 8 % 2;  // for ldmatrix
    const int v_row = lane % 16, v_piece = lane / 16;
    const float k_scale =
        kFp8 ? kE4M3Scale<Element> * descale_of(tensors.k_descale, bidb, tile.bidh_kv) : 1.0f;
    int stage = 0;
#pragma unroll 1
    for (int n_block = n_block_begin; n_block < n_block_end; n_block += kNumTeams) {
        const int key_begin = n_block * kBlockN;
        // With the mask only some rows may see some of these keys.
        const bool is_partial =
            problem.has_mask || key_begin < full_begin || key_begin + kBlockN > full_end;
        Stored* const tile_k = sK + stage * kTileElements;
        Stored* const tile_v = sV + stage * kTileElements;

        cp_async_wait_group<2 * (kStages - 1) - 1>();
        team_sync();  // K is there, and the team is done with the stage that is loaded next
        load_kv(n_block + (kStages - 1) * kNumTeams, stage == 0 ? kStages - 1 : stage - 1,
                pages_of(lane_pages, page_step));
        if (kPaged && ++page_step == kStepsOfPages) {
            page_step = 0;
            lane_pages = next_pages;
            next_pages = load_pages(n_block + (kStages + kStepsOfPages) * kNumTeams);
        }

        // S = Q K^T, to logits of base 2.
        Tensor s = make_tensor<float>(Shape<_2, Int<kKeys>>{});
        clear(s);
        const auto load_q = [&](int k) {
            if constexpr (!Traits::kQInRegisters) {
                const uint4 a = sQ[32 * k];
                q[k][0] = a.x, q[k][1] = a.y, q[k][2] = a.z, q[k][3] = a.w;
            }
        };
        if constexpr (kFp8) {
#pragma unroll
            for (int k = 0; k < kSteps; k += 2) {
                load_q(k);
                load_q(k + 1);
#pragma unroll
                for (int n = 0; n < kBlockN / 16; ++n) {
                    uint32_t b[4];  // (keys 0 .. 7 or 8 .. 15, step k or k + 1)
                    ldmatrix<false>(b, tile_k + Traits::offset(16 * n + k_row, k + k_piece));
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const Pairs pairs = widen_e4m3<Element>(b[i]);
                        mma<Element>(s, 2 * n + i / 2, q[k + i % 2], pairs.even, pairs.odd);
                    }
                }
            }
        } else {
#pragma unroll
            for (int k = 0; k < kSteps; ++k) {
                load_q(k);
#pragma unroll
                for (int n = 0; n < kBlockN / 16; ++n) {
                    uint32_t b[4];
                    ldmatrix<false>(b, tile_k + Traits::offset(16 * n + k_row, 2 * k + k_piece));
                    mma<Element>(s, 2 * n, q[k], b[0], b[1]);
                    mma<Element>(s, 2 * n + 1, q[k], b[2], b[3]);
                }
            }
        }
        if (problem.softcap > 0.0f) {
            const float scale = problem.softmax_scale * k_scale / problem.softcap;
            const float softcap_log2 = problem.softcap * kLog2e;
#pragma unroll
            for (int i = 0; i < size(s); ++i) s(i) = softcap_log2 * tanh_approx(s(i) * scale);
        } else {
            const float scale_log2 = problem.softmax_scale * k_scale * kLog2e;
#pragma unroll
            for (int i = 0; i < size(s); ++i) s(i) *= scale_log2;
        }
        if (problem.has_bias) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const Extras extra = extras(r);
#pragma unroll
                for (int c = 0; c < kKeys; ++c) {
                    const int key = key_begin + key_of(c);
                    if (is_within(r, key)) {
                        s(r, c) += base2_bias(
                            to_float(extra.arrays.bias_at(extra.query, key), problem.dtype_bias));
                    }
                }
            }
        }
        if (is_partial) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const Extras extra = extras(r);
#pragma unroll
                for (int c = 0; c < kKeys; ++c) {
                    const int key = key_begin + key_of(c);
                    if (!is_within(r, key) || extra.arrays.hides(extra.query, key)) {
                        s(r, c) = -INFINITY;
                    }
                }
            }
        }
        softmax.step(s, o, 1.0f);
        uint32_t p[kKeys / 2][2];  // (pair of keys, row): the weights, rounded
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
            p[i / 2][i % 2] = pack<Element>(s(i % 2, i / 2 * 2), s(i % 2, i / 2 * 2 + 1));
        }

        cp_async_wait_group<2 * (kStages - 1)>();
        if (!is_partial) {
            team_sync();  // V is there
        } else if (team_any(holds_nonfinite(tile_v))) {
            // 0 * NaN is NaN, so what is hidden from some row must not be in the product: the rows
            // that see a NaN or inf get it here, and the product gets 0 in its place. The K of this
            // block is used up: its place holds P, half of the team's rows at a time.
            Element* const row_p =
                reinterpret_cast<Element*>(tile_k) + (warp_row / 2 + lane / 4) * kBlockN;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                __syncwarp();
#pragma unroll
                for (int c = 0; c < kKeys; c += 2) {
                    *reinterpret_cast<uint32_t*>(row_p + key_of(c)) = p[c / 2][r];
                }
                __syncwarp();
                const Extras extra = extras(r);
#pragma unroll 1
                for (int n = 0; n < kBlockN; ++n) {
                    const int key = key_begin + n;
                    if (!is_within(r, key) || extra.arrays.hides(extra.query, key)) continue;
                    const float weight = to_float(row_p[n]);
#pragma unroll
                    for (int c = 0; c < kCols; ++c) {
                        const int piece = c / (kPieceCols / 4);
                        const Stored v = tile_v[Traits::offset(n, piece) + col_of(c) % kPieceCols];
                        if (!is_nonfinite(v)) continue;
                        if constexpr (kFp8) {
                            o(r, c) = NAN;
                        } else {
                            o(r, c) += weight * to_float(v);
                        }
                    }
                }
            }
            team_sync();
            clear_nonfinite(tile_v);
            team_sync();
        }

        // O += P V.
#pragma unroll
        for (int k = 0; k < kBlockN / 16; ++k) {
            const uint32_t a[4] = {p[2 * k][0], p[2 * k][1], p[2 * k + 1][0], p[2 * k + 1][1]};
#pragma unroll
            for (int n = 0; n < kHeadDim / (2 * kPieceCols); ++n) {
                uint32_t b[4];
                ldmatrix<true>(b, tile_v + Traits::offset(16 * k + v_row, 2 * n + v_piece));
                if constexpr (kFp8) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {  // even columns of 16, odd ones
                        const Pairs first = widen_e4m3<Element>(b[2 * i]);
                        const Pairs second = widen_e4m3<Element>(b[2 * i + 1]);
                        mma<Element>(o, 4 * n + 2 * i, a, first.even, second.even);
                        mma<Element>(o, 4 * n + 2 * i + 1, a, first.odd, second.odd);
                    }
                } else {
                    mma<Element>(o, 2 * n, a, b[0], b[1]);
                    mma<Element>(o, 2 * n + 1, a, b[2], b[3]);
                }
            }
        }
        stage = stage + 1 == kStages ? 0 : stage + 1;
    }

    // ---- Epilogue: merge the teams, O / l and lse ----
    // In the place of K and V: O, m and l of every team, (kNumTeams, kBlockM) rows.
    constexpr int kRows = kNumTeams * kBlockM, kStrideO = Traits::kStrideO;
    float* const sO = reinterpret_cast<float*>(smem);
    float* const sMax = sO + kRows * kStrideO;
    float* const sSum = sMax + kRows;
    const TileIndex out_tile = tile_index(reread_block_index());
    softmax.finish();
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = 16 * warp + lane / 4 + 8 * r;
        if (lane % 4 == 0) {
            sMax[row] = softmax.row_max[r];
            sSum[row] = softmax.row_sum[r];
        }
        if constexpr (kFp8) {
            const float v_scale = kE4M3Scale<Element> *
                                  descale_of(tensors.v_descale, out_tile.bidb, out_tile.bidh_kv);
#pragma unroll
            for (int c = 0; c < kCols; c += 4) {
                *reinterpret_cast<float4*>(sO + row * kStrideO + col_of(c)) =
                    make_float4(o(r, c) * v_scale, o(r, c + 2) * v_scale, o(r, c + 1) * v_scale,
                                o(r, c + 3) * v_scale);
            }
        } else {
#pragma unroll
            for (int c = 0; c < kCols; c += 2) {
                *reinterpret_cast<float2*>(sO + row * kStrideO + col_of(c)) =
                    make_float2(o(r, c), o(r, c + 1));
            }
        }
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < kBlockM * (kHeadDim / 4); i += Traits::kNThreads) {
        const int tile_row = i / (kHeadDim / 4), col = i % (kHeadDim / 4) * 4;
        const int row = out_tile.m_begin + tile_row;
        if (row >= num_rows || col >= head_dim_v) continue;

        float row_max = -INFINITY, row_sum = 0.0f;
#pragma unroll
        for (int t = 0; t < kNumTeams; ++t) row_max = fmaxf(row_max, sMax[t * kBlockM + tile_row]);
        Float4 out = {};
#pragma unroll
        for (int t = 0; t < kNumTeams; ++t) {
            const int r = t * kBlockM + tile_row;
            const float weight = exp2_approx(sMax[r] - safe_row_max(row_max));
            row_sum += weight * sSum[r];
            const Float4 part = *reinterpret_cast<const Float4*>(sO + r * kStrideO + col);
#pragma unroll
            for (int j = 0; j < 4; ++j) out.x[j] += weight * part.x[j];
        }
        const float inverse = inverse_row_sum(row_sum);
#pragma unroll
        for (int j = 0; j < 4; ++j) out.x[j] = row_sum == 0.0f ? 0.0f : out.x[j] * inverse;

        const int64_t index = index_of(out_tile, row);
        if (is_part) {
            const int64_t part = index * partials.num_splits + out_tile.split;
            *reinterpret_cast<Float4*>(partials.o + part * partials.o_stride + col) = out;
            if (col == 0) partials.lse[part] = row_max + log2f(row_sum);
        } else {
            auto* const o_ptr = static_cast<Element*>(tensors.o_ptr) +
                                out_tile.bidb * tensors.o_batch_stride +
                                head_of(out_tile, row) * tensors.o_head_stride +
                                query_of(row) * tensors.o_row_stride;
            store4(o_ptr + col, out, head_dim_v - col, aligned16);
            if (col == 0 && tensors.lse_ptr != nullptr) {
                tensors.lse_ptr[index] = log_sum_exp(row_max, row_sum);
            }
        }
    }
    if (!is_part) return;
    __syncthreads();
    for (int row = out_tile.m_begin + threadIdx.x; row < min(out_tile.m_begin + kBlockM, num_rows);
         row += Traits::kNThreads) {
        const int64_t part = index_of(out_tile, row) * partials.num_splits + out_tile.split;
        publish(partials.flags + part, partials.nonce);
    }
}

}  // namespace fa101::flash_decode
