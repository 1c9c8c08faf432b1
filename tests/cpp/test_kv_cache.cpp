// The KV cache on the host: pages against the same keys in one piece, append() in every form, and
// the words of every refusal.
#include <fa101/device_info.h>
#include <fa101/error.h>
#include <fa101/kv_cache.h>
#include <fa101/params.h>
#include <fa101/plan.h>

#include "testing/host_tensor.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

using namespace fa101;
using fa101::testing::HostTensor;

namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

// int32 values with a shape.
struct Ints {
    std::vector<int32_t> values;
    std::vector<int64_t> shape;

    explicit Ints(std::vector<int32_t> v) : values(std::move(v)) {
        shape = {static_cast<int64_t>(values.size())};
    }
    Ints(std::vector<int32_t> v, int64_t rows) : Ints(std::move(v)) {
        shape = {rows, rows > 0 ? shape[0] / rows : 0};
    }

    TensorView view() {
        TensorView t;
        t.data = values.data();
        t.dtype = DType::kInt32;
        t.ndim = static_cast<int>(shape.size());
        for (int i = t.ndim - 1, stride = 1; i >= 0; --i) {
            t.shape[i] = shape[i], t.strides[i] = stride;
            stride *= static_cast<int>(shape[i]);
        }
        return t;
    }
};

// The pages of a batch, in an order without pattern; every second page of the cache is nobody's.
Ints shuffled_pages(int64_t batch, int64_t max_pages) {
    std::vector<int32_t> pages;
    for (int64_t i = 0; i < batch * max_pages; ++i) pages.push_back(static_cast<int32_t>(2 * i));
    for (size_t i = pages.size(); i > 1; --i) std::swap(pages[i - 1], pages[(i * 7 + 3) % i]);
    return Ints(pages, batch);
}

// A cache in one piece, (batch, heads, capacity, head_dim) whatever the layout, and its pages.
struct Caches {
    HostTensor whole, paged;
};

std::vector<int64_t> in_layout(Layout layout, std::vector<int64_t> bhsd) {
    if (layout == Layout::kBSHD) std::swap(bhsd[1], bhsd[2]);
    return bhsd;
}

Caches caches(DType dtype, Layout layout, int64_t batch, int64_t heads, int64_t page_size,
              int64_t head_dim, const Ints& table, uint64_t seed) {
    const int64_t max_pages = table.shape[1];
    Caches c{
        HostTensor(dtype, in_layout(layout, {batch, heads, max_pages * page_size, head_dim})),
        HostTensor(dtype, in_layout(layout, {2 * batch * max_pages, heads, page_size, head_dim}))};
    c.whole.fill_normal(seed);
    for (int64_t b = 0; b < batch; ++b) {
        for (int64_t j = 0; j < max_pages * page_size; ++j) {
            const int64_t page = table.values[b * max_pages + j / page_size];
            for (int64_t h = 0; h < heads; ++h) {
                for (int64_t d = 0; d < head_dim; ++d) {
                    c.paged.set(in_layout(layout, {page, h, j % page_size, d}),
                                c.whole.at(in_layout(layout, {b, h, j, d})));
                }
            }
        }
    }
    return c;
}

std::vector<std::byte> attend(const char* kernel, HostTensor& q, HostTensor& k, HostTensor& v,
                              const Options& options, HostTensor o, HostTensor lse) {
    const TensorView lse_view = lse.view();
    const Params params = make_params(q.view(), k.view(), v.view(), o.view(), &lse_view, options);
    DeviceInfo device = device_info({});
    device.num_threads = 2;
    const Plan plan = fa101::plan(params.problem, device, kernel);
    std::vector<std::byte> workspace(plan.workspace_bytes + 64, std::byte{0xff});
    void* aligned = workspace.data();
    size_t space = workspace.size();
    std::align(64, plan.workspace_bytes, aligned, space);
    run(plan, params.problem, params.tensors, aligned, nullptr);
    CHECK(o.padding_is_intact());
    std::vector<std::byte> bytes(o.storage(), o.storage() + o.storage_bytes());
    bytes.insert(bytes.end(), lse.storage(), lse.storage() + lse.storage_bytes());
    return bytes;
}

