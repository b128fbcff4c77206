# What others need to link the core: the library, the public header, and find_package(pyparallel).
include(CMakePackageConfigHelpers)
install(TARGETS pyparallel EXPORT pyparallel LIBRARY DESTINATION lib COMPONENT python)
install(DIRECTORY include/ DESTINATION include COMPONENT python OPTIONAL FILES_MATCHING PATTERN "*.h")
install(EXPORT pyparallel FILE pyparallelTargets.cmake NAMESPACE pyparallel::
        DESTINATION lib/cmake/pyparallel COMPONENT python)
configure_package_config_file(cmake/pyparallelConfig.cmake.in
                              ${CMAKE_CURRENT_BINARY_DIR}/pyparallelConfig.cmake
                              INSTALL_DESTINATION lib/cmake/pyparallel)
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/pyparallelConfigVersion.cmake
                                 COMPATIBILITY SameMajorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/pyparallelConfig.cmake
              ${CMAKE_CURRENT_BINARY_DIR}/pyparallelConfigVersion.cmake
        DESTINATION lib/cmake/pyparallel COMPONENT python)
