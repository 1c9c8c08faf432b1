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

// W lanes; a register tile of kRows x kVectors accumulators, chosen so that it, one row of vectors
// and a broadcast fill the registers: 32 of them with AVX-512, 16 below. At least 8 accumulators
// are needed to hide the latency of the FMAs (4 cycles, 2 a cycle).
#if defined(__AVX512F__)
constexpr int W = 16, kRows = 8, kVectors = 2;
#elif defined(__AVX2__)
constexpr int W = 8, kRows = 4, kVectors = 3;
#else
constexpr int W = 4, kRows = 4, kVectors = 2;
#endif

static_assert(W <= kMaxVector && kRows <= kMaxRows && kVectors * W <= kMaxPanel, "see simd.h");

typedef float Vec __attribute__((vector_size(W * 4)));
typedef int32_t VecI __attribute__((vector_size(W * 4)));
typedef uint32_t VecU __attribute__((vector_size(W * 4)));
typedef uint16_t VecH __attribute__((vector_size(W * 2)));

constexpr float kInf = __builtin_inff();

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

// ---- Rows: 16-bit floats by integer arithmetic, exact for subnormals, inf and NaN on every CPU
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

// Calls body(Element<dtype>{}).
template <class Body>
void with_element(DType dtype, Body body) {
    if (dtype == DType::kFloat32) return body(Element<DType::kFloat32>{});
    if (dtype == DType::kFloat16) return body(Element<DType::kFloat16>{});
    return body(Element<DType::kBFloat16>{});
}

void load_rows(DType dtype, const void* src, int64_t src_stride, int64_t rows, int64_t cols,
               const float* row_scale, float* dst, int64_t dst_stride) {
    with_element(dtype, [=](auto element) {
        using Memory = typename decltype(element)::Memory;
        constexpr int64_t kSize = sizeof(Memory) / W;
        for (int64_t i = 0; i < rows; ++i) {
            const float scale = row_scale != nullptr ? row_scale[i] : 1.0f;
            const char* from = static_cast<const char*>(src) + i * src_stride * kSize;
            float* to = dst + i * dst_stride;
            int64_t c = 0;
            for (; c + W <= cols; c += W) {
                store(to + c, element.widen(load<Memory>(from + c * kSize)) * scale);
            }
            if (c < cols) {  // the memory after the row is not ours to read
                Memory rest{};
                std::memcpy(&rest, from + c * kSize, (cols - c) * kSize);
                store(to + c, element.widen(rest) * scale);
            }
        }
    });
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

// By blocks of 4 x 4: two rounds of interleaving pairs of rows.
void transpose(const float* src, int64_t src_stride, int64_t rows, int64_t cols, float* dst,
               int64_t dst_stride) {
    typedef float Vec4 __attribute__((vector_size(16)));
    for (int64_t i = 0; i < rows; i += 4) {
        for (int64_t c = 0; c < cols; c += 4) {
            const float* from = src + i * src_stride + c;
            float* to = dst + c * dst_stride + i;
            if (i + 4 <= rows && c + 4 <= cols) {
                const Vec4 r0 = load<Vec4>(from), r1 = load<Vec4>(from + src_stride);
                const Vec4 r2 = load<Vec4>(from + 2 * src_stride);
                const Vec4 r3 = load<Vec4>(from + 3 * src_stride);
                const Vec4 low01 = __builtin_shufflevector(r0, r1, 0, 4, 1, 5);
                const Vec4 low23 = __builtin_shufflevector(r2, r3, 0, 4, 1, 5);
                const Vec4 high01 = __builtin_shufflevector(r0, r1, 2, 6, 3, 7);
                const Vec4 high23 = __builtin_shufflevector(r2, r3, 2, 6, 3, 7);
                store(to, __builtin_shufflevector(low01, low23, 0, 1, 4, 5));
                store(to + dst_stride, __builtin_shufflevector(low01, low23, 2, 3, 6, 7));
                store(to + 2 * dst_stride, __builtin_shufflevector(high01, high23, 0, 1, 4, 5));
                store(to + 3 * dst_stride, __builtin_shufflevector(high01, high23, 2, 3, 6, 7));
            } else {
                for (int64_t r = 0; r < 4 && i + r < rows; ++r) {
                    for (int64_t k = 0; k < 4 && c + k < cols; ++k) {
                        to[k * dst_stride + r] = from[r * src_stride + k];
                    }
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

// 2^x for x <= 0, within 1 ulp; 0 below 2^-126, NaN for NaN.
Vec exp2_of_nonpositive(Vec x) {
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
    p = p * f + 1.0f;
    return p * scale;
}

void softmax(float* s_panel, int64_t n, int width, const int32_t* visible, float* row_max,
             float* row_sum, float* alpha) {
    for (int lane = 0; lane < width; lane += W) {
        float* s = s_panel + lane;
        if (visible != nullptr) {
            const VecI end = load<VecI>(visible + lane);
            for (int64_t j = 0; j < n; ++j) {
                const Vec s_j = load<Vec>(s + j * width);
                store(s + j * width, end > static_cast<int32_t>(j) ? s_j : splat(-kInf));
            }
        }
        const Vec old_max = load<Vec>(row_max + lane);
        Vec max = old_max;
        for (int64_t j = 0; j < n; ++j) {
            const Vec s_j = load<Vec>(s + j * width);
            max = s_j > max ? s_j : max;
        }
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
                        const float* p_panel, int width, const int32_t* visible, const float* alpha,
                        float* o_panel) {
    for (int lane = 0; lane < width; lane += W) {
        const VecI end = load<VecI>(visible + lane);
        for (int64_t c = 0; c < head_dim_v; ++c) {
            float* o = o_panel + c * width + lane;
            Vec acc = load<Vec>(o) * load<Vec>(alpha + lane);
            for (int64_t j = 0; j < n; ++j) {
                const Vec sum = acc + v[j * ld + c] * load<Vec>(p_panel + j * width + lane);
                acc = end > static_cast<int32_t>(j) ? sum : acc;
            }
            store(o, acc);
        }
    }
}

bool all_finite(const float* src, int64_t ld, int64_t rows, int64_t cols) {
    Vec sum{};  // x * 0 is 0 for finite x and NaN otherwise; rows are padded with zeros
    for (int64_t i = 0; i < rows; ++i) {
        for (int64_t c = 0; c < cols; c += W) sum += load<Vec>(src + i * ld + c) * 0.0f;
    }
    float total = 0;
    for (int lane = 0; lane < W; ++lane) total += sum[lane];
    return total == 0;
}

}  // namespace

const SimdKernels FA101_SIMD_TABLE = {
    W,          W * kVectors,      kRows,         load_rows,
    store_rows, transpose,         scores<kRows>, scores<1>,
    softmax,    accumulate<kRows>, accumulate<1>, accumulate_visible,
    all_finite,
};

}  // namespace fa101
