# The test `spills`: no kernel spills registers to memory, and no warp-group product is serialised
# (C7510, C7512, C7515, ...). C7517 tells of a wait that ptxas adds: where tiles of sm90 start ahead,
# before the loop. Reads the ptxas logs that nvcc_log.sh keeps beside the objects.
#
#   cmake -D BUILD_DIR=<build tree> -D ALLOWED=<file> -P CheckSpills.cmake
#
# Each line of ALLOWED that is not a comment is a regular expression; it excuses the kernels whose
# "<mangled name> <architecture>" it matches.
cmake_minimum_required(VERSION 3.25)

file(STRINGS "${ALLOWED}" allowed REGEX "^[^#]")
file(GLOB_RECURSE logs "${BUILD_DIR}/*.ptxas")
set(kernels 0)
set(faults "")
foreach(log IN LISTS logs)
    file(STRINGS "${log}" lines REGEX "Compiling entry function|bytes spill stores, |C75[0-9][0-9]")
    foreach(line IN LISTS lines)
        if(line MATCHES "Compiling entry function '(.*)' for '(.*)'")
            set(kernel "${CMAKE_MATCH_1} ${CMAKE_MATCH_2}")
            math(EXPR kernels "${kernels} + 1")
            continue()
        elseif(line MATCHES "C7517.*Li(64|96|128)ELi(64|96|128)E.*two_groupsEiiEELb0ELb0E")
            continue()
        elseif(line MATCHES "C75[0-9][0-9].*function '(.*)'")
            set(kernel "${CMAKE_MATCH_1}")  # these lines come before the one above
        elseif(line MATCHES "ptxas warning" OR line MATCHES " 0 bytes spill stores, 0 bytes spill")
            continue()
        endif()
        set(excused FALSE)
        foreach(pattern IN LISTS allowed)
            if(kernel MATCHES "${pattern}")
                set(excused TRUE)
            endif()
        endforeach()
        if(NOT excused)
            string(STRIP "${line}" line)
            string(APPEND faults "${kernel}\n    ${line}\n")
        endif()
    endforeach()
endforeach()
if(kernels EQUAL 0)
    message(FATAL_ERROR "no ptxas log with a kernel under ${BUILD_DIR}")
endif()
if(faults)
    message(FATAL_ERROR "kernels that spill, or whose wgmma is serialised:\n${faults}")
endif()
message("${kernels} kernels compiled, none spills")
