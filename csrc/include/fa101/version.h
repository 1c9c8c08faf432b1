// The one place the version is written: CMake and pyproject.toml read it from here.
#pragma once

#define FA101_VERSION "0.1.0"