std::vector<std::byte> bytes_of(HostTensor& t) {
    return {t.storage(), t.storage() + t.storage_bytes()};
}

// New keys and values for caches of one piece or of pages.
struct Append {
    HostTensor k, v, k_cache, v_cache;
    Ints lengths;
    std::optional<Ints> table = {};
    Layout layout = Layout::kBSHD;
    std::optional<HostTensor> cos = {}, sin = {}, q = {}, q_rotated = {};
    std::optional<HostTensor> k_descale = {}, v_descale = {};
    bool interleaved = false, queries_advance = true;

    AppendParams make() {
        AppendOptions options;
        options.layout = layout;
        options.interleaved = interleaved;
        options.queries_advance = queries_advance;
        views_ = {lengths.view()};
        views_.reserve(10);
        const auto give = [&](auto& tensor) -> const TensorView* {
            if (!tensor) return nullptr;
            views_.push_back(tensor->view());
            return &views_.back();
        };
        options.seqlens_k = &views_[0];
        options.page_table = give(table);
        options.cos = give(cos), options.sin = give(sin);
        options.q = give(q), options.q_rotated = give(q_rotated);
        options.k_descale = give(k_descale), options.v_descale = give(v_descale);
        return make_append_params(k.view(), v.view(), k_cache.view(), v_cache.view(), options);
    }
    void run() { append(make()); }

    std::vector<TensorView> views_ = {};
};

// Two entries of 40 keys' room, 3 new keys, 2 heads; head_dim 24 and 8.
Append usual(DType dtype = DType::kFloat32, std::vector<int32_t> lengths = {5, 0}) {
    Append a{HostTensor(dtype, {2, 3, 2, 24}), HostTensor(dtype, {2, 3, 2, 8}),
             HostTensor(dtype, {2, 40, 2, 24}), HostTensor(dtype, {2, 40, 2, 8}),
             Ints(std::move(lengths))};
    a.k.fill_normal(1), a.v.fill_normal(2), a.k_cache.fill_normal(3), a.v_cache.fill_normal(4);
    return a;
}

template <class Exception>
std::string message(Append a) {
    try {
        a.make();
    } catch (const Exception& error) {
        return error.what();
    }
    return "no error";
}

}  // namespace

TEST_CASE("pages in any order are the cache in one piece, bit for bit") {
    const int64_t batch = 5, heads = 4, heads_kv = 2, head_dim = 24, head_dim_v = 40;
    for (DType dtype_kv :
         {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3}) {
        const DType dtype = dtype_kv == DType::kFloat8E4M3 ? DType::kFloat16 : dtype_kv;
        for (Layout layout : {Layout::kBHSD, Layout::kBSHD}) {
            for (int64_t page_size : {16, 64, 256}) {
                const Ints table = shuffled_pages(batch, 512 / page_size);
                Caches k = caches(dtype_kv, layout, batch, heads_kv, page_size, head_dim, table, 1);
                Caches v =
                    caches(dtype_kv, layout, batch, heads_kv, page_size, head_dim_v, table, 2);
                for (int64_t seqlen_q : {1, 19}) {
                    HostTensor q(dtype, in_layout(layout, {batch, heads, seqlen_q, head_dim}));
                    q.fill_normal(3);
                    const HostTensor o(dtype,
                                       in_layout(layout, {batch, heads, seqlen_q, head_dim_v}));
                    const HostTensor lse(DType::kFloat32, {batch, heads, seqlen_q});
                    Ints lengths({0, 1, 130, 512, 1000});
                    Ints pages = table;
                    const TensorView lengths_view = lengths.view(), table_view = pages.view();
                    for (const char* kernel : {"cpu_naive", "cpu_fa1", "cpu_fa2"}) {
                        for (std::optional<int64_t> left : {std::optional<int64_t>(), {33}}) {
                            CAPTURE(kernel);
                            CAPTURE(page_size);
                            Options options;
                            options.layout = layout;
                            options.seqlens_k = &lengths_view;
                            options.causal = true, options.align = Align::kBottomRight;
                            options.window_left = left;
                            const auto expected =
                                attend(kernel, q, k.whole, v.whole, options, o, lse);
                            options.page_table = &table_view;
                            CHECK(attend(kernel, q, k.paged, v.paged, options, o, lse) == expected);
                            // What the table says of keys that do not exist is never asked.
                            Ints nonsense = pages;
                            for (int64_t i = 1; i < nonsense.shape[1]; ++i) nonsense.values[i] = -7;
                            const TensorView nonsense_view = nonsense.view();
                            options.page_table = &nonsense_view;
                            CHECK(attend(kernel, q, k.paged, v.paged, options, o, lse) == expected);
                        }
                    }
                }
            }
        }
    }
}

