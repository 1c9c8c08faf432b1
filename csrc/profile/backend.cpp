#include "profile/backend.h"

#include <cstdio>

namespace fa101::profile {

std::string describe_bytes(double bytes) {
    const char* const units[] = {"bytes", "kB", "MB", "GB", "TB", "PB"};
    size_t unit = 0;
    for (; bytes >= 999.5 && unit + 1 < std::size(units); ++unit) bytes /= 1000;
    char text[32];
    std::snprintf(text, sizeof(text), "%.3g %s", bytes, units[unit]);
    return text;
}

OutOfMemory::OutOfMemory(const std::string& what, double bytes, double free_bytes)
    : std::runtime_error("out of memory: " + what + " asks for " + describe_bytes(bytes) + ", " +
                         describe_bytes(free_bytes) + " is free") {}

void Backend::require_free(double bytes, const std::string& what) const {
    if (bytes > free_bytes()) throw OutOfMemory(what, bytes, free_bytes());
}

Buffer Backend::allocate(int64_t bytes, const std::string& what) {
    const auto release = [this](void* data) { release_raw(data); };
    if (bytes <= 0) return Buffer(nullptr, release);
    require_free(static_cast<double>(bytes), what);
    void* data = allocate_raw(bytes);
    if (data == nullptr) throw OutOfMemory(what, static_cast<double>(bytes), free_bytes());
    return Buffer(data, release);
}

}  // namespace fa101::profile
