// Lesson 6: the loop of lesson 3 on Hopper's asynchronous units. One warp only brings data (TMA),
// one hands out tiles, one to three groups of four warps compute (wgmma) and send O out, and they
// meet at barriers in shared memory.
//
// Bytes. A tile of kBlockM queries reads Q and writes O once, and streams the K and V that it sees:
// for each key 4 * head_dim bytes and 4 * head_dim * kBlockM FLOP, so kBlockM FLOP a byte. The
// heads at work stay in L2: memory is idle, but 128 rows at 660 TFLOP/s draw 5.2 TB/s from L2, and
// 192 rows at 690 draw 3.6. Two blocks of a cluster that each load half of every K and V for both
// (multicast) draw half of that, and are 0 to 14 % slower: they wait for each other.
//
// One tile of queries, n = the last key block that any of its rows sees. Keys go from last to
// first, so that the blocks that need the mask come first:
//
//   producer   K(n) Q K(n-1) V(n) K(n-2) V(n-1) ...           V(0) | K(n') Q' of the next tile
//   consumer   QK(n) softmax | QK(n-1)  PV(n)    | QK(n-2) PV(n-1)  | ... PV(0)  write O
//                            | softmax(n-1) ^^^^ | softmax(n-2) ^^^
//
// Between the last product of a tile and the second of the next a group has little to multiply, and
// both groups are there at about the same time. So two groups of up to head_dim 128 that have a
// multiprocessor to themselves, and no window, softcap or parts, have room for Q twice, and begin a
// tile under the end of the one before (kStartsAhead):
//
//   producer   ... K(0) V(1) | K(n') Q' V(0) | K(n'-1) V(n') ...
//   consumer   ... softmax(0) | PV(0) QK(n') | softmax(n') | ...
//                             | write O ^^^^ |
//
// Causal tiles end in a triangle: of its last block the upper group may see nothing. Then it lets
// the block go without computing; but where tiles start ahead the mask hides it, so that all tiles
// go the same way. Of three groups, head_dim 64 also has a product for the first half of a block,
// where heads are not packed (below).
//
// The queries of heads that share a key/value head may be rows of one tile ("packed GQA"): row r is
// query r / p of head r % p of a pack of p, a power of two. TMA does most of it: a box of Q or O is
// p heads by 64 / p or 16 / p queries, and only who counts queries (mask, lse, a row on its own)
// looks. Few queries then fill a tile; tile_config.h says where it pays.
//
// Where a tile's keys all fit into shared memory, up to 256 of head_dim 64, nothing is handed over
// but data (kAtOnce): a block has one tile, one of its threads asks for all loads before the first
// wait, and there is no producer, no turn and no empty barrier. That shortens the start of small
// problems, and registers last for longer steps. The launch itself may overlap the end of what is
// before it on the stream (common/dependent.cuh).
//
// A chunk of queries against a long cache may still be fewer tiles than multiprocessors. Then the
// keys of each are split over blocks as in lesson 4 (kSplits): O and lse of a part are float32, and
// combine.cu merges them. These kernels also take the lengths of caches from the device, and have
// one group where a tile has up to 64 rows.
//
// Barriers. Each is an mbarrier in shared memory that counts arrivals and flips its phase; a waiter
// names the parity of the phase it waits for. "Full" ones complete when TMA has delivered the bytes
// that the producer announced, "empty" ones when every consumer warp has arrived (lane 0, after
// its wgmma that read the slot has completed: warpgroup_wait).
//
//   barrier        arrivals      who waits                  who arrives
//   q_full[g][s]   1 + bytes     group g, before its first  producer, with TMA of 64 rows of Q
//                                product of a tile
//   q_empty[g][s]  4 warps       producer, before that TMA  group g, after a tile's last Q K^T
//   k/v_full[s]    1 + bytes     every group                producer, with TMA of block n
//   k/v_empty[s]   4 * kGroups   producer, before that TMA  every group, after Q K^T (P V) of it
//   tile_full      1             consumers, producer        scheduler, after storing the tile
//   tile_empty     1 + the above scheduler, before storing  consumers, after reading; producer,
//                                                           before its last loads of a tile
//
// Phases. A ring of kStages slots is used in order by both sides, each counting for itself: slot s
// of round r is full at parity r % 2, and the producer of round r waits for the consumers of round
// r - 1, parity (r - 1) % 2 = (r + 1) % 2; for r = 0 that parity counts as passed in a fresh
// barrier. Q has one slot a group, or two where tiles start ahead; its rounds count tiles. A tile
// whose rows see no key uses no slot on either side: both compute its blocks from the same numbers.
// Where tiles start ahead it takes one block all the same.
// The scheduler asks for a tile no earlier than the producer is at the last loads of the one
// before: a block that is late takes one less. It also works out where the tile's blocks are, as it
// has the time.
//
// No cycle: the producer waits only for slots of earlier loads, in the order in which the consumers
// use them (K(n), Q, K(n-1), V(n), ...), so the consumers' next slot is always loaded or being
// waited for by the producer on something they have yet to release and will, with no further load.
// K(n-1) may be asked for before V(n): with two slots, K(n-1) needs K(n+1) released, which the
// consumers do before they need V(n). Where tiles start ahead K(n') is asked for before V(0): it
// needs the slot of K(1), which is released before V(0) is needed; after a tile of one block that
// of the K, and Q' that of the Q, of two tiles ago. A group asks for the next tile, K(n') and Q'
// when P V(0) is under way, so with V(1) and all before it done. The scheduler waits for the
// producer to come to the end of a tile and for consumers to begin it, which they do without it.
// The turns below are a ring of the groups, all of which take the same number of turns a tile, as
// its blocks belong to the tile and not to the group.
//
// Turns ("ping-pong"): named barrier g is passed when group g waits (128 threads) and its
// predecessor has handed over (128). The last group hands over once at the start, so group 0 goes
// first. So the products of one group run under the softmax of the others. One alone takes none.
//
// Memory order: TMA's writes are visible to whoever saw the full barrier's phase. Nothing else
// writes the tiles, so no proxy fence is needed, but where keys are split: there each group clears
// what V holds behind a cache's keys, then a fence and named barrier kGroups + g of its 128 threads
// stand before its wgmma. O leaves through shared memory of its own and TMA:
// wgmma leaves a row to four threads, two columns in eight to each, and memory wants whole lines.
// There a fence stands between the warp's writes and TMA's reads (tma_store_fence); a warp has two
// boxes, of 16 rows by 64 columns (32 at 96), and writes one again only when TMA has read it. At
// 192, where shared memory is full, and in kernels that split keys the four threads exchange what
// they have; parts they write as it is.
//
// Guesses. A step's P uses what was subtracted in the step before, without a look at the new
// logits: should P become large, so does its sum, which is needed anyway, and only then the warp
// looks by how much it has to subtract more, and rescales P as O. P above 2^100 does not tell that;
// its row is lost, and done again at the end: models do not leap so far within a row. A logit takes
// four and a half instructions (scale and subtract, exponential, maximum, sum, half a conversion);
// this saves one of them, and a wait for all logits.
//
// Budgets. 32-bit registers of a consumer thread, of 232 (up to two groups; 240 at 256) or 160
// (three), and KB of shared memory, of 227; K and V in two stages, for two blocks in four:
//
//   head_dim   tile         O    S    P   sum      Q    K+V   O   sum
//   64         128 x  48    32   24   12   68      16    48   32   96     two blocks, 104 registers
//   64         128 x  64    32   32   16   80      16    64   32  112     two blocks, 128; at once
//   64         128 x 128    32   64   32  128      32    64   32  128
//   64         192 x 128    32   64   32  128      24    64   48  136
//   96         128 x 128    48   64   32  144      48    96   16  160
//   96         192 x 112    48   56   28  132      36    84   24  144     with 128 keys it spills
//   128        128 x 128    64   64   32  160      64   128   32  224
//   128        192 x  80    64   40   20  124      48    80   48  176
//   128         64 x 128    64   64   32  160      16   128    -  144     parts of few rows
//   192, 128   128 x 128    64   64   32  160      48   160    -  208     head_dim_v is 128
//   192        128 x 112    96   56   28  180      48   168    -  216
//   256        128 x  64   128   32   16  176      64   128   32  224
//
// What each refinement gained here: % of TFLOP/s on an H200, bf16, 16k tokens in all, hidden 2048,
// seqlen 1k / 4k / 16k, of the full and of the causal problem (docs/performance-log.md has all);
// "-": there is no such kernel, or it was not measured.
//
//   refinement                        head_dim 64     128             256
//   softmax under P V         full     +8 +13 +15     +12 +20 +21     +17 +23 +28
//                             causal   +5 +11 +13      +4 +10 +12     +12 +22 +27
//   lazy rescaling            full     -3  -2  -2      +1  +3  +3      +5  +6  +6
//                             causal   -3  -2  -2      +1  +3  +4      +6  +8  +8
//   three groups, not two     full    +11 +23 +31      -5  +3  +4
//     (128: and 80 keys)      causal   -4 +14 +24     -12   0  +4
//   wider steps (192 and 176  full     -7  +3  +8      -3  -2   0       0  -1   0
//     for 128, 80 for 64)     causal   -8  +2  +5     -11  -4   0      -3  -1   0
//   a counter of tiles, not   full     +1   0  +1      -1   0   0      +1  +1  +1
//     equal shares            causal   +1  +2  +2      +7 +12 +15     +24 +39 +38
//   short ends, votes for     full     +4   0   0      +4  +3  +4       0   0   0
//     shuffles                causal   +6   0   0      +4  +5  +3      +1   0   0
//   P by guess                full     +1   -   -      +3  +4  +4       -   -   -
//                             causal   +2   -   -      +3  +4   -       -   -   -
//   blocks let go, O through  full     +4  +2  +1      +1  +1  +1      +2   -   -
//     shared memory           causal   +7  +8  +2      +2  +1  +3      +4   -  +1
//   small sections of heads   causal    0   0   0      +4  +1   0      +4   0   0
//   a guess without a maximum full     +7  +7  +8      +2  +2  +2      +1   0   0
//                             causal   +5  +6  +8      +2  +3  +3       0   0   0
//   taking turns (256: before full     +1  +1   0      +1  +3  +3      +1  +2  +1
//     that)                   causal    0  +4  +1      +1   0  +3      +2   0  +1
//   starting ahead (two       full      -   -   -      +2   -   -       -   -   -
//     groups)                 causal    -   -   -      +4  +2   -       -   -   -
//   O by TMA                  full     +1   -   -      +1   0   0      +1   0   -
//                             causal   +2   -   -      +1  +1   0      +1   0   -
//   2 of 8 exponentials as a  full     -6  -9 -12      -4  -6  -6
//     polynomial              causal   -3  -8  -9      -2  -5  -6
//   two blocks an SM, each    full      0  -9 -17
//     of two groups, 48 keys  causal   +7  -4 -12
//
// Loads at once (fp16, head_dim 64), in us for two blocks with producers: batch 8, 16 heads, 256
// keys 11.7 (12.9), causal 10.3 (11.9), by graph replay 8.9 (9.6) and 8.4 (9.5); batch 1, 12 heads
// 8.0 (9.3); batch 16, 128 keys 9.4 (10.6); batch 64, 256 keys 51.8 (53.8), 197 keys 23.6 (22.3).
//
// What gained is here, what lost is not: three groups where the rows are many, two blocks where
// they are few. Turns lost up to 5 % at 64 and 2 % at 128, lazy rescaling 3 % at 64, before there
// was a guess without a maximum, which needs both. Short ends are these: the tile's place is worked
// out by a warp that has time, no chain of 64 dependent instructions, no branches in the epilogue.
// Per tile the ends took 4500 cycles more than FlashAttention-3's, with as many instructions in
// all.
//
// What binds now (ncu, of the cycles at work): the tensor cores, busy for 96 % at 256 and at 128
// (at 16k 99 %; causal at 4k 91 and 86 %), at the 1.6 GHz that the power limit leaves; at 64 they
// and the exponentials' unit for 66 % each (causal at 4k 63).
#pragma once

