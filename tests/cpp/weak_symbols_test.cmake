# Objects compiled for a SIMD level must define no weak symbol: the linker keeps one copy of an
# inline function, and the copy compiled with AVX-512 would be a crash on an older CPU.
#   cmake -D NM=... -D "OBJECTS=a.o;b.o" -P weak_symbols_test.cmake
if(NOT OBJECTS)
    message(FATAL_ERROR "no objects to check")
endif()
foreach(object IN LISTS OBJECTS)
    execute_process(COMMAND "${NM}" --demangle "${object}"
        OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
    if(NOT symbols MATCHES " [DR] fa101::kSimd")
        message(FATAL_ERROR "${object} does not define its table:\n${symbols}")
    endif()
    if(symbols MATCHES "[^\n]* [VvWwu] [^\n]*")
        message(FATAL_ERROR "${object} defines a weak symbol: ${CMAKE_MATCH_0}")
    endif()
endforeach()
