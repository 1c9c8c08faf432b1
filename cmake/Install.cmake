# `cmake --install`: headers, library and package config; and the same config for the build tree.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(config_dir "${CMAKE_INSTALL_LIBDIR}/cmake/fa101")
set_target_properties(fa101 PROPERTIES
    VERSION ${PROJECT_VERSION}
    SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})

# A static library leaves these to who links it; a shared one has what it needs inside.
set(FA101_NEEDS_CUDA_TOOLKIT 0)
set(FA101_NEEDS_THREADS 0)
if(NOT BUILD_SHARED_LIBS)
    set(FA101_NEEDS_CUDA_TOOLKIT ${FA101_HAS_CUDA})
    set(FA101_NEEDS_THREADS 1)
endif()

install(TARGETS fa101 EXPORT fa101Targets COMPONENT fa101)
install(DIRECTORY csrc/include/fa101 TYPE INCLUDE COMPONENT fa101)
install(FILES LICENSE NOTICE.md TYPE DOC COMPONENT fa101)
if(TARGET profile-attention)
    set_target_properties(profile-attention PROPERTIES
        INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")
    install(TARGETS profile-attention COMPONENT fa101)
endif()
install(EXPORT fa101Targets NAMESPACE fa101:: DESTINATION "${config_dir}" COMPONENT fa101)
export(EXPORT fa101Targets NAMESPACE fa101::)

configure_package_config_file(cmake/fa101Config.cmake.in fa101Config.cmake
    INSTALL_DESTINATION "${config_dir}"
    NO_SET_AND_CHECK_MACRO NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file(fa101ConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES
    "${PROJECT_BINARY_DIR}/fa101Config.cmake" "${PROJECT_BINARY_DIR}/fa101ConfigVersion.cmake"
    DESTINATION "${config_dir}" COMPONENT fa101)
