# Finds the CUTLASS headers (third_party/cutlass/README.md says where), fetching them if need be.
# Gives cutlass::cutlass, Cutlass_INCLUDE_DIR and Cutlass_VERSION.
set(CUTLASS_DIR "" CACHE PATH "CUTLASS checkout or its include folder; empty: third_party/cutlass")

set(cutlass_home "${PROJECT_SOURCE_DIR}/third_party/cutlass")
set(cutlass_command "python3 -m pip download --no-deps --require-hashes \
-r third_party/cutlass/requirements.txt -d third_party/cutlass")

# Unpacks include/ and the licence of a wheel whose hash is the pinned one.
function(fa101_unpack_cutlass wheel)
    file(READ "${cutlass_home}/requirements.txt" pinned)
    file(SHA256 "${wheel}" hash)
    if(NOT pinned MATCHES "sha256:${hash}")
        message(FATAL_ERROR "${wheel} has SHA-256 ${hash}, which is not the one pinned in "
            "third_party/cutlass/requirements.txt. Remove it, or run\n  ${cutlass_command}")
    endif()
    message(STATUS "fa101: unpacking the CUTLASS headers into third_party/cutlass/include")
    # Moved into place when complete, so that an interrupted or concurrent run leaves nothing half.
    string(RANDOM unique)
    set(scratch "${cutlass_home}/unpack-${unique}")
    file(ARCHIVE_EXTRACT INPUT "${wheel}" DESTINATION "${scratch}"
        PATTERNS "cutlass_library/source/include/*" "*/licenses/LICENSE.txt")
    file(GLOB licence "${scratch}/*/licenses/LICENSE.txt")
    file(COPY ${licence} DESTINATION "${scratch}/cutlass_library/source/include")
    file(RENAME "${scratch}/cutlass_library/source/include" "${cutlass_home}/include" RESULT ignored)
    file(REMOVE_RECURSE "${scratch}")
endfunction()

# Downloads the pinned wheel into `folder` with the first Python that has pip.
function(fa101_download_cutlass folder)
    find_program(python3 NAMES python3 python NO_CACHE)
    foreach(python IN ITEMS "${Python_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/.venv/bin/python"
            "${python3}")
        execute_process(COMMAND "${python}" -m pip --version
            RESULT_VARIABLE status OUTPUT_QUIET ERROR_QUIET)
        if(status EQUAL 0)
            message(STATUS "fa101: fetching the CUTLASS headers (nvidia-cutlass, 6 MB)")
            execute_process(COMMAND "${python}" -m pip download --quiet --no-deps --require-hashes
                    -r "${cutlass_home}/requirements.txt" -d "${folder}"
                ERROR_VARIABLE pip_error)
            set(pip_error "${pip_error}" PARENT_SCOPE)
            return()
        endif()
    endforeach()
    set(pip_error "no Python with pip was found" PARENT_SCOPE)
endfunction()

if(CUTLASS_DIR)
    set(cutlass_candidates "${CUTLASS_DIR}/include" "${CUTLASS_DIR}")
else()
    set(cutlass_candidates "${cutlass_home}/include")
    if(NOT EXISTS "${cutlass_home}/include/cutlass/version.h")
        file(GLOB cutlass_wheel "${cutlass_home}/nvidia_cutlass-*.whl")
        if(NOT cutlass_wheel)
            set(cutlass_download "${PROJECT_BINARY_DIR}/cutlass_download")
            fa101_download_cutlass("${cutlass_download}")
            file(GLOB cutlass_wheel "${cutlass_download}/nvidia_cutlass-*.whl")
        endif()
        if(NOT cutlass_wheel)
            message(FATAL_ERROR "fa101: the CUTLASS headers are missing and could not be fetched "
                "(${pip_error}). Where there is network, run\n  ${cutlass_command}\n"
                "or point to a CUTLASS 4.2 checkout with -DCUTLASS_DIR=<path>, "
                "or build for the CPU only with -DFA101_CUDA=OFF.")
        endif()
        list(GET cutlass_wheel 0 cutlass_wheel)
        fa101_unpack_cutlass("${cutlass_wheel}")
        file(REMOVE_RECURSE "${PROJECT_BINARY_DIR}/cutlass_download")
    endif()
endif()

find_path(Cutlass_INCLUDE_DIR cutlass/version.h PATHS ${cutlass_candidates} NO_DEFAULT_PATH NO_CACHE)
if(Cutlass_INCLUDE_DIR)
    file(STRINGS "${Cutlass_INCLUDE_DIR}/cutlass/version.h" cutlass_lines
        REGEX "#define CUTLASS_(MAJOR|MINOR|PATCH) ")
    string(REGEX MATCHALL "[0-9]+" Cutlass_VERSION "${cutlass_lines}")
    list(JOIN Cutlass_VERSION "." Cutlass_VERSION)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Cutlass
    REQUIRED_VARS Cutlass_INCLUDE_DIR VERSION_VAR Cutlass_VERSION
    REASON_FAILURE_MESSAGE "CUTLASS_DIR is '${CUTLASS_DIR}'")
if(Cutlass_FOUND AND NOT TARGET cutlass::cutlass)
    add_library(cutlass::cutlass INTERFACE IMPORTED)
    target_include_directories(cutlass::cutlass SYSTEM INTERFACE "${Cutlass_INCLUDE_DIR}")
endif()