#include <fa101/params.h>

#include "common/dependent.cuh"
#include "common/divider.h"
#include "common/flag.cuh"
#include "common/mask.h"
#include "common/online_softmax.h"
#include "common/packed.cuh"
#include "common/warp.cuh"
#include "cute/logits.cuh"
#include "flash_attn_sm90/kernel_traits.h"

#include <cuda.h>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cutlass/arch/memory.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/cutlass.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

namespace fa101::sm90 {

// In the workspace: the tiles handed out so far, once the flag is up (common/nonce.h).
struct TileCounter {
    uint64_t flag;  // the launch's nonce
    int tiles;
};
static_assert(sizeof(TileCounter) == kTileCounterBytes);

struct KernelParams {
    CUtensorMap k_map, v_map;  // (head_dim, seqlen, heads, batch)
    CUtensorMap q_map, o_map;  // (head_dim, heads of a pack, seqlen, packs, batch)
    Tensors t;
    Mask mask;
    int num_heads, seqlen_q, head_dim, head_dim_v;
    Divider group;            // query heads that share a key/value head
    int log2_pack, num_rows;  // of a pack
    Divider num_packs;
    // Sections are of packs whose tiles are mixed, so that their K and V stay in L2.
    int num_m_blocks, num_tiles, num_sections;
    Divider section_tiles, section_packs, last_section_packs;
    TileCounter* counter;  // null: tiles are dealt out in turn
    uint64_t nonce;
    // Where keys are split a tile is num_splits items of work, and the O and lse of each are parts
    // (flash_decode's Partials). How many keys there are, the problem and seqlens_k tell.
    Problem problem;
    Divider num_splits;
    int min_blocks_of_part;
    float *part_o, *part_lse;
    int64_t part_stride;
    // Logits are used as s' = logit_factor * (q . k), and softmax_scale_log2 * s' is what exp2
    // gets. The factor is 1, so that nothing is multiplied, but for a negative scale (-1: the
    // largest s' must be the largest logit) and for 0 (0, with a scale of 1: -inf * 0 would be
    // NaN). With softcap s' is tanh(logit_factor * (q . k)), in units of softcap.
    float logit_factor, softmax_scale_log2;
    bool has_softcap;

