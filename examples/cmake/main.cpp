// Attention of two queries over three keys, on the CPU.
#include <fa101/attention.h>

#include <cstdio>
#include <vector>

// A (batch 1, heads 1, rows, head_dim 2) tensor over contiguous data.
fa101::TensorView view(std::vector<float>& data) {
    const auto rows = static_cast<int64_t>(data.size()) / 2;
    fa101::TensorView t;
    t.data = data.data();
    t.ndim = 4;
    t.shape[0] = 1, t.shape[1] = 1, t.shape[2] = rows, t.shape[3] = 2;
    t.strides[0] = 2 * rows, t.strides[1] = 2 * rows, t.strides[2] = 2, t.strides[3] = 1;
    return t;
}

int main() {
    std::vector<float> q = {1, 0, 0, 1};
    std::vector<float> k = {1, 0, 0, 1, 1, 1};
    std::vector<float> v = {1, 2, 3, 4, 5, 6};
    std::vector<float> o(4);

    fa101::Options options;
    options.softmax_scale = 0.0f;  // equal weights: every row of o is the mean of v's rows
    fa101::attention(view(q), view(k), view(v), view(o), nullptr, options);

    std::printf("fa101 %s: o = (%.4f, %.4f)\n", FA101_VERSION, o[0], o[1]);
    return o[0] == 3 && o[1] == 4 ? 0 : 1;
}
