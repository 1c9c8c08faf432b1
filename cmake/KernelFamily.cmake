# A CUDA kernel family: CUDA sources of a library, compiled for the family's own architectures.
#
#   fa101_kernel_family(<name> INTO <library> VIRTUAL <number>... SOURCES <file.cu>...
#       [LIBRARIES <target>...])
#
# VIRTUAL lists the architectures to compile for, ascending; compiling is what takes the time. Each
# entry of FA101_ARCH_LIST is assembled from the newest of them that it can run: VIRTUAL 80 compiles
# once and gives sm_80 and sm_90 code and PTX. Entries older than all of them are left out. A number
# with an a (90a) is for that architecture alone: machine code where an entry asks for it, no PTX.
# Sets <name>_ARCHS to what was built, as the library reports it; empty when nothing was.
function(fa101_kernel_family name)
    cmake_parse_arguments(family "" "INTO" "VIRTUAL;SOURCES;LIBRARIES" ${ARGN})
    if(family_UNPARSED_ARGUMENTS OR NOT family_INTO)
        message(FATAL_ERROR "fa101_kernel_family(${name} ${ARGN}): see cmake/KernelFamily.cmake")
    endif()
    set(archs "")
    set(flags "")
    foreach(entry IN LISTS FA101_ARCH_LIST)
        string(REGEX MATCH "^[0-9]+" number "${entry}")
        if("${number}a" IN_LIST family_VIRTUAL)
            if(NOT entry MATCHES "-virtual$")
                list(APPEND codes_${number}a sm_${number}a)
                list(APPEND archs ${number}a-real)
            endif()
            continue()
        endif()
        set(virtual "")
        foreach(candidate IN LISTS family_VIRTUAL)
            if(candidate MATCHES "^[0-9]+$" AND candidate LESS_EQUAL number)
                set(virtual ${candidate})
            endif()
        endforeach()
        if(NOT virtual)
            continue()
        endif()
        if(NOT entry MATCHES "-virtual$")
            list(APPEND codes_${virtual} sm_${number})
            list(APPEND archs ${number}-real)
        endif()
        if(NOT entry MATCHES "-real$")
            list(APPEND codes_${virtual} compute_${virtual})
            list(APPEND archs ${virtual}-virtual)
        endif()
    endforeach()
    list(REMOVE_DUPLICATES archs)
    set(${name}_ARCHS "${archs}" PARENT_SCOPE)
    if(NOT archs)
        message(STATUS "fa101: no architecture of FA101_ARCHS fits ${name}; it is left out")
        return()
    endif()
    foreach(virtual IN LISTS family_VIRTUAL)
        if(codes_${virtual})
            list(REMOVE_DUPLICATES codes_${virtual})
            list(JOIN codes_${virtual} "," codes)
            list(APPEND flags "--generate-code=arch=compute_${virtual},code=[${codes}]")
        endif()
    endforeach()

    add_library(${name} OBJECT ${family_SOURCES})
    target_include_directories(${name} PRIVATE
        "${PROJECT_SOURCE_DIR}/csrc" "${PROJECT_SOURCE_DIR}/csrc/include"
        "${PROJECT_BINARY_DIR}/generated")
    target_link_libraries(${name} PRIVATE ${family_LIBRARIES})
    target_compile_options(${name} PRIVATE ${flags} -Xptxas=-v,--warn-on-spills)
    set(launcher sh "${PROJECT_SOURCE_DIR}/cmake/nvcc_log.sh" ${CMAKE_CUDA_COMPILER_LAUNCHER})
    set_target_properties(${name} PROPERTIES
        CUDA_ARCHITECTURES OFF
        CUDA_COMPILER_LAUNCHER "${launcher}"
        JOB_POOL_COMPILE fa101_nvcc)
    target_sources(${family_INTO} PRIVATE "$<TARGET_OBJECTS:${name}>")
endfunction()
