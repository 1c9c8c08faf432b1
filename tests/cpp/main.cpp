// The main of every C++ test program.
#define DOCTEST_CONFIG_IMPLEMENT
#include <fa101/device_info.h>

#include <doctest/doctest.h>

#include <cstdio>
#include <cstdlib>
#include <string>

int main(int argc, char** argv) {
    std::string reason;
    if (std::getenv("FA101_TEST_NEEDS_GPU") != nullptr && fa101::cuda_device_count(&reason) == 0) {
        std::printf("skipped: no usable GPU: %s\n", reason.c_str());
        return 77;  // ctest's SKIP_RETURN_CODE
    }
    return doctest::Context(argc, argv).run();
}
