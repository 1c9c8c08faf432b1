// Compiled once for every SIMD level, with other flags and another name for the table.
//
// The vectors are the compiler's own (GCC's and Clang's vector_size), so one source serves SSE,
// AVX2, AVX-512 and NEON. The trap of such files is the linker: an inline function compiled here
// with AVX-512 and in another file without is one symbol, and the copy that survives may crash an
// older CPU. So this file includes nothing that defines functions and everything in it is local;
// the test simd_objects_have_no_weak_symbols holds it to that.
#include "cpu/simd.h"

#include <cstdint>
#include <cstring>

namespace fa101 {
namespace {

// The lanes of a vector as constants, for shuffles.
template <int... kLane>
struct LaneList {};

// W lanes; a register tile of kRows x kVectors accumulators, chosen so that it, one row of vectors
// and a broadcast fill the registers: 32 of them with AVX-512, 16 below. At least 8 accumulators
// are needed to hide the latency of the FMAs (4 cycles, 2 a cycle).
#if defined(__AVX512F__)
constexpr int W = 16, kRows = 8, kVectors = 2;
using Lanes = LaneList<0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15>;
#elif defined(__AVX2__)
constexpr int W = 8, kRows = 4, kVectors = 3;
using Lanes = LaneList<0, 1, 2, 3, 4, 5, 6, 7>;
#else
constexpr int W = 4, kRows = 4, kVectors = 2;
using Lanes = LaneList<0, 1, 2, 3>;
#endif

static_assert(W <= kMaxVector && kRows <= kMaxRows && kVectors * W <= kMaxPanel, "see simd.h");

typedef float Vec __attribute__((vector_size(W * 4)));
typedef int32_t VecI __attribute__((vector_size(W * 4)));
typedef uint32_t VecU __attribute__((vector_size(W * 4)));
typedef uint16_t VecH __attribute__((vector_size(W * 2)));
typedef uint8_t VecB __attribute__((vector_size(W)));

constexpr float kInf = __builtin_inff();
constexpr float kLog2e = 1.44269504088896340736f;

template <class V>
V load(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

template <class V>
void store(void* p, V v) {
    std::memcpy(p, &v, sizeof v);
}

Vec splat(float x) { return x - Vec{}; }
VecU bits_of(Vec v) { return reinterpret_cast<VecU>(v); }
Vec float_of(VecU v) { return reinterpret_cast<Vec>(v); }

// ---- Rows: small floats by integer arithmetic, exact for subnormals, inf and NaN on every CPU
// ----

template <DType kDType>
struct Element;  // widen: memory -> float32; narrow: float32 -> memory, to nearest even

template <>
struct Element<DType::kFloat32> {
    using Memory = Vec;
    static Vec widen(Vec v) { return v; }
    static Vec narrow(Vec v) { return v; }
};

template <>
struct Element<DType::kBool> {
    using Memory = VecB;
    static Vec widen(VecB v) {  // a step at a time: straight, GCC takes a detour
        const VecU wide = __builtin_convertvector(__builtin_convertvector(v, VecH), VecU);
        return __builtin_convertvector(reinterpret_cast<VecI>(wide), Vec);
    }
};

template <>
struct Element<DType::kBFloat16> {
    using Memory = VecH;
    static Vec widen(VecH v) { return float_of(__builtin_convertvector(v, VecU) << 16); }
    static VecH narrow(Vec v) {
        const VecU bits = bits_of(v);
        const VecU rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
        const VecU quiet_nan = bits | 0x400000u;
        return __builtin_convertvector((v == v ? rounded : quiet_nan) >> 16, VecH);
    }
};

template <>
struct Element<DType::kFloat16> {
    using Memory = VecH;

    static Vec widen(VecH v) {
        const VecU half = __builtin_convertvector(v, VecU);
        const VecU magnitude = (half & 0x7fffu) << 13;
        const VecU exponent = magnitude & (0x1fu << 23);
        const VecU normal = magnitude + ((127u - 15u) << 23);
        // A subnormal is its mantissa times 2^-24: lend it a leading 1 (2^-14), then take that
        // away.
        const VecU lent = magnitude + (113u << 23);
        const VecU subnormal = bits_of(float_of(lent) - float_of(VecU{} + (113u << 23)));
        const VecU special = magnitude | (0xffu << 23);
        const VecU value = exponent == 0u              ? subnormal
                           : exponent == (0x1fu << 23) ? special
                                                       : normal;
        return float_of(value | ((half & 0x8000u) << 16));
    }

    static VecH narrow(Vec v) {
        const VecU sign = bits_of(v) & 0x80000000u;
        const VecU bits = bits_of(v) ^ sign;
        const VecU normal = (bits - ((127u - 15u) << 23) + 0xfffu + ((bits >> 13) & 1u)) >> 13;
        // Below 2^-14 the addition of 0.5 (unit 2^-24) rounds to the subnormal's mantissa.
        const VecU subnormal = bits_of(float_of(bits) + 0.5f) - bits_of(splat(0.5f));
        const VecU special = v == v ? VecU{} + 0x7c00u : VecU{} + 0x7e00u;
        const VecU value = bits >= 0x477ff000u  ? special  // 65520, which rounds to inf, and NaN
                           : bits < 0x38800000u ? subnormal
                                                : normal;
        return __builtin_convertvector(value | (sign >> 16), VecH);
    }
};

template <>
struct Element<DType::kFloat8E4M3> {
    using Memory = VecB;

    static Vec widen(VecB v) {
        const VecU code = __builtin_convertvector(__builtin_convertvector(v, VecH), VecU);
        const VecU magnitude = (code & 0x7fu) << 20;
        const VecU normal = magnitude + ((127u - 7u) << 23);
        // As above: lend a subnormal, units of 2^-9, a leading 1 (2^-6), then take that away.
        const VecU lent = magnitude + (121u << 23);
        const VecU subnormal = bits_of(float_of(lent) - float_of(VecU{} + (121u << 23)));
        const VecU value = magnitude < (1u << 23)       ? subnormal
                           : magnitude == (0x7fu << 20) ? VecU{} + 0x7fc00000u
                                                        : normal;
        return float_of(value | ((code & 0x80u) << 24));
    }
};

// Calls body(Element<dtype>{}) for a float.
template <class Body>
void with_element(DType dtype, Body body) {
    if (dtype == DType::kFloat32) return body(Element<DType::kFloat32>{});
    if (dtype == DType::kFloat16) return body(Element<DType::kFloat16>{});
    return body(Element<DType::kBFloat16>{});
}

void load_rows(DType dtype, const void* src, int64_t src_stride, int64_t col_stride, int64_t rows,
               int64_t cols, const float* row_scale, float* dst, int64_t dst_stride) {
    const auto body = [=](auto element) {
        using Memory = typename decltype(element)::Memory;
        constexpr int64_t kSize = sizeof(Memory) / W;
        for (int64_t i = 0; i < rows; ++i) {
            const float scale = row_scale != nullptr ? row_scale[i] : 1.0f;
            const char* from = static_cast<const char*>(src) + i * src_stride * kSize;
            float* to = dst + i * dst_stride;
            int64_t c = 0;
            for (; col_stride == 1 && c + W <= cols; c += W) {
                store(to + c, element.widen(load<Memory>(from + c * kSize)) * scale);
            }
            for (; c < cols; c += W) {  // the memory after and between is not ours to read
                Memory some{};
                for (int64_t lane = 0; lane < W && c + lane < cols; ++lane) {
                    std::memcpy(reinterpret_cast<char*>(&some) + lane * kSize,
                                from + (c + lane) * col_stride * kSize, kSize);
                }
                store(to + c, element.widen(some) * scale);
            }
        }
    };
    if (dtype == DType::kBool) return body(Element<DType::kBool>{});
    if (dtype == DType::kFloat8E4M3) return body(Element<DType::kFloat8E4M3>{});
    with_element(dtype, body);
}

void store_rows(DType dtype, const float* src, int64_t src_stride, int64_t rows, int64_t cols,
                const float* row_scale, void* dst, int64_t dst_stride) {
    with_element(dtype, [=](auto element) {
        using Memory = typename decltype(element)::Memory;
        constexpr int64_t kSize = sizeof(Memory) / W;
        for (int64_t i = 0; i < rows; ++i) {
            const float* from = src + i * src_stride;
            char* to = static_cast<char*>(dst) + i * dst_stride * kSize;
            int64_t c = 0;
            for (; c + W <= cols; c += W) {
                store(to + c * kSize, element.narrow(load<Vec>(from + c) * row_scale[i]));
            }
            if (c < cols) {
                const Memory rest = element.narrow(load<Vec>(from + c) * row_scale[i]);
                std::memcpy(to + c * kSize, &rest, (cols - c) * kSize);
            }
        }
    });
}

// a0 b0 a1 b1 ... from the first halves of a and b, or from the second.
template <int... kLane>
Vec zip(Vec a, Vec b, LaneList<kLane...>) {
    return __builtin_shufflevector(a, b, (kLane % 2 * W + kLane / 2)...);
}
template <int... kLane>
Vec zip_high(Vec a, Vec b, LaneList<kLane...>) {
    return __builtin_shufflevector(a, b, (kLane % 2 * W + kLane / 2 + W / 2)...);
}

// W x W. Zipping row i with row i + W / 2 turns the bits of an element's place, row and lane
// together, by one; after log2(W) turns row and lane have changed places. A function of its own so
// that the compiler does not keep 2 W addresses from block to block.
__attribute__((noinline)) void transpose_block(const float* src, int64_t src_stride, float* dst,
                                               int64_t dst_stride) {
    Vec block[W], old[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i, src += src_stride) block[i] = load<Vec>(src);
#pragma GCC unroll 4
    for (int turn = 1; turn < W; turn *= 2) {
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) old[i] = block[i];
#pragma GCC unroll 8
        for (int i = 0; i < W / 2; ++i) {
            block[2 * i] = zip(old[i], old[i + W / 2], Lanes{});
            block[2 * i + 1] = zip_high(old[i], old[i + W / 2], Lanes{});
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i, dst += dst_stride) store(dst, block[i]);
}

// By blocks in registers; what is left by elements.
void transpose(const float* src, int64_t src_stride, int64_t rows, int64_t cols, float* dst,
               int64_t dst_stride) {
    for (int64_t i = 0; i < rows; i += W) {
        for (int64_t c = 0; c < cols; c += W) {
            const float* from = src + i * src_stride + c;
            float* to = dst + c * dst_stride + i;
            if (i + W <= rows && c + W <= cols) {
                transpose_block(from, src_stride, to, dst_stride);
                continue;
            }
            for (int64_t r = 0; r < W && i + r < rows; ++r) {
                for (int64_t k = 0; k < W && c + k < cols; ++k) {
                    to[k * dst_stride + r] = from[r * src_stride + k];
                }
            }
        }
    }
}

// ---- The register tile ----

// C[kR][kV * W] = C * alpha + A[kR][n] B[n][kV * W], without C where alpha is null: every load of B
// serves kR FMAs and every broadcast of A serves kV, which is why the FMA units, not the loads, set
// the pace. A(r, p) lies at a[r * ld + p] or, transposed, at a[p * ld + r]. C comes last: adding
// each product to a long sum would round it to that sum's unit.
template <int kR, int kV, bool kTransposedA>
void register_tile(const float* a, int64_t ld, int64_t n, const float* b, const float* alpha,
                   float* c) {
    Vec acc[kR][kV] = {};
    for (int64_t p = 0; p < n; ++p) {
        Vec b_row[kV];
#pragma GCC unroll 4
        for (int v = 0; v < kV; ++v) b_row[v] = load<Vec>(b + (p * kV + v) * W);
#pragma GCC unroll 8
        for (int r = 0; r < kR; ++r) {
            const float a_rp = kTransposedA ? a[p * ld + r] : a[r * ld + p];
#pragma GCC unroll 4
            for (int v = 0; v < kV; ++v) acc[r][v] += a_rp * b_row[v];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kR; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kV; ++v) {
            float* c_rv = c + (r * kV + v) * W;
            if (alpha != nullptr) acc[r][v] += load<Vec>(c_rv) * load<Vec>(alpha + v * W);
            store(c_rv, acc[r][v]);
        }
    }
}

template <int kN>
struct Int {
    static constexpr int value = kN;
};

// Calls body with the panel's number of vectors as a constant.
template <class Body>
void with_vectors(int width, Body body) {
    if (width == W) return body(Int<1>{});
    if (width == 2 * W) return body(Int<2>{});
    return body(Int<kVectors>{});
}

template <int kR>
void scores(const float* k, int64_t ld, int64_t n, int64_t head_dim, const float* q_panel,
            int width, float* s_panel) {
    with_vectors(width, [=](auto vectors) {
        for (int64_t j = 0; j < n; j += kR) {
            register_tile<kR, vectors.value, false>(k + j * ld, ld, head_dim, q_panel, nullptr,
                                                    s_panel + j * width);
        }
    });
}

template <int kR>
void accumulate(const float* v, int64_t ld, int64_t n, int64_t head_dim_v, const float* p_panel,
                int width, const float* alpha, float* o_panel) {
    with_vectors(width, [=](auto vectors) {
        for (int64_t c = 0; c < head_dim_v; c += kR) {
            register_tile<kR, vectors.value, true>(v + c, ld, n, p_panel, alpha,
                                                   o_panel + c * width);
        }
    });
}

// ---- Softmax: down the lanes, never across them ----

// 2^x = scale (1 + f p) for x <= 0; scale 0 below 2^-126, f NaN for NaN.
struct Exp2 {
    Vec scale, f, p;
};

Exp2 split_exp2(Vec x) {
    // Added to a number this small, 1.5 * 2^23 leaves no bits for a fraction: the sum is rounded to
    // an integer, whose low bits, here with the exponent's bias, move up into an exponent.
    constexpr float kRound = 12582912.0f + 127.0f;
    x = -127.0f > x ? splat(-127.0f) : x;  // exponent 0: the factor 0; this way round NaN stays
    const Vec shifted = x + kRound;
    const Vec scale = float_of(bits_of(shifted) << 23);
    const Vec f = x - (shifted - kRound);
    // Minimax for 2^f on [-1/2, 1/2] with the constant 1 held exact: relative error 2.2e-9.
    Vec p = f * 0x1.41fbbcp-13f + 0x1.5f3e52p-10f;
    p = p * f + 0x1.3b2d4cp-7f;
    p = p * f + 0x1.c6aee8p-5f;
    p = p * f + 0x1.ebfbdcp-3f;
    p = p * f + 0x1.62e430p-1f;
    return {scale, f, p};
}

// Within 1 ulp.
Vec exp2_of_nonpositive(Vec x) {
    const Exp2 e = split_exp2(x);
    return (e.p * e.f + 1.0f) * e.scale;
}

// By t = e^(-2 |x|) - 1: tanh |x| = -t / (2 + t). The 1 is taken from the scale, not from the sum,
// so that small x keep their digits.
Vec tanh_of(Vec x) {
    const VecU sign = bits_of(x) & 0x80000000u;
    const Exp2 e = split_exp2(float_of(bits_of(x) ^ sign) * (-2 * kLog2e));
    const Vec t = e.scale * (e.p * e.f) + (e.scale - 1.0f);
    return float_of(bits_of(-t / (2.0f + t)) ^ sign);
}

void apply_softcap(float* s_panel, int64_t n, int width, float softcap) {
    for (int64_t i = 0; i < n * width; i += W) {
        store(s_panel + i, tanh_of(load<Vec>(s_panel + i) / softcap) * softcap * kLog2e);
    }
}

void add_bias(float* s_panel, int64_t n, int width, const float* bias) {
    for (int64_t i = 0; i < n * width; i += W) {
        const Vec x = load<Vec>(bias + i), scaled = x * splat(kLog2e);  // as base2_bias
        const auto overflows = (scaled == splat(kInf)) | (scaled == splat(-kInf));
        store(s_panel + i, load<Vec>(s_panel + i) + (overflows ? x : scaled));
    }
}

// All ones where the lane sees key j.
VecI sees(const Visible& visible, int64_t j, int width, int lane) {
    const VecI key = VecI{} + static_cast<int32_t>(j);
    const VecI within =
        (load<VecI>(visible.begin + lane) <= key) & (load<VecI>(visible.end + lane) > key);
    if (visible.mask == nullptr) return within;
    return within & (load<Vec>(visible.mask + j * width + lane) != 0.0f);
}

void hide(float* s_panel, int64_t n, int width, const Visible& visible) {
    for (int64_t j = 0; j < n; ++j) {
        for (int lane = 0; lane < width; lane += W) {
            float* s = s_panel + j * width + lane;
            store(s, sees(visible, j, width, lane) ? load<Vec>(s) : splat(-kInf));
        }
    }
}

// NaN counts as nothing.
Vec larger(Vec a, Vec b) { return a > b ? a : b; }

// The maximum of n vectors; four chains, as one waits 4 cycles for each.
Vec max_down(const float* s, int64_t n, int width) {
    Vec max[4] = {splat(-kInf), splat(-kInf), splat(-kInf), splat(-kInf)};
    int64_t j = 0;
    for (; j + 4 <= n; j += 4) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) max[i] = larger(load<Vec>(s + (j + i) * width), max[i]);
    }
    for (; j < n; ++j) max[0] = larger(load<Vec>(s + j * width), max[0]);
    return larger(larger(max[0], max[1]), larger(max[2], max[3]));
}

void softmax(float* s_panel, int64_t n, int width, float* row_max, float* row_sum, float* alpha) {
    for (int lane = 0; lane < width; lane += W) {
        float* s = s_panel + lane;
        const Vec old_max = load<Vec>(row_max + lane);
        const Vec max = larger(old_max, max_down(s, n, width));
        const Vec m = max == -kInf ? Vec{} : max;  // safe_row_max()
        const Vec shrink = exp2_of_nonpositive(old_max - m);
        Vec sum{};
        for (int64_t j = 0; j < n; ++j) {
            const Vec p = exp2_of_nonpositive(load<Vec>(s + j * width) - m);
            store(s + j * width, p);
            sum += p;
        }
        store(row_max + lane, max);
        store(row_sum + lane, load<Vec>(row_sum + lane) * shrink + sum);
        store(alpha + lane, shrink);
    }
}

// ---- Values that are not finite ----

void accumulate_visible(const float* v, int64_t ld, int64_t n, int64_t head_dim_v,
                        const float* p_panel, int width, const Visible& visible, const float* alpha,
                        float* o_panel) {
    for (int lane = 0; lane < width; lane += W) {
        for (int64_t c = 0; c < head_dim_v; ++c) {
            float* o = o_panel + c * width + lane;
            Vec acc = load<Vec>(o) * load<Vec>(alpha + lane);
            for (int64_t j = 0; j < n; ++j) {
                const Vec sum = acc + v[j * ld + c] * load<Vec>(p_panel + j * width + lane);
                acc = sees(visible, j, width, lane) ? sum : acc;
            }
            store(o, acc);
        }
    }
}

bool all_finite(const float* src, int64_t ld, int64_t rows, int64_t cols) {
    VecI largest{};  // |x| as integers, which have the order of the floats; rows end in zeros
    for (int64_t i = 0; i < rows; ++i) {
        for (int64_t c = 0; c < cols; c += W) {
            const VecI bits = load<VecI>(src + i * ld + c) & 0x7fffffff;
            largest = bits > largest ? bits : largest;
        }
    }
    bool finite = true;
    for (int lane = 0; lane < W; ++lane) finite &= largest[lane] < 0x7f800000;
    return finite;
}

}  // namespace

const SimdKernels FA101_SIMD_TABLE = {
    W,
    W * kVectors,
    kRows,
    load_rows,
    store_rows,
    transpose,
    scores<kRows>,
    scores<1>,
    apply_softcap,
    add_bias,
    hide,
    softmax,
    accumulate<kRows>,
    accumulate<1>,
    accumulate_visible,
    all_finite,
};

}  // namespace fa101