    // Of a pack's row.
    template <bool kPacks>
    __device__ int query_of(int row) const {
        return kPacks ? row >> log2_pack : row;
    }
    template <bool kPacks>
    __device__ int head_of(const TileInfo& tile, int row) const {
        return tile.bidh + (kPacks ? row & ((1 << log2_pack) - 1) : 0);
    }
    template <bool kPacks>
    __device__ int64_t index_of(const TileInfo& tile, int row) const {  // as in lse
        return (int64_t{tile.bidb} * num_heads + head_of<kPacks>(tile, row)) * seqlen_q +
               query_of<kPacks>(row);
    }
    __device__ bool has_parts() const { return num_splits.divisor > 1; }
    __device__ int64_t part_of(const TileInfo& tile, int row) const {
        return index_of<true>(tile, row) * int64_t{num_splits.divisor} + tile.split;
    }
};

// Tiles are numbered section by section, and in a section row block by row block from the last,
// which is the longest when causal.
template <int kBlockM>
__device__ TileInfo tile_info(const KernelParams& p, int tile) {
    const int section = min(p.section_tiles.quotient(tile), p.num_sections - 1);
    const int rest = tile - section * p.section_tiles.divisor;
    const Divider& packs = section < p.num_sections - 1 ? p.section_packs : p.last_section_packs;
    const int m_begin = (p.num_m_blocks - 1 - packs.quotient(rest)) * kBlockM;
    const int pack = section * p.section_packs.divisor + packs.remainder(rest);
    return {m_begin, p.num_packs.remainder(pack) << p.log2_pack, p.num_packs.quotient(pack)};
}

// A place in a ring of slots, and the parity of the round. One number: registers are short.
template <int kSlots>
struct RingPosition {
    static_assert((kSlots & (kSlots - 1)) == 0);
    uint32_t count = 0;

    __device__ uint32_t slot() const { return count % kSlots; }
    __device__ uint32_t parity() const { return count / kSlots % 2; }
    __device__ void advance() { ++count; }
    __device__ RingPosition ahead(int n) const { return {count + n}; }
};

// Enqueues C (+)= A B for the group, without waiting; of `steps` 16-wide ones along A's rows.
template <class Mma, class A, class B, class C>
__device__ __forceinline__ void issue_product(bool accumulates, Mma mma, const A& a, const B& b,
                                              C& c,
                                              int steps = decltype(cute::size<2>(A{}))::value) {
    cute::warpgroup_fence_operand(c);
    cute::warpgroup_arrive();
    mma.accumulate_ =
        accumulates ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero;
    CUTE_UNROLL
    for (int k = 0; k < steps; ++k) {
        cute::gemm(mma, a(cute::_, cute::_, k), b(cute::_, cute::_, k), c);
        mma.accumulate_ = cute::SM90::GMMA::ScaleOut::One;
    }
    cute::warpgroup_commit_batch();
}

// Accumulators of a 64 x 8c product, as wgmma spreads them: thread t of the group holds, for
// every 8 columns, two adjacent ones of two rows. Element i is
//     row 16 * (t / 32) + t % 32 / 4 + 8 * (i / 2 % 2)     column 8 * (i / 4) + 2 * (t % 4) + i % 2
// The four threads of a quad share their rows. The 16-bit operand P wants the same order, so two
// neighbours of S make a word of P.
__device__ __forceinline__ constexpr int row_of(int i) { return i / 2 % 2; }

// The online softmax of a thread's two rows. The state of common/online_softmax.h works with any
// reference close to the maximum; this one, in powers of two, moves lazily: in step() when a logit
// exceeds it by more than kSlack, in guess() when P's sum exceeds kMaxSum. Until then O needs no
// rescaling, and P stays so small that the float32 sums lose nothing. (FlashAttention-4 skips
// rescaling the same way.) And until then nobody needs the maximum itself: each thread looks at
// what it has, and one vote replaces the shuffles.
struct OnlineSoftmax {
    static constexpr float kSlack = 8.0f;
    static constexpr float kNone = 1.17549435e-38f;  // no reference yet: the row saw no key
    // What guess() takes: a sum of up to 64 of a row's P, then each of those, and what it can mend.
    static constexpr float kMaxSum = 4096.0f, kMaxP = kMaxSum / 64, kFarP = 1.2676506e30f;  // 2^100

    float scale_log2;
    float reference[2], row_sum[2];  // the sums are this thread's share until the end
    float scores_scale[2];           // what O has to be multiplied with
    bool moves;                      // whether it has to, for some row of the warp
    bool is_ready;                   // whether all rows of the warp have a reference

    __device__ explicit OnlineSoftmax(float scale_log2)
        : scale_log2(scale_log2), reference{kNone, kNone}, row_sum{0, 0} {}

    __device__ __forceinline__ bool exceeds(float x, int r) const {
        return reference[r] == kNone ? x != -INFINITY : fmaf(x, scale_log2, -reference[r]) > kSlack;
    }

    template <class AccS>
    __device__ __forceinline__ static void find_max(const AccS& s, float (&max_here)[2]) {
        float part[4];  // even and odd elements apart: shorter chains
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) part[i] = s(i);
        CUTE_UNROLL
        for (int i = 4; i < cute::size(s); ++i) part[i % 4] = fmaxf(part[i % 4], s(i));
        max_here[0] = fmaxf(part[0], part[1]);
        max_here[1] = fmaxf(part[2], part[3]);
    }

    // The reference of row r becomes x, if x exceeds it.
    __device__ __forceinline__ bool follow(float x, int r) {
        const bool moves = exceeds(x, r);
        const float old = reference[r];
        if (moves) reference[r] = x * scale_log2;
        scores_scale[r] = old == kNone ? 1.0f : exp2_approx(old - reference[r]);
        row_sum[r] *= scores_scale[r];
        return moves;
    }

    // S becomes P = 2^(scale_log2 * s - reference), in float32, and sum that of P's rows.
    template <class AccS>
    __device__ __forceinline__ void exponentiate(AccS& s, float (&sum)[2]) const {
        CUTE_UNROLL
        for (int i = 0; i < cute::size(s); ++i) {
            s(i) = exp2_approx(fmaf(s(i), scale_log2, -reference[row_of(i)]));
        }
        float part[4];
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) part[i] = s(i);
        CUTE_UNROLL
        for (int i = 4; i < cute::size(s); ++i) part[i % 4] += s(i);
        sum[0] = part[0] + part[1];
        sum[1] = part[2] + part[3];
    }

    __device__ __forceinline__ void add(const float (&sum)[2]) {
        CUTE_UNROLL
        for (int r = 0; r < 2; ++r) row_sum[r] += sum[r];
    }

    // One step: the reference, P and row_sum.
    template <class AccS>
    __device__ __forceinline__ void step(AccS& s) {
        float max_here[2], sum[2];
        find_max(s, max_here);
        moves = __any_sync(~0u, exceeds(max_here[0], 0) || exceeds(max_here[1], 1));
        if (moves) {
            follow(quad_max(max_here[0]), 0);
            follow(quad_max(max_here[1]), 1);
        }
        is_ready = __all_sync(~0u, reference[0] != kNone && reference[1] != kNone);
        exponentiate(s, sum);
        add(sum);
    }

    // The same by the reference that is there, without a look at the logits: P's sums, which are
    // needed anyway, tell whether it was good. If not, P tells how far it has to move, and is
    // rescaled as O is. Where that is so far that P has lost bits, or is inf, the row is lost: its
    // sum is inf from then on, and the epilogue does it again.
    template <class AccS>
    __device__ __forceinline__ void guess(AccS& s) {
        float sum[2];
        exponentiate(s, sum);
        moves = __any_sync(~0u, sum[0] > kMaxSum || sum[1] > kMaxSum);
        if (moves) {
            float max_p[2];
            find_max(s, max_p);
            CUTE_UNROLL
            for (int r = 0; r < 2; ++r) {
                const float x = quad_max(max_p[r]), old = reference[r];
                if (x > kFarP) {
                    sum[r] = INFINITY;
                } else if (x > kMaxP) {
                    reference[r] += log2_approx(x);
                }
                scores_scale[r] = exp2_approx(old - reference[r]);
                row_sum[r] *= scores_scale[r];
                sum[r] *= scores_scale[r];
            }
            rescale(s, scores_scale);
        }
        add(sum);
    }

    template <class Acc>
    __device__ __forceinline__ static void rescale(Acc& acc, const float (&scale)[2]) {
        CUTE_UNROLL
        for (int i = 0; i < cute::size(acc); ++i) acc(i) *= scale[row_of(i)];
    }
};