TEST_CASE("append writes rows behind those that are there, and nothing else") {
    for (DType dtype : kDTypes) {
        for (const auto& [first, second] : {std::pair{5, 0}, {37, 36}, {0, 1}}) {
            Append a = usual(dtype, {first, second});
            HostTensor k_expected = a.k_cache, v_expected = a.v_cache;
            for (int64_t b = 0; b < 2; ++b) {
                for (int64_t i = 0; i < 3; ++i) {
                    for (int64_t h = 0; h < 2; ++h) {
                        const int64_t key = (b == 0 ? first : second) + i;
                        for (int64_t d = 0; d < 24; ++d) {
                            k_expected.set({b, key, h, d}, a.k.at({b, i, h, d}));
                        }
                        for (int64_t d = 0; d < 8; ++d) {
                            v_expected.set({b, key, h, d}, a.v.at({b, i, h, d}));
                        }
                    }
                }
            }
            a.run();
            CHECK(bytes_of(a.k_cache) == bytes_of(k_expected));
            CHECK(bytes_of(a.v_cache) == bytes_of(v_expected));
        }
    }
}

TEST_CASE("rows without room are dropped; lengths count as the nearest possible") {  // FA-030
    Append a = usual(DType::kFloat32, {39, 1000}), whole = usual(DType::kFloat32, {-4, 40});
    HostTensor before = a.k_cache;
    a.run();
    for (int64_t d = 0; d < 24; ++d) {
        CHECK(a.k_cache.at({0, 39, 1, d}) == a.k.at({0, 0, 1, d}));
        before.set({0, 39, 0, d}, a.k.at({0, 0, 0, d}));
        before.set({0, 39, 1, d}, a.k.at({0, 0, 1, d}));
    }
    CHECK(bytes_of(a.k_cache) == bytes_of(before));
    whole.run();
    CHECK(whole.k_cache.at({0, 0, 0, 0}) == whole.k.at({0, 0, 0, 0}));
    CHECK(whole.k_cache.padding_is_intact());
    CHECK(whole.v_cache.padding_is_intact());
}

TEST_CASE("append into pages, across their borders; pages that are none are left alone") {
    Append a = usual(DType::kFloat16, {15, 30});
    a.k_cache = HostTensor(DType::kFloat16, {5, 16, 2, 24});
    a.v_cache = HostTensor(DType::kFloat16, {5, 16, 2, 8});
    a.k_cache.fill([](int64_t) { return 0; });
    a.v_cache.fill([](int64_t) { return 0; });
    a.table = Ints({3, 1, 4, 0, 2, -1}, 2);
    a.run();
    HostTensor expected(DType::kFloat16, {5, 16, 2, 24});
    expected.fill([](int64_t) { return 0; });
    const int64_t places[2][3][2] = {{{3, 15}, {1, 0}, {1, 1}}, {{2, 14}, {2, 15}, {-1, 0}}};
    for (int64_t b = 0; b < 2; ++b) {
        for (int64_t i = 0; i < 3; ++i) {
            const auto [page, row] = places[b][i];
            for (int64_t h = 0; h < 2 && page >= 0; ++h) {
                for (int64_t d = 0; d < 24; ++d) {
                    expected.set({page, row, h, d}, a.k.at({b, i, h, d}));
                }
            }
        }
    }
    CHECK(bytes_of(a.k_cache) == bytes_of(expected));
    a.table = Ints({5, 1000, -2147483647, 7, 5, 6}, 2);
    const auto before = bytes_of(a.v_cache);
    a.run();
    CHECK(bytes_of(a.k_cache) == bytes_of(expected));
    CHECK(bytes_of(a.v_cache) == before);
}

