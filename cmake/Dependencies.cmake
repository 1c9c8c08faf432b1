# The header libraries of the profiler and the tests (never of the library): CLI11::CLI11,
# nlohmann_json::nlohmann_json and doctest::doctest. Each comes from the first of
#   1. what is installed (find_package);
#   2. Debian's or Ubuntu's package, unpacked into third_party/debian: needs no root;
#   3. its release archive, pinned by hash.
set(fa101_debian "${PROJECT_SOURCE_DIR}/third_party/debian")

# Downloads and unpacks a Debian package. Quiet: where it fails the next source is tried.
function(fa101_unpack_debian package)
    find_program(apt_get apt-get NO_CACHE)
    find_program(dpkg dpkg NO_CACHE)
    if(NOT apt_get OR NOT dpkg)
        return()
    endif()
    message(STATUS "fa101: unpacking Debian's ${package} into third_party/debian")
    file(MAKE_DIRECTORY "${fa101_debian}/lists/partial")
    # The machine's package lists, then, where it has none yet (and for other users than root),
    # lists of our own.
    set(own_lists -o "Dir::State::Lists=${fa101_debian}/lists" -o Debug::NoLocking=1
        -o "Dir::Cache=${fa101_debian}")
    set(download "${apt_get}" -q -o APT::Sandbox::User=root)
    execute_process(COMMAND ${download} download ${package}
        WORKING_DIRECTORY "${fa101_debian}"
        RESULT_VARIABLE status OUTPUT_QUIET ERROR_QUIET)
    if(NOT status EQUAL 0)
        execute_process(COMMAND ${download} ${own_lists} update OUTPUT_QUIET ERROR_QUIET)
        execute_process(COMMAND ${download} ${own_lists} download ${package}
            WORKING_DIRECTORY "${fa101_debian}" OUTPUT_QUIET ERROR_QUIET)
    endif()
    file(GLOB archives "${fa101_debian}/${package}_*.deb")
    foreach(archive IN LISTS archives)
        execute_process(COMMAND "${dpkg}" -x "${archive}" "${fa101_debian}")
        file(REMOVE "${archive}")
    endforeach()
endfunction()

# fa101_header_library(<package> <target> <header> <debian package> <url> <sha256>)
function(fa101_header_library package target header debian url sha256)
    if(NOT TARGET ${target})
        find_package(${package} CONFIG QUIET GLOBAL)
    endif()
    if(TARGET ${target})
        return()
    endif()
    set(folder "${fa101_debian}/usr/include")
    if(NOT EXISTS "${folder}/${header}")
        fa101_unpack_debian(${debian})
    endif()
    if(NOT EXISTS "${folder}/${header}")
        include(FetchContent)
        string(TOLOWER "${package}_headers" name)
        # SOURCE_SUBDIR names no project: the headers alone are wanted, not the build.
        FetchContent_Declare(${name} URL ${url} URL_HASH SHA256=${sha256}
            SOURCE_SUBDIR include DOWNLOAD_EXTRACT_TIMESTAMP OFF)
        FetchContent_MakeAvailable(${name})
        foreach(part include . doctest)
            if(EXISTS "${${name}_SOURCE_DIR}/${part}/${header}")
                set(folder "${${name}_SOURCE_DIR}/${part}")
            endif()
        endforeach()
    endif()
    if(NOT EXISTS "${folder}/${header}")
        message(FATAL_ERROR "fa101: ${header} was not found and could not be fetched. "
            "Install it (Debian, Ubuntu: apt-get install ${debian}), or leave out what needs it: "
            "-DFA101_BUILD_PROFILER=OFF -DBUILD_TESTING=OFF.")
    endif()
    add_library(${target} INTERFACE IMPORTED GLOBAL)
    target_include_directories(${target} SYSTEM INTERFACE "${folder}")
endfunction()

if(FA101_BUILD_PROFILER)
    fa101_header_library(CLI11 CLI11::CLI11 CLI/CLI.hpp libcli11-dev
        https://github.com/CLIUtils/CLI11/archive/v2.3.2.tar.gz
        aac0ab42108131ac5d3344a9db0fdf25c4db652296641955720a4fbe52334e22)
    fa101_header_library(nlohmann_json nlohmann_json::nlohmann_json nlohmann/json.hpp
        nlohmann-json3-dev
        https://github.com/nlohmann/json/releases/download/v3.11.3/json.tar.xz
        d6c65aca6b1ed68e7a182f4757257b107ae403032760ed6ef121c9d55e81757d)
endif()
if(testing)
    fa101_header_library(doctest doctest::doctest doctest/doctest.h doctest-dev
        https://github.com/doctest/doctest/archive/v2.4.9.tar.gz
        19b2df757f2f3703a5e63cee553d85596875f06d91a3333acd80a969ef210856)
endif()
