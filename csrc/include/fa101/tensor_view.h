// A borrowed view of one array: what every caller (C++, Python through DLPack) hands in.
#pragma once

#include <cstdint>

namespace fa101 {

// kFloat8E4M3 is the OCP's E4M3 (8-bit floating point specification, 2023), which frameworks call
// float8_e4m3fn: 4 bits of exponent, 3 of mantissa, no inf, up to +-448.
enum class DType : uint8_t { kFloat32, kFloat16, kBFloat16, kInt32, kBool, kFloat8E4M3 };

constexpr int64_t size_of(DType dtype) {
    return dtype == DType::kBool || dtype == DType::kFloat8E4M3 ? 1
           : dtype == DType::kFloat32 || dtype == DType::kInt32 ? 4
                                                                : 2;
}

constexpr const char* name_of(DType dtype) {
    switch (dtype) {
        case DType::kFloat32:
            return "float32";
        case DType::kFloat16:
            return "float16";
        case DType::kBFloat16:
            return "bfloat16";
        case DType::kInt32:
            return "int32";
        case DType::kBool:
            return "bool";
        case DType::kFloat8E4M3:
            return "float8_e4m3fn";
    }
    return "unknown";
}

enum class DeviceType : uint8_t { kCpu, kCuda };

struct Device {
    DeviceType type = DeviceType::kCpu;
    int index = 0;

    friend bool operator==(Device a, Device b) { return a.type == b.type && a.index == b.index; }
    friend bool operator!=(Device a, Device b) { return !(a == b); }
};

constexpr int kMaxDims = 4;

// Strides count elements, not bytes. The memory stays the caller's.
struct TensorView {
    void* data = nullptr;
    DType dtype = DType::kFloat32;
    Device device;
    int ndim = 0;
    int64_t shape[kMaxDims] = {};
    int64_t strides[kMaxDims] = {};
    bool read_only = false;
};

}  // namespace fa101