TEST_CASE("rotary turns pairs of columns by the angles of the row's position") {
    for (DType dtype : kDTypes) {
        for (bool interleaved : {false, true}) {
            for (bool advance : {false, true}) {
                for (int64_t half : {12, 5}) {  // all of head_dim, a part of it
                    Append a = usual(dtype, {5, 37});
                    a.interleaved = interleaved, a.queries_advance = advance;
                    a.cos.emplace(DType::kFloat32, std::vector<int64_t>{40, half});
                    a.sin.emplace(DType::kFloat32, std::vector<int64_t>{40, half});
                    const auto angle = [&](int64_t position, int64_t i) {
                        return static_cast<double>(position) / std::pow(100.0, i / 12.0);
                    };
                    a.cos->fill([&](int64_t i) { return std::cos(angle(i / half, i % half)); });
                    a.sin->fill([&](int64_t i) { return std::sin(angle(i / half, i % half)); });
                    a.q.emplace(dtype, std::vector<int64_t>{2, 4, 6, 24});
                    a.q->fill_normal(9);
                    a.q_rotated.emplace(dtype, std::vector<int64_t>{2, 4, 6, 24});
                    a.run();
                    const auto expected = [&](const HostTensor& x, std::vector<int64_t> index,
                                              int64_t position) {
                        const int64_t d = index[3];
                        if (d >= 2 * half) return static_cast<double>(x.at(index));
                        const int64_t pair = interleaved ? d / 2 : d % half;
                        const bool second = interleaved ? d % 2 == 1 : d >= half;
                        index[3] = interleaved ? 2 * pair : pair;
                        const double first_x = x.at(index);
                        index[3] += interleaved ? 1 : half;
                        const double second_x = x.at(index);
                        const double t = angle(position, pair);
                        return second ? first_x * std::sin(t) + second_x * std::cos(t)
                                      : first_x * std::cos(t) - second_x * std::sin(t);
                    };
                    const double bound = 8 * testing::roundoff_of(dtype) + 1e-5;
                    double worst = 0;
                    for (int64_t b = 0; b < 2; ++b) {
                        const int64_t length = b == 0 ? 5 : 37;
                        for (int64_t d = 0; d < 24; ++d) {
                            for (int64_t i = 0; i < 3; ++i) {
                                const double got = a.k_cache.at({b, length + i, 1, d});
                                worst = std::max(worst, std::fabs(got - expected(a.k, {b, i, 1, d},
                                                                                 length + i)));
                            }
                            for (int64_t i = 0; i < 4; ++i) {  // the last of b = 1 stays at 39
                                const double got = a.q_rotated->at({b, i, 5, d});
                                const int64_t position =
                                    std::min<int64_t>(length + (advance ? i : 0), 39);
                                worst = std::max(
                                    worst, std::fabs(got - expected(*a.q, {b, i, 5, d}, position)));
                            }
                        }
                        CHECK(a.v_cache.at({b, length, 1, 3}) == a.v.at({b, 0, 1, 3}));
                    }
                    CHECK(worst <= bound);
                    CHECK(a.q_rotated->padding_is_intact());
                    CHECK(a.k_cache.padding_is_intact());
                }
            }
        }
    }
}

