# What others need to link the core: the library, the public header, and find_package(pyparallel).
include(CMakePackageConfigHelpers)
install(TARGETS pyparallel EXPORT pyparallel LIBRARY DESTINATION lib COMPONENT python)
install(DIRECTORY include/ DESTINATION include COMPONENT python FILES_MATCHING PATTERN "*.h")
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

string(TOUPPER "${CMAKE_BUILD_TYPE}" build_type)
# What was built and how: read by `python -m pyparallel doctor`.
if(cuda_reason)
  set(cuda_json "{\"built\": false, \"reason\": \"${cuda_reason}\"}")
else()
  list(JOIN cuda_archs "\", \"" archs)
  set(cuda_json "{\"built\": true, \"nvcc\": \"${CMAKE_CUDA_COMPILER_VERSION}\", \"archs\": [\"${archs}\"]}")
endif()
if(NOT TARGET _torch)
  set(torch_json "{\"built\": false, \"reason\": \"${torch_reason}\"}")
else()
  string(TOLOWER "${torch_with_cuda}" with_cuda)
  string(REPLACE "on" "true" with_cuda "${with_cuda}")
  string(REPLACE "off" "false" with_cuda "${with_cuda}")
  set(torch_json "{\"built\": true, \"version\": \"${torch_version}\", \"cuda\": ${with_cuda}}")
endif()
file(
  WRITE ${CMAKE_CURRENT_BINARY_DIR}/build_info.json
  "{\"version\": \"${PROJECT_VERSION}\",
 \"compiler\": \"${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}\",
 \"build_type\": \"${CMAKE_BUILD_TYPE}\",
 \"flags\": \"${CMAKE_CXX_FLAGS} ${CMAKE_CXX_FLAGS_${build_type}}\",
 \"processor\": \"${CMAKE_SYSTEM_PROCESSOR}\",
 \"cuda\": ${cuda_json},
 \"torch\": ${torch_json}}
")
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/build_info.json DESTINATION lib COMPONENT python)