// Word j of lane t of a quad becomes word t of lane j: what was two columns in each of four
// 8-column groups becomes all of one group, a 16-byte store.
__device__ __forceinline__ void transpose_quad(uint32_t (&word)[4]) {
    CUTE_UNROLL
    for (int bit = 1; bit <= 2; bit *= 2) {
        const bool upper = threadIdx.x & bit;
        CUTE_UNROLL
        for (int j = 0; j < 4; ++j) {
            if (j & bit) continue;
            const uint32_t received = __shfl_xor_sync(~0u, upper ? word[j] : word[j | bit], bit);
            if (upper) {
                word[j] = received;
            } else {
                word[j | bit] = received;
            }
        }
    }
}

// O and lse of one row from the start, touching only the keys it sees, by one warp: of 32 keys a
// lane has one, of O every 32nd column.
template <class Traits>
__device__ __forceinline__ void redo_row(const KernelParams& p, const TileInfo& tile, int row,
                                         int key_begin, int key_end) {
    using Element = typename Traits::Element;
    const Tensors& t = p.t;
    constexpr bool kPacks = Traits::kPacks;
    const int head_kv = p.group.quotient(tile.bidh);
    const int head = p.head_of<kPacks>(tile, row), query = p.query_of<kPacks>(row);
    const auto* const q = static_cast<const Element*>(t.q_ptr) + tile.bidb * t.q_batch_stride +
                          head * t.q_head_stride + query * t.q_row_stride;
    const auto* const k = static_cast<const Element*>(t.k_ptr) + tile.bidb * t.k_batch_stride +
                          head_kv * t.k_head_stride;
    const auto* const v = static_cast<const Element*>(t.v_ptr) + tile.bidb * t.v_batch_stride +
                          head_kv * t.v_head_stride;
    [[maybe_unused]] auto* const o = static_cast<Element*>(t.o_ptr) + tile.bidb * t.o_batch_stride +
                                     head * t.o_head_stride + query * t.o_row_stride;
    const int lane = threadIdx.x % 32;
    constexpr int kColumns = Traits::kHeadDimV / 32;
    float acc[kColumns] = {}, row_max = -INFINITY, row_sum = 0;
#pragma unroll 1
    for (int begin = key_begin; begin < key_end; begin += 32) {
        const int key = begin + lane;
        float logit = -INFINITY;
        if (key < key_end) {
            float dot = 0;
#pragma unroll 4
            for (int d = 0; d < p.head_dim; ++d) {
                dot = fmaf(static_cast<float>(q[d]),
                           static_cast<float>(k[key * t.k_row_stride + d]), dot);
            }
            logit = p.logit_factor * dot;
            if (Traits::kHasExtras && p.has_softcap) logit = tanh_approx(logit);
            logit *= p.softmax_scale_log2;
        }
        const float old_max = row_max;
        row_max = fmaxf(row_max, warp_max(logit));
        const float scores_scale = exp2_approx(safe_row_max(old_max) - safe_row_max(row_max));
        const float weight = exp2_approx(logit - safe_row_max(row_max));
        row_sum = row_sum * scores_scale + weight;
        CUTE_UNROLL
        for (int i = 0; i < kColumns; ++i) acc[i] *= scores_scale;
#pragma unroll 1
        for (int j = 0; j < min(32, key_end - begin); ++j) {
            const float w = __shfl_sync(~0u, weight, j);
            CUTE_UNROLL
            for (int i = 0; i < kColumns; ++i) {
                const int d = lane + 32 * i;
                if (d < p.head_dim_v) {
                    acc[i] =
                        fmaf(w, static_cast<float>(v[(begin + j) * t.v_row_stride + d]), acc[i]);
                }
            }
        }
    }
    row_sum = warp_sum(row_sum);
    const float inverse = inverse_row_sum(row_sum);
    if (Traits::kSplits && p.has_parts()) {
        const int64_t part = p.part_of(tile, row);
        CUTE_UNROLL
        for (int i = 0; i < kColumns; ++i) {
            const int d = lane + 32 * i;
            if (d < p.head_dim_v) p.part_o[part * p.part_stride + d] = acc[i] * inverse;
        }
        if (lane == 0) p.part_lse[part] = row_max + log2f(row_sum);
        return;
    }
    CUTE_UNROLL
    for (int i = 0; i < kColumns; ++i) {
        const int d = lane + 32 * i;
        if (d < p.head_dim_v) o[d] = static_cast<Element>(acc[i] * inverse);
    }
    if (t.lse_ptr != nullptr && lane == 0) {
        t.lse_ptr[p.index_of<kPacks>(tile, row)] = log_sum_exp(row_max, row_sum);
    }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksPerSm)
    flash_attn_sm90_kernel(const __grid_constant__ KernelParams p) {
    using namespace cute;
    using Element = typename Traits::Element;
    constexpr int kBlockN = Traits::kBlockN;
    constexpr int kGroups = Traits::kGroups;
    constexpr int kGroupM = Traits::kGroupM;
    constexpr int kBlockM = Traits::kBlockM;
    constexpr int kBox = Traits::kBox;
    constexpr int kStages = Traits::kStages;
    constexpr int kStagesO = Traits::kStagesO;
    constexpr bool kHasExtras = Traits::kHasExtras;
    constexpr bool kStartsAhead = Traits::kStartsAhead;
    constexpr bool kSplits = Traits::kSplits;
    constexpr bool kPacks = Traits::kPacks;
    constexpr int kHalfN = Traits::kHalfN;
    constexpr bool kHasHalf = Traits::kHasHalf;
    constexpr bool kAtOnce = Traits::kAtOnce;
    constexpr bool kTakesTurns = !kAtOnce && kGroups > 1;

    extern __shared__ __align__(1024) unsigned char smem[];
    // Through a shuffle, or the compiler would ask for the address anew in every step, and wait.
    const size_t base = __shfl_sync(~0u, cast_smem_ptr_to_uint(smem), 0);
    auto& storage =
        *reinterpret_cast<typename Traits::SharedStorage*>(__cvta_shared_to_generic(base));

    if (threadIdx.x == 0) {
        // The first loads would wait for the maps themselves.
        prefetch_tma_descriptor(&p.q_map);
        prefetch_tma_descriptor(&p.k_map);
        prefetch_tma_descriptor(&p.v_map);
        prefetch_tma_descriptor(&p.o_map);
        for (int g = 0; g < kGroups; ++g) {
            for (int s = 0; s < Traits::kStagesQ; ++s) storage.q_full[g][s].init(1);
        }
        for (int s = 0; s < kStages; ++s) {
            storage.k_full[s].init(1);
            storage.v_full[s].init(1);
        }
        if constexpr (!kAtOnce) {
            for (int g = 0; g < kGroups; ++g) {
                for (int s = 0; s < Traits::kStagesQ; ++s) storage.q_empty[g][s].init(4);
            }
            for (int s = 0; s < kStages; ++s) {
                storage.k_empty[s].init(4 * kGroups);
                storage.v_empty[s].init(4 * kGroups);
            }
            storage.tile_full.init(1);
            storage.tile_empty.init(4 * kGroups + 1);
        }
        cutlass::arch::fence_barrier_init();
    }

    // Key blocks of a tile: it visits first + n for n = count - 1 ... 0; none if count <= 0.
    const auto first_block_of = [](const TileMask& mask) {
        return kHasExtras ? mask.key_begin(0) / kBlockN : 0;
    };
    const auto num_blocks_of = [&](const TileMask& mask, int m_begin) {
        const int last_row = min(kBlockM, p.num_rows - m_begin) - 1;
        const int n =
            ceil_div(mask.key_end(p.query_of<kPacks>(last_row)), kBlockN) - first_block_of(mask);
        return kStartsAhead ? max(n, 1) : n;
    };

    struct Work {
        TileInfo tile;
        TileMask mask;
        int num_blocks, first_block;
    };

    // ---- Loads: by one thread, in the order in which they are used ----
    constexpr uint64_t kReadOnce = static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_FIRST);
    constexpr uint64_t kReadOften = static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_LAST);
    struct Place {  // of K and V
        int first_block, head_kv, bidb;
    };
    // `rows` of one tile into shared memory, a box of columns at a time; at: where, after the
    // column.
    const auto load = [](const CUtensorMap& map, typename Traits::FullBarrier& full, uint64_t hint,
                         Element* to, int rows, int head_dim, auto... at) {
        full.arrive_and_expect_tx(rows * head_dim * sizeof(Element));
        CUTE_UNROLL
        for (int d = 0; d < head_dim; d += kBox) {
            SM90_TMA_LOAD::copy(&map, reinterpret_cast<uint64_t*>(&full), hint, to + d * rows, d,
                                at...);
        }
    };
    const auto await_empty = [](typename Traits::EmptyBarrier& empty, uint32_t parity) {
        if constexpr (!kAtOnce) empty.wait(parity ^ 1);
    };
    RingPosition<kStages> k_ring, v_ring;
    RingPosition<Traits::kStagesQ> q_ring;
    const auto load_k = [&](const Place& at, int n_block) {
        await_empty(storage.k_empty[k_ring.slot()], k_ring.parity());
        load(p.k_map, storage.k_full[k_ring.slot()], kReadOften, storage.k[k_ring.slot()], kBlockN,
             Traits::kHeadDim, (at.first_block + n_block) * kBlockN, at.head_kv, at.bidb);
        k_ring.advance();
    };
    const auto load_v = [&](const Place& at, int n_block) {
        await_empty(storage.v_empty[v_ring.slot()], v_ring.parity());
        load(p.v_map, storage.v_full[v_ring.slot()], kReadOften, storage.v[v_ring.slot()], kBlockN,
             Traits::kHeadDimV, (at.first_block + n_block) * kBlockN, at.head_kv, at.bidb);
        v_ring.advance();
    };
    const auto load_q = [&](const TileInfo& tile) {
        const int slot = q_ring.slot();
        for (int g = 0; g < kGroups; ++g) {
            await_empty(storage.q_empty[g][slot], q_ring.parity());
            load(p.q_map, storage.q_full[g][slot], kReadOnce, storage.q[g][slot], kGroupM,
                 Traits::kHeadDim, 0, p.query_of<kPacks>(tile.m_begin + g * kGroupM),
                 tile.bidh >> p.log2_pack, tile.bidb);
        }
        q_ring.advance();
    };
    const auto load_pair = [&](const Place& at, int n_block) {
        load_k(at, n_block - 1);
        load_v(at, n_block);
    };

    Work only;  // of a block that has one tile
    if constexpr (kAtOnce) {
        const TileInfo tile = tile_info<kBlockM>(p, blockIdx.x);
        const TileMask mask = p.mask.tile(p.query_of<kPacks>(tile.m_begin), kBlockM);
        only = {tile, mask, num_blocks_of(mask, tile.m_begin), 0};
        wait_for_stream();
        if (threadIdx.x == 0 && only.num_blocks > 0) {
            const Place at = {0, p.group.quotient(tile.bidh), tile.bidb};
            int n_block = only.num_blocks - 1;
            load_k(at, n_block);
            load_q(tile);
#pragma unroll 1
            for (; n_block > 0; --n_block) load_pair(at, n_block);
            load_v(at, 0);
        }
    }
    __syncthreads();
    if constexpr (kSplits) start_next();  // who merges the parts

    const int warpgroup = cutlass::canonical_warp_group_idx();
    RingPosition<1> tile_ring;
    const auto await_tile = [&] {
        storage.tile_full.wait(tile_ring.parity());
        tile_ring.advance();
        const int num_keys = kSplits ? storage.tile_num_keys : static_cast<int>(p.mask.seqlen_k);
        const TileMask mask = {num_keys, kHasExtras ? storage.tile_first_key_begin : 0,
                               storage.tile_first_key_end};
        return Work{{storage.tile_m_begin, storage.tile_bidh, storage.tile_bidb,
                     kSplits ? storage.tile_split : 0},
                    mask,
                    storage.tile_num_blocks,
                    kSplits ? storage.tile_first_block : first_block_of(mask)};
    };
    if (!kAtOnce && warpgroup == 0) {
        // One thread of a warp hands out tiles, one of another loads them.
        cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
        const int warp = cutlass::canonical_warp_idx_sync();
        if (warp > 1 || !elect_one_sync()) return;

        if (warp == 1) {
            // ---- Scheduler ----
            // Each block asks until there are no more tiles, so num_tiles times in all: once for
            // every tile but its first, and once in vain.
            const auto next_number = [&](int number) {
                if (p.counter == nullptr) return number + static_cast<int>(gridDim.x);
                const int taken = atomicAdd(&p.counter->tiles, 1);
                if (taken == p.num_tiles - 1) p.counter->flag = 0;
                return taken + static_cast<int>(gridDim.x);
            };
            if (p.counter != nullptr && blockIdx.x == 0) {  // the first to start
                p.counter->tiles = 0;
                publish(&p.counter->flag, p.nonce);
            }
            for (int number = blockIdx.x, asked = 0;; ++asked) {
                TileInfo tile = {-1};
                if (number < p.num_tiles) {
                    tile = tile_info<kBlockM>(p, kSplits ? p.num_splits.quotient(number) : number);
                }
                storage.tile_m_begin = tile.m_begin;
                storage.tile_bidh = tile.bidh;
                storage.tile_bidb = tile.bidb;
                storage.tile_head_kv = p.group.quotient(tile.bidh);
                const Mask all =
                    kSplits && tile.m_begin >= 0 ? mask_of(p.problem, p.t, tile.bidb) : p.mask;
                const TileMask mask = all.tile(p.query_of<kPacks>(tile.m_begin), kBlockM);
                storage.tile_first_key_begin = mask.first_key_begin;
                storage.tile_first_key_end = mask.first_key_end;
                const int num_blocks = num_blocks_of(mask, tile.m_begin);
                if constexpr (kSplits) {
                    // As many as the tile's own keys are worth, whatever the capacity.
                    const int blocks = max(num_blocks, 0);
                    const int splits = clamp_to(blocks / p.min_blocks_of_part, 1,
                                                static_cast<int>(p.num_splits.divisor));
                    const int split = p.num_splits.remainder(number);
                    const int begin = blocks * min(split, splits) / splits;
                    storage.tile_num_keys = mask.num_keys;
                    storage.tile_split = split;
                    storage.tile_first_block = begin;
                    storage.tile_num_blocks = blocks * min(split + 1, splits) / splits - begin;
                } else {
                    storage.tile_num_blocks = num_blocks;
                }
                storage.tile_full.arrive();
                if (tile.m_begin < 0) return;
                storage.tile_empty.wait(tile_ring.parity());
                tile_ring.advance();
                if (asked == 0 && p.counter != nullptr) {
                    await_flag(&p.counter->flag, p.nonce);
                    acquire();
                }
                number = next_number(number);
            }
        }

        // ---- Producer ----
        // With Q twice the next tile's K and Q come before the last V of this one.
        constexpr int kLastPairs = kStartsAhead ? 1 : 0;
        Place at = {};
        bool owes_v = false;  // V(0) of the tile before
        for (;;) {
            const auto [tile, mask, num_blocks, first_block] = await_tile();
            const bool sees_keys = tile.m_begin >= 0 && num_blocks > 0;
            const Place next = {first_block, storage.tile_head_kv, tile.bidb};
            int n_block = num_blocks - 1;
            if (sees_keys) {
                load_k(next, n_block);
                load_q(tile);
            }
            if (owes_v) load_v(at, 0);
            if (tile.m_begin < 0) return;
            at = next;
#pragma unroll 1  // it has few registers
            for (; n_block > kLastPairs; --n_block) load_pair(at, n_block);
            storage.tile_empty.arrive();
            if (kStartsAhead && n_block == 1) load_pair(at, 1);
            if (!kStartsAhead && sees_keys) load_v(at, 0);
            owes_v = kStartsAhead && sees_keys;
        }
    } else {
        // ---- Consumers ----
        if constexpr (!kAtOnce) {
            cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
        }
        const int group = warpgroup - Traits::kFirstConsumer / 4;
        const int thread = threadIdx.x % 128;
        const int lane = threadIdx.x % 32;

        const auto release = [lane](typename Traits::EmptyBarrier& empty) {
            if (!kAtOnce && lane == 0) empty.arrive();
        };
        const auto take_turn = [group] {
            if constexpr (kTakesTurns) cutlass::arch::NamedBarrier::sync(256, group);
        };
        const auto pass_turn = [group] {
            const int next_group = group == kGroups - 1 ? 0 : group + 1;
            if constexpr (kTakesTurns) cutlass::arch::NamedBarrier::arrive(256, next_group);
        };
        if (group == kGroups - 1) pass_turn();

        Tensor sQ =
            make_tensor(make_smem_ptr(&storage.q[group][0][0]), typename Traits::SmemLayoutQ{});
        Tensor sK = make_tensor(make_smem_ptr(&storage.k[0][0]), typename Traits::SmemLayoutK{});
        Tensor sVt = make_tensor(make_smem_ptr(&storage.v[0][0]), typename Traits::SmemLayoutVt{});
        typename Traits::TiledMmaQK mma_qk;
        typename Traits::TiledMmaPV mma_pv;
        auto thr_mma_qk = mma_qk.get_thread_slice(thread);
        auto thr_mma_pv = mma_pv.get_thread_slice(thread);
        // (MMA, 1, HeadDim/16, StagesQ), (MMA, 1, HeadDim/16, Stages), (MMA, 1, BlockN/16, Stages)
        Tensor tSrQ = thr_mma_qk.make_fragment_A(thr_mma_qk.partition_A(sQ));
        Tensor tSrK = thr_mma_qk.make_fragment_B(thr_mma_qk.partition_B(sK));
        Tensor tOrVt = thr_mma_pv.make_fragment_B(thr_mma_pv.partition_B(sVt));
        Tensor acc_s = partition_fragment_C(mma_qk, Shape<Int<kGroupM>, Int<kBlockN>>{});
        // The same of the first half of a block's keys, where the group sees no more of them.
        typename Traits::TiledMmaHalfQK mma_half_qk;
        auto thr_mma_half_qk = mma_half_qk.get_thread_slice(thread);
        Tensor tSrHalfK = thr_mma_half_qk.make_fragment_B(thr_mma_half_qk.partition_B(
            local_tile(sK, Shape<Int<kHalfN>, Int<Traits::kHeadDim>>{}, make_coord(0, 0, _))));
        Tensor half_s = make_tensor(
            acc_s.data(), partition_shape_C(mma_half_qk, Shape<Int<kGroupM>, Int<kHalfN>>{}));
        Tensor acc_o = partition_fragment_C(mma_pv, Shape<Int<kGroupM>, Int<Traits::kHeadDimV>>{});
        Tensor rP = make_tensor<Element>(Shape<Shape<_2, _2, _2>, _1, Int<kBlockN / 16>>{});
        Tensor p_words = recast<uint32_t>(rP);

        RingPosition<kStages> ring;  // the block that P V is at; Q K^T is at most two ahead
        RingPosition<Traits::kStagesQ> q_ring;
        int q_slot = 0;
        RingPosition<kStagesO == 0 ? 1 : kStagesO> o_ring;

        const auto take_tile = [&] {
            const Work work = await_tile();
            __syncwarp();
            release(storage.tile_empty);
            return work;
        };
        const auto await_q = [&] {
            q_slot = q_ring.slot();
            storage.q_full[group][q_slot].wait(q_ring.parity());
            q_ring.advance();
        };
        const auto await_k = [&](int ahead) {
            const auto k_ring = ring.ahead(ahead);
            storage.k_full[k_ring.slot()].wait(k_ring.parity());
        };
        const auto issue_qk = [&](int ahead) {
            issue_product(false, mma_qk, tSrQ(_, _, _, q_slot),
                          tSrK(_, _, _, ring.ahead(ahead).slot()), acc_s);
        };
        const auto finish_qk = [&](auto in_flight) {
            warpgroup_wait<decltype(in_flight)::value>();
            warpgroup_fence_operand(acc_s);
        };
        // The first Q K^T of a tile. After the last tile it is of what lies in the slots, for
        // nothing: a branch around it would make the assembler serialise all products.
        const auto start = [&](const TileInfo& tile, int ahead) {
            if (tile.m_begin >= 0) {
                await_q();
                await_k(ahead);
            }
            issue_qk(ahead);
        };

        Work next;
        if constexpr (kStartsAhead) {
            next = take_tile();
            start(next.tile, 0);
        }
        for (;;) {
            if constexpr (kStartsAhead) {
                finish_qk(Int<0>{});
            } else {
                next = kAtOnce ? only : take_tile();
            }
            const Work work = next;
            const TileInfo& tile = work.tile;
            const TileMask& mask = work.mask;
            if (tile.m_begin < 0) {
                tma_store_wait<0>();
                return;
            }
            // Rows count from the tile's first. With extras not from `group`, or what follows from
            // it would be kept from tile to tile, and registers spill.
            const int group_row =
                (kHasExtras ? reread_thread_index<Traits::kThreads>() / 128 - 1 : group) * kGroupM;
            const int row = group_row + thread / 32 * 16 + lane / 4;  // and row + 8
            // Worked out where they are needed: registers are short.
            const auto key_end = [&](int r) {
                return mask.key_end(p.query_of<kPacks>(row + 8 * r));
            };
            const auto key_begin = [&](int r) {
                return kHasExtras ? mask.key_begin(p.query_of<kPacks>(row + 8 * r)) : 0;
            };
            // Blocks from first_block on; whole for all rows of the group: [full_begin, full_end).
            const int first_block = work.first_block;
            const int last_query =
                p.query_of<kPacks>(min(group_row + kGroupM, p.num_rows - tile.m_begin) - 1);
            const int full_begin =
                kHasExtras ? ceil_div(mask.key_begin(last_query), kBlockN) - first_block : 0;
            const int full_end =
                mask.key_end(p.query_of<kPacks>(group_row)) / kBlockN - first_block;
            const int num_blocks = work.num_blocks;
            // The last block of the tile may hold nothing for the group, or a half.
            const int group_end = mask.key_end(last_query) - first_block * kBlockN;
            const int group_blocks =
                kStartsAhead ? num_blocks
                             : clamp_to(ceil_div(group_end, kBlockN), 0, max(num_blocks, 0));
            const bool is_half = kHasHalf && group_end <= (group_blocks - 1) * kBlockN + kHalfN;
            int n_block = num_blocks - 1;

            OnlineSoftmax softmax(p.softmax_scale_log2);

            bool accumulates = !kStartsAhead;
            const auto issue_pv = [&](auto keys) {
                storage.v_full[ring.slot()].wait(ring.parity());
                warpgroup_fence_operand(rP);
                issue_product(accumulates, mma_pv, rP, tOrVt(_, _, _, ring.slot()), acc_o,
                              decltype(keys)::value / 16);
                accumulates = true;
            };
            const auto release_k = [&](int ahead) {
                release(storage.k_empty[ring.ahead(ahead).slot()]);
                if (n_block == 0) release(storage.q_empty[group][q_slot]);
            };
            const auto finish_pv = [&](auto in_flight) {
                warpgroup_wait<decltype(in_flight)::value>();
                warpgroup_fence_operand(acc_o);
                warpgroup_fence_operand(rP);
                release(storage.v_empty[ring.slot()]);
                ring.advance();
            };
            const auto finish_logits = [&](auto& s) {  // scale, softcap, mask
                if (p.logit_factor != 1.0f) {
                    CUTE_UNROLL
                    for (int i = 0; i < size(s); ++i) s(i) *= p.logit_factor;
                }
                if (kHasExtras && p.has_softcap) {
                    // Every four behind a branch of their own: the assembler would start so many at
                    // once that registers spill.
                    CUTE_UNROLL
                    for (int begin = 0; begin < size(s); begin += 4) {
                        int has_softcap = p.has_softcap;
                        asm volatile("" : "+r"(has_softcap));
                        if (!has_softcap) continue;
                        CUTE_UNROLL
                        for (int i = begin; i < begin + 4; ++i) s(i) = tanh_approx(s(i));
                    }
                }
                if (n_block >= full_end) {
                    const int first_key = (first_block + n_block) * kBlockN + 2 * (lane % 4);
                    const int end[2] = {key_end(0) - first_key, key_end(1) - first_key};
                    CUTE_UNROLL
                    for (int i = 0; i < size(s); ++i) {
                        if (8 * (i / 4) + i % 2 >= end[row_of(i)]) {
                            s(i) = -INFINITY;
                        }
                    }
                }
                if (kHasExtras && n_block < full_begin) {
                    const int first_key = (first_block + n_block) * kBlockN + 2 * (lane % 4);
                    CUTE_UNROLL
                    for (int i = 0; i < size(s); ++i) {
                        if (8 * (i / 4) + i % 2 < key_begin(row_of(i)) - first_key) {
                            s(i) = -INFINITY;
                        }
                    }
                }
            };
            const auto next_softmax = [&] {
                finish_logits(acc_s);
                if (Traits::kGuesses && softmax.is_ready) {
                    softmax.guess(acc_s);
                } else {
                    softmax.step(acc_s);
                }
            };
            const auto convert_p = [&](const auto& s) {
                CUTE_UNROLL
                for (int i = 0; i < size(p_words); ++i) {
                    p_words(i) = 2 * i < size(s) ? pack<Element>(s(2 * i), s(2 * i + 1)) : 0;
                }
            };
            const auto first_softmax = [&](auto& s) {
                if constexpr (!kStartsAhead) finish_qk(Int<0>{});
                release_k(0);
                finish_logits(s);
                softmax.step(s);
                convert_p(s);
            };

            // What lies in a cache behind its keys has weight 0, but 0 * NaN = NaN: the rows of V
            // become 0 in shared memory. By each group, as none waits for another.
            const auto clear_beyond_keys = [&] {
                const int num_keys = mask.num_keys - (first_block + n_block) * kBlockN;
                if (num_keys >= kBlockN) return;
                storage.v_full[ring.slot()].wait(ring.parity());
                Element* const v = storage.v[ring.slot()];
                CUTE_UNROLL
                for (int d = 0; d < Traits::kHeadDimV; d += kBox) {  // of a box the last rows
                    for (int i = num_keys * kBox + 8 * thread; i < kBlockN * kBox; i += 8 * 128) {
                        *reinterpret_cast<uint4*>(v + d * kBlockN + i) = uint4{};
                    }
                }
                cutlass::arch::fence_view_async_shared();  // before wgmma reads
                cutlass::arch::NamedBarrier::sync(128, kGroups + group);
            };

            // Q K^T and softmax of block n_block, P V of the one before, of its first `keys` keys.
            // O is rescaled while another group's products run.
            const auto step = [&](auto keys) {
                take_turn();
                issue_qk(1);
                issue_pv(keys);
                pass_turn();
                finish_qk(Int<1>{});
                release_k(1);
                next_softmax();
                // The wait for the next K stands here because it is a branch: the assembler would
                // move the wait for P V, which nothing above depends on, up over the softmax that
                // is to run under P V.
                warpgroup_fence_operand(acc_s);
                if (n_block > 0) await_k(2);
                finish_pv(Int<0>{});
                if (softmax.moves) softmax.rescale(acc_o, softmax.scores_scale);
                convert_p(acc_s);
            };

            if constexpr (!kStartsAhead) {
                if (num_blocks > 0) await_q();
#pragma unroll 1
                for (; n_block >= group_blocks; --n_block) {
                    if (n_block > 0) {
                        take_turn();
                        pass_turn();
                    }
                    await_k(0);
                    release_k(0);
                    storage.v_full[ring.slot()].wait(ring.parity());
                    release(storage.v_empty[ring.slot()]);
                    ring.advance();
                }
            }
            if (kStartsAhead || n_block >= 0) {
                if constexpr (kStartsAhead) {
                    first_softmax(acc_s);
                } else {
                    await_k(0);
                    if (kHasHalf && is_half) {
                        issue_product(false, mma_half_qk, tSrQ(_, _, _, q_slot),
                                      tSrHalfK(_, _, _, ring.slot()), half_s);
                        clear(acc_o);
                        first_softmax(half_s);
                    } else {
                        issue_qk(0);
                        clear(acc_o);
                        first_softmax(acc_s);
                    }
                }
                if constexpr (kSplits) clear_beyond_keys();
                if (n_block > 0) await_k(1);
                if constexpr (kHasHalf) {
                    if (is_half && --n_block >= 0) step(Int<kHalfN>{});
                }
                for (--n_block; n_block >= 0; --n_block) step(Int<kBlockN>{});
                issue_pv(Int<kBlockN>{});
                if constexpr (!kStartsAhead) finish_pv(Int<0>{});
            } else {
                clear(acc_o);
            }

            if constexpr (kStartsAhead) {
                next = take_tile();
                start(next.tile, 1);
            }

            // ---- Epilogue: O / row_sum ----
            float row_sum[2], inverse[2];
            CUTE_UNROLL
            for (int r = 0; r < 2; ++r) {
                row_sum[r] = quad_sum(softmax.row_sum[r]);
                inverse[r] = row_sum[r] == 0.0f ? 0.0f : rcp_approx(row_sum[r]);
            }
            const auto is_inside = [&](int r) { return tile.m_begin + row + 8 * r < p.num_rows; };
            const bool is_part = kSplits && p.has_parts();
            if (!is_part && p.t.lse_ptr != nullptr && lane % 4 == 0) {
                CUTE_UNROLL
                for (int r = 0; r < 2; ++r) {
                    if (!is_inside(r)) continue;
                    p.t.lse_ptr[p.index_of<kPacks>(tile, tile.m_begin + row + 8 * r)] =
                        log_sum_exp(softmax.reference[r], row_sum[r]);
                }
            }
            // A hidden key has weight 0, but 0 * NaN = NaN: where the tile loaded keys that a row
            // may not see, and O is not finite although the sum of P is, the row is done again. So
            // is one that is lost (see guess). Keys behind a cache's do not count: V is 0 there.
            const bool hides_keys = full_end < num_blocks || full_begin > 0;
            const int loaded_begin = first_block * kBlockN;
            const int loaded_end = min((first_block + num_blocks) * kBlockN,
                                       kSplits ? mask.num_keys : static_cast<int>(p.mask.seqlen_k));
            // Whether a row has to be done again: `words` are a thread's part of it.
            const auto must_redo = [&](int r, const auto& words) {
                if (!is_inside(r)) return false;
                if (row_sum[r] == INFINITY) return true;
                return hides_keys && !are_finite<Element>(words) && isfinite(inverse[r]) &&
                       (loaded_begin < key_begin(r) || key_end(r) < loaded_end);
            };
            bool redo[2] = {};
            const int warp_row = tile.m_begin + group_row + thread / 32 * 16;
            if constexpr (kStartsAhead) finish_pv(Int<1>{});
            // O / row_sum, the word of columns 8 * i + 2 * (lane % 4).
            const auto word_of = [&](int r, int i) {
                const int at = 4 * i + 2 * r;
                return pack<Element>(acc_o(at) * inverse[r], acc_o(at + 1) * inverse[r]);
            };
            constexpr int kGroupsOf8 = Traits::kHeadDimV / 8;
            if (is_part) {
                CUTE_UNROLL
                for (int r = 0; r < 2; ++r) {
                    if (!is_inside(r)) continue;
                    const int64_t part = p.part_of(tile, tile.m_begin + row + 8 * r);
                    if (lane % 4 == 0) {
                        p.part_lse[part] = softmax.reference[r] + log2f(row_sum[r]);
                    }
                    float* const o_ptr = p.part_o + part * p.part_stride + 2 * (lane % 4);
                    uint32_t words[kGroupsOf8][1];  // to see whether they are finite
                    CUTE_UNROLL
                    for (int i = 0; i < kGroupsOf8; ++i) {
                        const int at = 4 * i + 2 * r;
                        const float2 pair = {acc_o(at) * inverse[r], acc_o(at + 1) * inverse[r]};
                        words[i][0] = pack<Element>(pair.x, pair.y);
                        if (8 * i < p.head_dim_v) *reinterpret_cast<float2*>(o_ptr + 8 * i) = pair;
                    }
                    redo[r] = must_redo(r, words);
                }
            } else if constexpr (kStagesO > 0) {
                // kBox columns at a time: four 8 x 8 matrices with one instruction, and out by TMA
                // in its own time. The 16-byte pieces of a row are permuted as it expects them.
                constexpr int kPieces = kBox / 8;
                uint32_t words[2][kGroupsOf8][1];
                CUTE_UNROLL
                for (int box = 0; box < kGroupsOf8; box += kPieces) {
                    Element* const staged =
                        storage.o[threadIdx.x / 32 - Traits::kFirstConsumer][o_ring.slot()];
                    o_ring.advance();
                    const auto at = [&](int r, int piece) {
                        return staged + r * kBox + 8 * (piece ^ (kBox == 64 ? r % 8 : r / 2 % 4));
                    };
                    tma_store_wait<kStagesO - 1>();  // it has read what was there
                    __syncwarp();
                    CUTE_UNROLL
                    for (int i = 0; i < kPieces; i += 2) {
                        uint32_t w[4];
                        CUTE_UNROLL
                        for (int j = 0; j < 4; ++j) {
                            w[j] = word_of(j % 2, box + i + j / 2);
                            words[j % 2][box + i + j / 2][0] = w[j];
                        }
                        SM90_U32x4_STSM_N::copy(
                            w[0], w[1], w[2], w[3],
                            *reinterpret_cast<uint128_t*>(at(lane % 16, i + lane / 16)));
                    }
                    tma_store_fence();
                    __syncwarp();
                    if (lane == 0) {
                        SM90_TMA_STORE_5D::copy(&p.o_map, staged, 8 * box, 0,
                                                p.query_of<kPacks>(warp_row),
                                                tile.bidh >> p.log2_pack, tile.bidb);
                        tma_store_arrive();
                    }
                }
                CUTE_UNROLL
                for (int r = 0; r < 2; ++r) redo[r] = must_redo(r, words[r]);
            } else {
                CUTE_UNROLL
                for (int r = 0; r < 2; ++r) {
                    uint32_t words[kGroupsOf8 / 4][4];
                    CUTE_UNROLL
                    for (int i = 0; i < kGroupsOf8; ++i) words[i / 4][i % 4] = word_of(r, i);
                    redo[r] = must_redo(r, words);
                    const int o_row = warp_row + lane / 4 + 8 * r;
                    Element* const o_ptr = static_cast<Element*>(p.t.o_ptr) +
                                           tile.bidb * p.t.o_batch_stride +
                                           p.head_of<kPacks>(tile, o_row) * p.t.o_head_stride +
                                           p.query_of<kPacks>(o_row) * p.t.o_row_stride;
                    CUTE_UNROLL
                    for (int i = 0; i < kGroupsOf8 / 4; ++i) {
                        transpose_quad(words[i]);
                        const uint32_t (&w)[4] = words[i];
                        const int column = 8 * (4 * i + lane % 4);
                        // One instruction, by name: of an assignment the compiler makes four.
                        cutlass::arch::global_store<uint4, 16>(
                            make_uint4(w[0], w[1], w[2], w[3]), o_ptr + column,
                            is_inside(r) && column < p.head_dim_v);
                    }
                }
            }
            const bool redoes = __any_sync(~0u, redo[0] || redo[1]);
#pragma unroll 1
            for (int r = 0; redoes && r < 2; ++r) {
                uint32_t lanes = __ballot_sync(~0u, r == 0 ? redo[0] : redo[1]);
                while (lanes != 0) {
                    const int quad = (__ffs(lanes) - 1) / 4;
                    lanes &= ~(0xfu << 4 * quad);
                    const auto of_row = [&](int x0, int x1) {
                        return __shfl_sync(~0u, r == 0 ? x0 : x1, 4 * quad);
                    };
                    // The stores above come first.
                    if constexpr (kStagesO > 0)
                        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
                    __syncwarp();
                    int begin = of_row(key_begin(0), key_begin(1));
                    int end = of_row(key_end(0), key_end(1));
                    if constexpr (kSplits) {
                        begin = max(begin, loaded_begin);
                        end = min(end, loaded_end);
                    }
                    redo_row<Traits>(p, tile, tile.m_begin + row - lane / 4 + quad + 8 * r, begin,
                                     end);
                }
            }
            if constexpr (kAtOnce) {
                tma_store_wait<0>();
                return;
            }
        }
    }
}

}  // namespace fa101::sm90