TEST_CASE("into a cache in fp8: divided by the descale of the head, rounded once") {
    for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
        for (bool rotates : {false, true}) {
            Append a = usual(dtype, {5, 37});
            a.k_cache = HostTensor(DType::kFloat8E4M3, {2, 40, 2, 24});
            a.v_cache = HostTensor(DType::kFloat8E4M3, {2, 40, 2, 8});
            a.k_cache.fill([](int64_t) { return 1; }), a.v_cache.fill([](int64_t) { return 1; });
            a.k_descale.emplace(DType::kFloat32, std::vector<int64_t>{2, 2});
            a.k_descale->fill([](int64_t i) { return 0.01f + static_cast<float>(i) / 7; });
            a.v_descale.emplace(DType::kFloat32, std::vector<int64_t>{2});
            a.v_descale->fill([](int64_t i) { return i == 0 ? 1e-3f : 0.37f; });  // 1e-3 saturates
            a.v.set({0, 0, 0, 0}, -2.5f);
            a.v.set({1, 2, 0, 5}, std::numeric_limits<float>::infinity());
            a.v.set({1, 1, 1, 2}, std::numeric_limits<float>::quiet_NaN());
            if (rotates) {  // by a quarter turn: (x, y) becomes (-y, x), exactly
                a.cos.emplace(DType::kFloat32, std::vector<int64_t>{40, 3});
                a.sin.emplace(DType::kFloat32, std::vector<int64_t>{40, 3});
                a.cos->fill([](int64_t) { return 0; }), a.sin->fill([](int64_t) { return 1; });
            }
            HostTensor k_expected = a.k_cache, v_expected = a.v_cache;
            for (int64_t b = 0; b < 2; ++b) {
                for (int64_t i = 0; i < 3; ++i) {
                    for (int64_t h = 0; h < 2; ++h) {
                        const int64_t key = (b == 0 ? 5 : 37) + i;
                        for (int64_t d = 0; d < 24; ++d) {
                            float x = a.k.at({b, i, h, d});
                            if (rotates && d < 3) x = -a.k.at({b, i, h, d + 3});
                            if (rotates && 3 <= d && d < 6) x = a.k.at({b, i, h, d - 3});
                            k_expected.set({b, key, h, d}, x / a.k_descale->at({b, h}));
                        }
                        for (int64_t d = 0; d < 8; ++d) {
                            v_expected.set({b, key, h, d},
                                           a.v.at({b, i, h, d}) / a.v_descale->at({h}));
                        }
                    }
                }
            }
            a.run();
            CHECK(bytes_of(a.k_cache) == bytes_of(k_expected));
            CHECK(bytes_of(a.v_cache) == bytes_of(v_expected));
            CHECK(a.v_cache.at({1, 39, 0, 5}) == 448);
            CHECK(std::isnan(a.v_cache.at({1, 38, 1, 2})));
            CHECK(a.v_cache.at({0, 5, 0, 0}) == -448);
        }
    }
}

TEST_CASE("empty appends do nothing") {
    Append a = usual();
    const auto before = bytes_of(a.k_cache);
    a.k = HostTensor(DType::kFloat32, {2, 0, 2, 24}),
    a.v = HostTensor(DType::kFloat32, {2, 0, 2, 8});
    a.run();
    CHECK(bytes_of(a.k_cache) == before);
    Append none{HostTensor(DType::kFloat32, {0, 3, 2, 24}),
                HostTensor(DType::kFloat32, {0, 3, 2, 8}),
                HostTensor(DType::kFloat32, {0, 40, 2, 24}),
                HostTensor(DType::kFloat32, {0, 40, 2, 8}), Ints(std::vector<int32_t>{})};
    none.run();
}

