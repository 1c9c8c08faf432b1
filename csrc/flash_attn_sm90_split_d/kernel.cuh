// Lesson 6, when a row of O is too long for one warpgroup: its columns are split over two (above
// 512: over two blocks of two), which share 64 queries, S and P. The parts are lesson 6's: a warp
// that only issues TMA, warpgroups that only multiply, mbarriers between them.
//
// One step is 128 keys. Group w of the two
//     computes   S(:, its 64 keys) = Q K^T     64 x  64 over all of head_dim, in registers
//     exchanges  the maxima of the rows        both groups must use the same, as O's columns sum
//                                              over the keys of both
//     writes     P(:, its 64 keys)             16-bit, to shared memory, as wgmma's operand A
//     computes   O(:, its columns) += P V      64 x 256 (192), over the 128 keys of both
//
// Slices. A group never touches another's K (its keys) or V (its columns), so each has a ring of
// its own, fed by a warp of its own: 8 KB slots that hold 64 keys x 64 columns of K, for 4 wgmma,
// or 16 keys x 256 columns of V, for one. Shared memory then does not depend on how long K and V
// are, and loads are asked for as soon as any slot is free:
//
//     producer w  K(n) K(n-1) V(n) K(n-2) V(n-1) ...                                   V(0)
//     group w     QK(n) softmax(n) | QK(n-1) PV(n) softmax(n-1) | ... | PV(0)  write O
//
// Up to kLag slices are in flight: a slot is given back when kLag more have been issued. The last
// kLag of P V (n) are what the tensor cores have to do during the softmax of n - 1.
//
// Bytes. 64 queries alone read 4 * head_dim bytes of K and V a key for 256 * head_dim FLOP: 64 FLOP
// a byte, at 500 TFLOP/s 7.8 TB/s, more than L2 gives. So two blocks form a cluster: the even slots
// of both are filled by one, the odd ones by the other, each load going to both (multicast), and L2
// serves 128 FLOP a byte. Up to 512 the two have neighbouring tiles of queries. Above, they have
// the same queries and half of O's columns each: both compute all of S from the K they share, 1.5
// times the FLOP of the question; V is each one's own.
//
// Shared memory is what bounds the rest. At 128 bytes a cycle, and cycles for each key at 512:
//
//     TMA writes K and V                       8 + 8      tensor cores, Q K^T     16
//     Q K^T reads Q (64 x 64 products) and K   8 + 8                    P V       16
//     P V   reads P twice and V                2 + 8
//                                        sum      42                              32
//
// Budgets. KB of shared memory, of 227, with two buffers of P, 32 KB; registers of a consumer
// thread, of 240: O 128 (96 at 384 and 768), S 32.
//
//     head_dim    Q    slots of a group, KB together    sum
//     384         48          8         128             208
//     512         64          8         128             224
//     768         96          6          96             224
//     1024       128          4          64             224
//
// Barriers, as in flash_attn_sm90/kernel.cuh; w is the group and s a slot:
//
//     barrier      arrivals           who waits                    who arrives
//     q_full       1 + bytes          both groups, once            producer 0, with TMA of Q
//     full[w][s]   1 + bytes          group w                      producer w of this block; the
//                                                                  bytes come from either block
//     empty[w][s]  4 warps * kCluster producer w, before it arms   group w of every block, after
//                                     full and, if the slot is     its wgmma that read the slot
//                                     its to fill, sends TMA
//     named 0      256 threads        both groups: row_stat is     both groups
//                                     written
//     named 1      256 threads        both groups, before P V:     both groups, after the fence
//                                     P is written                 that shows P to wgmma
//
// Phases. Slices are counted from 0 on either side; slice i has slot i % kSlots and is full at
// parity i / kSlots % 2; the producer waits for the opposite, which a fresh barrier has passed. All
// blocks of a cluster and both groups go through the same slices, as n_block_end belongs to the
// cluster; if that is 0 there are none.
//
// No cycle: take the group, of all in the cluster, that has issued the fewest slices, i. The slot
// of slice i, which held slice i - kSlots, has to be released by that group of every block; each
// has issued i slices at least and released i - kLag, and kLag < kSlots. And no group waits for
// another but for what that does at the same place of the same step.
//
// Reuse. row_stat is rewritten after named 1, behind which both have read it. P(n) overwrites
// P(n+2), last read by P V (n+2), which every group finished before it issued Q K^T (n), and so
// before named 0 of step n. A block may write to the other's shared memory only while that exists:
// the cluster's barrier at the start is behind the initialisation, the one at the end behind the
// last slice.
//
// Next rungs: a loop over tiles with the next Q and K loaded under the epilogue; above 512, S split
// over the cluster too and P exchanged through distributed shared memory, for 1.0 times the FLOP.
//
// Sources: FlashMLA's deep-dive (github.com/deepseek-ai/FlashMLA) for 64 rows with O split over two
// warpgroups; flash-attention's hopper/ for P through shared memory and multicast of K and V.
#pragma once

