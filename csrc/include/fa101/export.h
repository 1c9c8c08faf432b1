// What the shared library shows: FA101_EXPORT marks it, everything else is hidden.
#pragma once

#if defined(_WIN32) || !defined(__GNUC__)
#define FA101_EXPORT
#else
#define FA101_EXPORT __attribute__((visibility("default")))
#endif