TEST_CASE("explain() says whether new keys take a launch of their own") {
    // Three sequences with room for 640 keys, as they would run on an H200.
    struct Asked {
        DType dtype = DType::kFloat16;
        int64_t seqlen_q = 2, num_new = 4;
        bool rotates = false, in_another_cache = false;
        DeviceType device = DeviceType::kCuda;
    };
    const auto explained = [](const Asked& asked) {
        const auto dense = [&](int64_t heads, int64_t seqlen) {
            return HostTensor(asked.dtype, {3, heads, seqlen, 64});
        };
        HostTensor q = dense(4, asked.seqlen_q), o = q, k = dense(2, asked.num_new), v = k;
        HostTensor k_cache = dense(2, 640), v_cache = k_cache, another = k_cache;
        HostTensor cos(DType::kFloat32, {640, 16}), sin = cos;
        Ints lengths({0, 510, 600});
        const auto view_of = [&](auto& tensor) {
            TensorView view = tensor.view();
            view.device = {asked.device, 0};
            return view;
        };
        const TensorView lengths_view = view_of(lengths), cos_view = view_of(cos);
        const TensorView sin_view = view_of(sin), k_cache_view = view_of(k_cache);
        AppendOptions append_options;
        append_options.seqlens_k = &lengths_view;
        if (asked.rotates) append_options.cos = &cos_view, append_options.sin = &sin_view;
        const AppendParams new_keys = make_append_params(view_of(k), view_of(v), k_cache_view,
                                                         view_of(v_cache), append_options);
        Options options;
        options.seqlens_k = &lengths_view;
        options.seqlen_new = asked.num_new;
        const Params params =
            make_params(view_of(q), asked.in_another_cache ? view_of(another) : k_cache_view,
                        view_of(v_cache), view_of(o), nullptr, options);
        DeviceInfo device;
        device.type = asked.device;
        device.arch = 90, device.num_sms = 132, device.smem_per_block = 227 * 1024;
        const Plan chosen = plan(params.problem, device);
        return explain(new_keys, chosen, params.problem, params.tensors, device);
    };
    const auto says = [&](const Asked& asked, const std::string& words) {
        return explained(asked).find(words) != std::string::npos;
    };
    const std::string in_one = "\nappend     in the attention's own launch\nwhy  ";
    const std::string alone = "\nappend     a launch of its own, before\nwhy  ";
    CHECK(says({}, in_one));
    CHECK(says({DType::kBFloat16, 8, 1}, in_one));
    CHECK(says({DType::kFloat16, 9}, alone));  // 18 rows of a key/value head
    CHECK(says({DType::kFloat16, 2, 5}, alone));
    CHECK(says({DType::kFloat32}, alone));
    CHECK(says({DType::kFloat16, 2, 4, /*rotates=*/true}, alone));
    CHECK(says({DType::kFloat16, 2, 4, false, /*in_another_cache=*/true}, alone));
    CHECK(says({DType::kFloat16, 2, 4, false, false, DeviceType::kCpu},
               "\nappend     before the attention\nwhy  "));
    CHECK_FALSE(says({DType::kFloat16, 2, 0}, "append"));
}