#include "flash_attn_sm90/kernel.cuh"
#include "flash_attn_sm90_split_d/kernel_traits.h"

namespace fa101::sm90_split_d {

using sm90::row_of;

struct KernelParams : sm90::KernelParams {  // its row blocks are those of a cluster
    int num_slices;                         // of Q K^T: 64 of head_dim each
};

// Columns [first_column, first_column + kColumns) of O of one row, touching only keys [0, key_end),
// by one warp: a lane has every 32nd column. The maximum and the sum of the row are known, and
// right: they never meet V.
template <class Traits>
__device__ __forceinline__ void redo_row(const KernelParams& p, const sm90::TileInfo& coord,
                                         int row, int first_column, int key_end, float offset,
                                         float inverse) {
    using Element = typename Traits::Element;
    const Tensors& t = p.t;
    const int head_kv = p.group.quotient(coord.bidh);
    const int lane = threadIdx.x % 32;
    const int column = first_column + lane;
    const auto* q = static_cast<const Element*>(t.q_ptr) + coord.bidb * t.q_batch_stride +
                    coord.bidh * t.q_head_stride + row * t.q_row_stride;
    const auto* k = static_cast<const Element*>(t.k_ptr) + coord.bidb * t.k_batch_stride +
                    head_kv * t.k_head_stride;
    const auto* v = static_cast<const Element*>(t.v_ptr) + coord.bidb * t.v_batch_stride +
                    head_kv * t.v_head_stride + column;
    auto* o = static_cast<Element*>(t.o_ptr) + coord.bidb * t.o_batch_stride +
              coord.bidh * t.o_head_stride + row * t.o_row_stride + column;
    float acc[Traits::kColumns / 32] = {};
#pragma unroll 1
    for (int j = 0; j < key_end; ++j, k += t.k_row_stride, v += t.v_row_stride) {
        float dot = 0;
#pragma unroll 1
        for (int d = lane; d < p.head_dim; d += 32) {
            dot = fmaf(static_cast<float>(q[d]), static_cast<float>(k[d]), dot);
        }
        const float logit = p.logit_factor * warp_sum(dot);
        const float weight = exp2_approx(fmaf(logit, p.softmax_scale_log2, offset));
        CUTE_UNROLL
        for (int i = 0; i < Traits::kColumns / 32; ++i) {
            if (column + 32 * i < p.head_dim_v) {
                acc[i] = fmaf(weight, static_cast<float>(v[32 * i]), acc[i]);
            }
        }
    }
    CUTE_UNROLL
    for (int i = 0; i < Traits::kColumns / 32; ++i) {
        if (column + 32 * i < p.head_dim_v) o[32 * i] = static_cast<Element>(acc[i] * inverse);
    }
}

template <class Traits>
__global__ void __cluster_dims__(Traits::kCluster, 1, 1) __launch_bounds__(Traits::kThreads, 1)
    flash_attn_sm90_split_d_kernel(const __grid_constant__ KernelParams p) {
    using namespace cute;
    using Element = typename Traits::Element;
    constexpr int kGroups = Traits::kGroups;
    constexpr int kGroupN = Traits::kGroupN;
    constexpr int kBox = Traits::kBox;
    constexpr int kStepK = Traits::kStepK;
    constexpr int kSlots = Traits::kSlots;
    constexpr int kLag = Traits::kLag;
    constexpr int kCluster = Traits::kCluster;

    extern __shared__ __align__(1024) unsigned char smem[];
    auto& storage = *reinterpret_cast<typename Traits::SharedStorage*>(smem);

    if (threadIdx.x == 0) {
        storage.q_full.init(1);
        for (int g = 0; g < kGroups; ++g) {
            for (int s = 0; s < kSlots; ++s) {
                storage.full[g][s].init(1);
                storage.empty[g][s].init(4 * kCluster);
            }
        }
        cutlass::arch::fence_barrier_init();
    }
    cluster_sync();

    const int rank = blockIdx.x % kCluster;
    const auto coord = sm90::tile_info<Traits::kClusterM>(p, blockIdx.x / kCluster);
    const int cluster_m_begin = coord.m_begin;
    const int m_begin = cluster_m_begin + (Traits::kSplitsColumns ? 0 : rank * kBlockM);
    // The same for all blocks and groups, so that all walk through the same slices.
    const int n_block_end =
        p.mask.n_block_end(min(cluster_m_begin + Traits::kClusterM, p.seqlen_q), kBlockN);
    const auto first_column = [rank](int group) {
        return ((Traits::kSplitsColumns ? rank * kGroups : 0) + group) * Traits::kColumns;
    };

    const int warpgroup = cutlass::canonical_warp_group_idx();
    if (warpgroup == 0) {
        // ---- Producers: one thread for each group ----
        cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
        const int group = cutlass::canonical_warp_idx_sync();
        if (group < kGroups && elect_one_sync()) {
            constexpr uint64_t kReadOnce = static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_FIRST);
            constexpr uint64_t kReadOften = static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_LAST);
            const int head_kv = p.group.quotient(coord.bidh);
            const int column = first_column(group);
            unsigned position = 0;

            const auto next_slot = [&](int bytes) {
                const int slot = position % kSlots;
                storage.empty[group][slot].wait(position / kSlots % 2 ^ 1);
                storage.full[group][slot].arrive_and_expect_tx(bytes);
                ++position;
                return slot;
            };
            const auto load_box = [&](auto for_all, const CUtensorMap& map, int slot, int offset,
                                      int column, int row) {
                auto* full = reinterpret_cast<uint64_t*>(&storage.full[group][slot]);
                Element* to = storage.ring[group][slot] + offset;
                if constexpr (decltype(for_all)::value) {
                    constexpr uint16_t kAll = (1 << kCluster) - 1;
                    SM90_TMA_LOAD_MULTICAST_4D::copy(&map, full, kAll, kReadOften, to, column, row,
                                                     head_kv, coord.bidb);
                } else {
                    SM90_TMA_LOAD_4D::copy(&map, full, kReadOften, to, column, row, head_kv,
                                           coord.bidb);
                }
            };
            // Of the slices for all, each block of the cluster loads those of its slots.
            using ForAllK = std::bool_constant<(kCluster > 1)>;
            using ForAllV = std::bool_constant<(kCluster > 1 && !Traits::kSplitsColumns)>;
            const auto is_mine = [rank](auto for_all, int slot) {
                return !decltype(for_all)::value || slot % kCluster == rank;
            };
            const auto load_k = [&](int n_block) {
#pragma unroll 1
                for (int d = 0; d < p.num_slices; ++d) {
                    const int slot = next_slot(Traits::kSlotBytes);
                    if (is_mine(ForAllK{}, slot)) {
                        load_box(ForAllK{}, p.k_map, slot, 0, d * kBox,
                                 n_block * kBlockN + group * kGroupN);
                    }
                }
            };
            const auto load_v = [&](int n_block) {
#pragma unroll 1
                for (int k = 0; k < kBlockN; k += kStepK) {
                    const int slot = next_slot(Traits::kBytesV);
                    if (is_mine(ForAllV{}, slot)) {
                        CUTE_UNROLL
                        for (int c = 0; c < Traits::kColumns; c += kBox) {
                            load_box(ForAllV{}, p.v_map, slot, c * kStepK, column + c,
                                     n_block * kBlockN + k);
                        }
                    }
                }
            };

            if (n_block_end > 0) {
                if (group == 0) {
                    storage.q_full.arrive_and_expect_tx(p.num_slices * Traits::kSlotBytes);
                    for (int d = 0; d < p.num_slices; ++d) {
                        SM90_TMA_LOAD_5D::copy(&p.q_map,
                                               reinterpret_cast<uint64_t*>(&storage.q_full),
                                               kReadOnce, storage.q + d * kBlockM * kBox, d * kBox,
                                               0, m_begin, coord.bidh, coord.bidb);
                    }
                }
                load_k(n_block_end - 1);
                for (int n_block = n_block_end - 1; n_block >= 0; --n_block) {
                    if (n_block > 0) load_k(n_block - 1);
                    load_v(n_block);
                }
            }
        }
        __syncwarp();
        cluster_arrive();
        cluster_wait();
    } else {
        // ---- Consumers ----
        cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
        const int group = warpgroup - 1;
        const int thread = threadIdx.x % 128;
        const int lane = threadIdx.x % 32;
        const int tile_row = thread / 32 * 16 + lane / 4;  // and tile_row + 8
        const int row = m_begin + tile_row;

        Tensor sQ = make_tensor(make_smem_ptr(&storage.q[0]), typename Traits::SmemLayoutQ{});
        Tensor sP = make_tensor(make_smem_ptr(&storage.p[0][0]), typename Traits::SmemLayoutP{});
        Tensor sK =
            make_tensor(make_smem_ptr(&storage.ring[group][0][0]), typename Traits::SmemLayoutK{});
        Tensor sVt =
            make_tensor(make_smem_ptr(&storage.ring[group][0][0]), typename Traits::SmemLayoutVt{});
        typename Traits::TiledMmaQK mma_qk;
        typename Traits::TiledMmaPV mma_pv;
        auto thr_mma_qk = mma_qk.get_thread_slice(thread);
        auto thr_mma_pv = mma_pv.get_thread_slice(thread);
        // (MMA, 1, HeadDim/16), (MMA, 1, 4), (MMA, 1, BlockN/16, 2), (MMA, 1, 1); those of K and V
        // in slot 0.
        Tensor tSrQ = thr_mma_qk.make_fragment_A(thr_mma_qk.partition_A(sQ));
        Tensor tSrK = thr_mma_qk.make_fragment_B(thr_mma_qk.partition_B(sK));
        Tensor tOrP = thr_mma_pv.make_fragment_A(thr_mma_pv.partition_A(sP));
        Tensor tOrVt = thr_mma_pv.make_fragment_B(thr_mma_pv.partition_B(sVt));
        const auto in_slot = [](const auto& operand, int slot) {
            return make_tensor(operand.data() + slot * (Traits::kSlotBytes / 16), operand.layout());
        };
        Tensor acc_s = partition_fragment_C(mma_qk, Shape<Int<kBlockM>, Int<kGroupN>>{});
        Tensor acc_o = partition_fragment_C(mma_pv, Shape<Int<kBlockM>, Int<Traits::kColumns>>{});
        clear(acc_o);

        const auto sync_groups = [](int barrier) {
            cutlass::arch::NamedBarrier::sync(128 * kGroups, barrier);
        };
        unsigned issued = 0, released = 0;  // slices
        const auto release_slice = [&] {
            const auto& empty = storage.empty[group][released++ % kSlots];
            if constexpr (kCluster == 1) {
                if (lane == 0) empty.arrive();
            } else {
                if (lane < kCluster) empty.arrive(lane);  // at both blocks
            }
        };
        // Enqueues a product with the next slice, of which kLag may be in flight.
        const auto multiply_slice = [&](auto issue) {
            const int slot = issued % kSlots;
            storage.full[group][slot].wait(issued / kSlots % 2);
            warpgroup_arrive();
            issue(slot);
            warpgroup_commit_batch();
            warpgroup_wait<kLag>();
            if (++issued - released > kLag) release_slice();
        };
        const auto finish_slices = [&] {
            warpgroup_wait<0>();
            warpgroup_fence_operand(acc_o);
#pragma unroll 1
            while (released != issued) release_slice();
        };
        const auto issue_qk = [&] {
            warpgroup_fence_operand(acc_s);
            mma_qk.accumulate_ = SM90::GMMA::ScaleOut::Zero;
            int d = 0;
#pragma unroll 1
            do {  // at least once: ptxas has to see that this is where S comes from
                multiply_slice([&](int slot) {
                    Tensor k_slice = in_slot(tSrK, slot);
                    CUTE_UNROLL
                    for (int i = 0; i < size<2>(k_slice); ++i) {
                        gemm(mma_qk, tSrQ(_, _, d * size<2>(k_slice) + i), k_slice(_, _, i), acc_s);
                        mma_qk.accumulate_ = SM90::GMMA::ScaleOut::One;
                    }
                });
            } while (++d < p.num_slices);
        };
        int buffer = 0;  // of P
        const auto issue_pv = [&] {
            warpgroup_fence_operand(acc_o);
            CUTE_UNROLL
            for (int i = 0; i < size<2>(tOrP); ++i) {
                multiply_slice([&](int slot) {
                    gemm(mma_pv, tOrP(_, _, i, buffer), in_slot(tOrVt, slot)(_, _, 0), acc_o);
                });
            }
        };

        const int key_end[2] = {p.mask.key_end(row), p.mask.key_end(row + 8)};
        const int n_block_full = p.mask.n_block_full_end(m_begin, kBlockN);
        const int keys_loaded = min(n_block_end * kBlockN, static_cast<int>(p.mask.seqlen_k));
        int n_block = n_block_end - 1;

        // The reference is the same in both groups, row_sum is this thread's share.
        sm90::OnlineSoftmax softmax(p.softmax_scale_log2);

        // S of n_block becomes P, in the other buffer than the P before it.
        const auto softmax_step = [&] {
            warpgroup_fence_operand(acc_s);
            if (p.logit_factor != 1.0f) {
                CUTE_UNROLL
                for (int i = 0; i < size(acc_s); ++i) acc_s(i) *= p.logit_factor;
            }
            if (n_block >= n_block_full) {
                const int first_key = n_block * kBlockN + group * kGroupN + 2 * (lane % 4);
                CUTE_UNROLL
                for (int i = 0; i < size(acc_s); ++i) {
                    if (8 * (i / 4) + i % 2 >= key_end[row_of(i)] - first_key) {
                        acc_s(i) = -INFINITY;
                    }
                }
            }

            float max_here[2];
            softmax.find_max(acc_s, max_here);
            CUTE_UNROLL
            for (int r = 0; r < 2; ++r) {
                max_here[r] = quad_max(max_here[r]);
                if (lane % 4 == 0) storage.row_stat[group][tile_row + 8 * r] = max_here[r];
            }
            sync_groups(0);
            bool moves = false;
            CUTE_UNROLL
            for (int r = 0; r < 2; ++r) {
                const float other_max = storage.row_stat[group ^ 1][tile_row + 8 * r];
                moves |= softmax.follow(fmaxf(max_here[r], other_max), r);
            }
            softmax.moves = __any_sync(~0u, moves);
            float sum[2];
            softmax.exponentiate(acc_s, sum);
            softmax.add(sum);

            // This group's 64 columns of P are one box wide: rows of 128 bytes, swizzled. Lane l
            // gives stmatrix the address of row l % 16 and of the left (l < 16) or right 16 bytes.
            buffer ^= 1;
            const int to_row = thread / 32 * 16 + lane % 16;
            Element* to = storage.p[buffer] + (group * kBlockM + to_row) * kBox;
            CUTE_UNROLL
            for (int i = 0; i < size(acc_s); i += 8) {
                const int chunk = (i / 4 + lane / 16) ^ (to_row % 8);
                SM90_U32x4_STSM_N::copy(pack<Element>(acc_s(i), acc_s(i + 1)),
                                        pack<Element>(acc_s(i + 2), acc_s(i + 3)),
                                        pack<Element>(acc_s(i + 4), acc_s(i + 5)),
                                        pack<Element>(acc_s(i + 6), acc_s(i + 7)),
                                        *reinterpret_cast<uint128_t*>(to + 8 * chunk));
            }
            cutlass::arch::fence_view_async_shared();
        };

        if (n_block >= 0) {
            storage.q_full.wait(0);
            issue_qk();
            finish_slices();
            softmax_step();
            for (--n_block; n_block >= 0; --n_block) {
                finish_slices();  // P V of the step before
                issue_qk();
                if (softmax.moves) softmax.rescale(acc_o, softmax.scores_scale);
                sync_groups(1);
                issue_pv();
                softmax_step();
            }
            finish_slices();
            if (softmax.moves) softmax.rescale(acc_o, softmax.scores_scale);
            sync_groups(1);
            issue_pv();
            finish_slices();
        }
        cluster_arrive();  // nothing goes to the other block from here on

        // ---- Epilogue: O / row_sum, 16 bytes a thread, from registers ----
        const int column_begin = first_column(group);
        auto* o_ptr = static_cast<Element*>(p.t.o_ptr) + coord.bidb * p.t.o_batch_stride +
                      coord.bidh * p.t.o_head_stride;
        const int64_t first_row = (coord.bidb * int64_t{p.num_heads} + coord.bidh) * p.seqlen_q;
        CUTE_UNROLL
        for (int r = 0; r < 2; ++r) {
            softmax.row_sum[r] = quad_sum(softmax.row_sum[r]);
            if (lane % 4 == 0) storage.row_stat[group][tile_row + 8 * r] = softmax.row_sum[r];
        }
        sync_groups(0);
        float inverse[2];
        bool redo[2];
        CUTE_UNROLL
        for (int r = 0; r < 2; ++r) {
            const int row_r = row + 8 * r;
            const float row_sum =
                softmax.row_sum[r] + storage.row_stat[group ^ 1][tile_row + 8 * r];
            const bool sees_a_key = key_end[r] > 0;
            inverse[r] = inverse_row_sum(row_sum);
            if (p.t.lse_ptr != nullptr && column_begin == 0 && lane % 4 == 0 &&
                row_r < p.seqlen_q) {
                p.t.lse_ptr[first_row + row_r] = log_sum_exp(softmax.reference[r], row_sum);
            }
            float zero = 0;  // or NaN, if O is not finite
            CUTE_UNROLL
            for (int d = 0; d < Traits::kColumns; d += 32) {
                uint32_t word[4];
                CUTE_UNROLL
                for (int j = 0; j < 4; ++j) {
                    const int i = 4 * (d / 8 + j) + 2 * r;
                    zero = fmaf(acc_o(i), 0.0f, fmaf(acc_o(i + 1), 0.0f, zero));
                    word[j] = pack<Element>(acc_o(i) * inverse[r], acc_o(i + 1) * inverse[r]);
                    if (!sees_a_key) word[j] = 0;
                }
                sm90::transpose_quad(word);
                const int column = column_begin + d + 8 * (lane % 4);
                if (row_r < p.seqlen_q && column < p.head_dim_v) {
                    *reinterpret_cast<uint4*>(o_ptr + row_r * p.t.o_row_stride + column) =
                        make_uint4(word[0], word[1], word[2], word[3]);
                }
            }
            redo[r] = zero != 0 && key_end[r] < keys_loaded && row_r < p.seqlen_q && sees_a_key &&
                      isfinite(inverse[r]);
        }
        // A hidden key has weight 0, but 0 * NaN = NaN: where the tile loaded keys that a row may
        // not see, and O is not finite although the sum of P is, the row is done again.
#pragma unroll 1
        for (int r = 0; r < 2; ++r) {
            __syncwarp();  // the stores above come first
            for (uint32_t lanes = __ballot_sync(~0u, r == 0 ? redo[0] : redo[1]); lanes != 0;) {
                const int quad = (__ffs(lanes) - 1) / 4;
                lanes &= ~(0xfu << 4 * quad);
                const auto of_row = [&](auto x0, auto x1) {
                    return __shfl_sync(~0u, r == 0 ? x0 : x1, 4 * quad);
                };
                redo_row<Traits>(p, coord, row - lane / 4 + quad + 8 * r, column_begin,
                                 of_row(key_end[0], key_end[1]),
                                 of_row(-softmax.reference[0], -softmax.reference[1]),
                                 of_row(inverse[0], inverse[1]));
            }
        }
        cluster_wait();
    }
}

}  // namespace fa101::sm90_split_d
