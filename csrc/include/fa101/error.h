// Every error fa101 raises. The library never prints, aborts or exits.
// A message names the argument, its value and the rule it breaks.
#pragma once

#include <fa101/export.h>

#include <stdexcept>

namespace fa101 {

// Anything fa101 throws on purpose.
struct FA101_EXPORT Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// An argument breaks a rule that no other kernel or build could relax (Python: ValueError).
struct FA101_EXPORT InvalidArgument : Error {
    using Error::Error;
};

// An argument has a dtype that is not accepted there (Python: TypeError).
struct FA101_EXPORT InvalidType : InvalidArgument {
    using InvalidArgument::InvalidArgument;
};

// The question is well posed but no kernel here answers it (Python: NotImplementedError).
struct FA101_EXPORT Unsupported : Error {
    using Error::Error;
};

// The CUDA runtime refused: no usable GPU, no code for its architecture, a failed launch
// (Python: RuntimeError).
struct FA101_EXPORT CudaError : Error {
    using Error::Error;
};

}  // namespace fa101