TEST_CASE("what append refuses, it names") {
    const auto with = [](auto change) {
        Append a = usual();
        change(a);
        return a;
    };
    const DType f32 = DType::kFloat32;
    CHECK(message<InvalidArgument>(with([&](Append& a) {
              a.k = HostTensor(f32, {2, 41, 2, 24}), a.v = HostTensor(f32, {2, 41, 2, 8});
          })) == "k has 41 new keys; k_cache has room for 40 of each batch entry");
    CHECK(message<InvalidArgument>(with([&](Append& a) {
              a.k = HostTensor(f32, {3, 3, 2, 24});
          })) == "k has batch 3 but k_cache has 2; they must be equal");
    CHECK(message<InvalidArgument>(with([&](Append& a) {
              a.k = HostTensor(f32, {2, 3, 1, 24});
          })) == "k has heads 1 but k_cache has 2; they must be equal");
    CHECK(message<InvalidArgument>(with([&](Append& a) {
              a.v = HostTensor(f32, {2, 3, 2, 24});
          })) == "v has head_dim 24 but v_cache has 8; they must be equal");
    CHECK(message<InvalidArgument>(with([&](Append& a) { a.v = HostTensor(f32, {2, 2, 2, 8}); })) ==
          "v has seqlen 2 but k has 3; they must be equal");
    CHECK(message<InvalidType>(with([&](Append& a) {
              a.v = HostTensor(DType::kFloat16, {2, 3, 2, 8});
          })) == "v has dtype float16 but k_cache has dtype float32; they must be equal");
    CHECK(message<InvalidArgument>(with([&](Append& a) { a.lengths = Ints({1, 2, 3}); })) ==
          "seqlens_k has shape (3,); it must have one entry for each batch entry: (2,)");
    CHECK(message<InvalidArgument>(with([&](Append& a) { a.table = Ints({1, 2, 3, 4}); })) ==
          "page_table has shape (4,); it must have a row of pages for each batch entry: (2, "
          "max_pages)");
    CHECK(message<InvalidArgument>(with([&](Append& a) { a.table = Ints({1, 2, 3, 4}, 2); })) ==
          "k_cache has pages of 40 keys; the page size must be a power of two from 16 on");
    CHECK(message<InvalidArgument>(with([&](Append& a) {
              a.cos.emplace(f32, std::vector<int64_t>{40, 12});
          })) == "cos and sin must both be there or both be absent");
    CHECK(message<InvalidArgument>(with([&](Append& a) {
              a.cos.emplace(f32, std::vector<int64_t>{39, 12});
              a.sin.emplace(f32, std::vector<int64_t>{39, 12});
          })) ==
          "cos has shape (39, 12); it must be (positions, rotary_dim / 2) with a "
          "position for each of the 40 keys that k_cache has room for and rotary_dim at "
          "most the head_dim, 24");
    CHECK(message<InvalidArgument>(with([&](Append& a) {
              a.cos.emplace(f32, std::vector<int64_t>{40, 12});
              a.sin.emplace(f32, std::vector<int64_t>{41, 12});
          })).find("sin has shape (41, 12)") == 0);
    CHECK(message<InvalidArgument>(with([&](Append& a) {
              a.cos.emplace(f32, std::vector<int64_t>{40, 13});
              a.sin.emplace(f32, std::vector<int64_t>{40, 13});
          })).find("cos has shape (40, 13)") == 0);
    CHECK(message<InvalidType>(with([&](Append& a) {
              a.cos.emplace(DType::kFloat16, std::vector<int64_t>{40, 12});
              a.sin.emplace(DType::kFloat16, std::vector<int64_t>{40, 12});
          })).find("cos has dtype float16; it must be float32") == 0);

    const auto fp8 = [&](DType dtype, auto change) {
        return with([&](Append& a) {
            a = usual(dtype);
            a.k_cache = HostTensor(DType::kFloat8E4M3, {2, 40, 2, 24});
            a.v_cache = HostTensor(DType::kFloat8E4M3, {2, 40, 2, 8});
            change(a);
        });
    };
    CHECK(
        message<InvalidType>(fp8(f32, [](Append&) {})) ==
        "k has dtype float32 and k_cache float8_e4m3fn; with that it must be float16 or bfloat16");
    CHECK(message<InvalidType>(fp8(DType::kFloat16, [](Append& a) {
              a.v = HostTensor(DType::kBFloat16, {2, 3, 2, 8});
          })) == "v has dtype bfloat16 but k has dtype float16; they must be equal");
    CHECK(
        message<InvalidType>(fp8(DType::kFloat16, [](Append& a) {
            a.v_cache = HostTensor(DType::kFloat16, {2, 40, 2, 8});
        })) == "v_cache has dtype float16 but k_cache has dtype float8_e4m3fn; they must be equal");
    CHECK(
        message<InvalidArgument>(fp8(DType::kFloat16, [](Append& a) {
            a.k_descale.emplace(DType::kFloat32, std::vector<int64_t>{3});
        })).find("k_descale has shape (3,); it must have one entry for each head of k_cache") == 0);
    CHECK(message<InvalidArgument>(with(
              [](Append& a) { a.v_descale.emplace(DType::kFloat32, std::vector<int64_t>{2}); })) ==
          "v_descale is given but v_cache has dtype float32; only float8_e4m3fn has a descale");

    Append a = usual();
    const TensorView lengths = a.lengths.view();
    AppendOptions options;
    options.layout = Layout::kBSHD;
    const auto refusal = [&](const TensorView& k, const TensorView& k_cache,
                             const TensorView& v_cache) -> std::string {
        try {
            make_append_params(k, a.v.view(), k_cache, v_cache, options);
        } catch (const InvalidArgument& error) {
            return error.what();
        }
        return "no error";
    };
    CHECK(refusal(a.k.view(), a.k_cache.view(), a.v_cache.view()) ==
          "seqlens_k is absent; with new keys it must say where they go");
    options.seqlens_k = &lengths;
    TensorView read_only = a.k_cache.view(), expanded = read_only, part = read_only;
    read_only.read_only = true;
    CHECK(refusal(a.k.view(), read_only, a.v_cache.view()) ==
          "k_cache is read-only; this call would write into it");
    expanded.strides[0] = 0;
    CHECK(refusal(a.k.view(), expanded, a.v_cache.view()).find("k_cache has shape") == 0);
    part.shape[1] = 3;
    CHECK(refusal(part, a.k_cache.view(), a.v_cache.view()) ==
          "k_cache overlaps k in memory; it is written while the other is read");
    const TensorView v = a.v.view();
    for (const auto& [output, name] :
         {std::pair{&AppendOptions::out, "out"}, {&AppendOptions::lse, "lse"}}) {
        options.*output = &v;
        CHECK(refusal(a.k.view(), a.k_cache.view(), a.v_cache.view()) ==
              std::string(name) + " overlaps v in memory; an output must be no input of the call");
        options.*output = nullptr;
    }
    TensorView q = a.k_cache.view();  // its first row
    q.shape[1] = 1;
    options.q = &q;
    CHECK(refusal(a.k.view(), a.k_cache.view(), a.v_cache.view()) ==
          "k_cache overlaps q in memory; it is written while the other is read");
    q.ndim = 6;  // for make_params to refuse
    TensorView out = v;
    out.ndim = 9;
    options.out = &out;
    CHECK(refusal(a.k.view(), a.k_cache.view(), a.v_cache.view()) == "no error");
    options.q = options.out = nullptr;
    TensorView same = a.k_cache.view();
    same.shape[3] = 8;
    CHECK(refusal(a.k.view(), a.k_cache.view(), same) ==
          "v_cache overlaps k_cache in memory; both are written");
}

