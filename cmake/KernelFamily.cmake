# A CUDA kernel family: an object library compiled for its own architectures.
#
#   fa101_kernel_family(<name> GENCODE <virtual>:<code>[,<code>...] ... SOURCES <file.cu> ...)
#
# "compute_80:sm_80,sm_90,compute_80" compiles once for compute_80 and assembles machine code for
# sm_80 and sm_90 plus PTX. Sets <name>_ARCHS to the list the library reports at run time.
function(fa101_kernel_family name)
    cmake_parse_arguments(family "" "" "GENCODE;SOURCES" ${ARGN})
    add_library(${name} OBJECT ${family_SOURCES})
    set_target_properties(${name} PROPERTIES CUDA_ARCHITECTURES OFF)
    target_include_directories(${name} PRIVATE
        "${PROJECT_SOURCE_DIR}/csrc" "${PROJECT_SOURCE_DIR}/csrc/include"
        "${PROJECT_BINARY_DIR}/generated")
    set(archs "")
    foreach(group IN LISTS family_GENCODE)
        string(REPLACE ":" ";" parts "${group}")
        list(GET parts 0 virtual)
        list(GET parts 1 codes)
        target_compile_options(${name} PRIVATE
            "$<$<COMPILE_LANGUAGE:CUDA>:--generate-code=arch=${virtual},code=[${codes}]>")
        string(REPLACE "," ";" codes "${codes}")
        foreach(code IN LISTS codes)
            string(REGEX REPLACE "^sm_(.*)$" "\\1-real" code "${code}")
            string(REGEX REPLACE "^compute_(.*)$" "\\1-virtual" code "${code}")
            list(APPEND archs "${code}")
        endforeach()
    endforeach()
    target_compile_options(${name} PRIVATE
        "$<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v,--warn-on-spills>")
    set(${name}_ARCHS "${archs}" PARENT_SCOPE)
endfunction()
