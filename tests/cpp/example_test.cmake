# Installs the build tree, builds examples/cmake against it and runs it.
#   cmake -D BUILD_DIR=<build tree> -D EXAMPLE=<examples/cmake> -D SCRATCH=<folder> -P example_test.cmake
cmake_minimum_required(VERSION 3.25)

function(run)
    execute_process(COMMAND ${ARGV} COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
endfunction()

file(REMOVE_RECURSE "${SCRATCH}")
run("${CMAKE_COMMAND}" --install "${BUILD_DIR}" --prefix "${SCRATCH}/prefix")
# Moved after it was installed: nothing in it may name the place it was built in.
file(RENAME "${SCRATCH}/prefix" "${SCRATCH}/moved prefix")
run("${CMAKE_COMMAND}" -S "${EXAMPLE}" -B "${SCRATCH}/build"
    "-DCMAKE_PREFIX_PATH=${SCRATCH}/moved prefix" "-DCMAKE_CXX_FLAGS=${CXX_FLAGS}")
run("${CMAKE_COMMAND}" --build "${SCRATCH}/build")
run("${SCRATCH}/build/example")