TEST_CASE("pages that make_params refuses") {
    const DType f32 = DType::kFloat32;
    HostTensor q(f32, {2, 1, 4, 8}), o(f32, {2, 1, 4, 8}), pages(f32, {6, 16, 2, 8});
    const auto refusal = [&](Ints table, HostTensor& cache, int64_t stride = 1) -> std::string {
        TensorView view = table.view();
        view.strides[1] = stride;
        Options options;
        options.layout = Layout::kBSHD;
        options.page_table = &view;
        options.k_name = "k_cache", options.v_name = "v_cache";
        try {
            make_params(q.view(), cache.view(), cache.view(), o.view(), nullptr, options);
        } catch (const Error& error) {
            return error.what();
        }
        return "no error";
    };
    CHECK(refusal(Ints({0, 1, 2, 3}, 2), pages) == "no error");
    CHECK(refusal(Ints({0, 1, 2}, 3), pages) ==
          "page_table has shape (3, 1); it must have a row of pages for each batch entry: (2, "
          "max_pages)");
    CHECK(refusal(Ints({0, 1, 2, 3}, 2), pages, 2) ==
          "page_table has strides (2, 2); its last axis must be contiguous, stride 1");
    for (int64_t size : {1, 8, 24, 17}) {
        HostTensor odd(f32, {6, size, 2, 8});
        CHECK(refusal(Ints({0, 1, 2, 3}, 2), odd) ==
              "k_cache has pages of " + std::to_string(size) +
                  " keys; the page size must be a power of two from 16 on");
    }
    HostTensor none(f32, {0, 16, 2, 8});
    CHECK(refusal(Ints({0, 1, 2, 3}, 2), none) ==
          "page_table has shape (2, 2) but k_cache has no page");
    Ints empty({}, 2);
    empty.shape = {2, 0};
    CHECK(refusal(empty, none) == "no error");
}
