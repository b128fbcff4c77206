# pyparallel._torch: every file of csrc/torch, compiled against the installed torch with the copy of
# pybind11 that torch brings, so that both speak of the same types and exceptions.
# torch's own CMake package is not used: for a CUDA build of torch it insists on a whole CUDA toolkit.
file(GLOB torch_sources CONFIGURE_DEPENDS torch/*.cpp)
if(NOT torch_sources)
  set(torch_reason "this source tree has none")
  return()
elseif(NOT PYPARALLEL_TORCH)
  set(torch_reason "PYPARALLEL_TORCH=0")
  message(STATUS "torch.distributed backend: left out, ${torch_reason}")
  return()
endif()

execute_process(
  COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/cmake/find_torch.py
  OUTPUT_VARIABLE torch_found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_VARIABLE torch_missing
  RESULT_VARIABLE torch_status)
if(NOT torch_status EQUAL 0)
  if(PYPARALLEL_TORCH STREQUAL "auto")
    set(torch_reason "${torch_missing}")
    message(STATUS "torch.distributed backend: left out, ${torch_reason}")
    return()
  endif()
  message(FATAL_ERROR "the torch.distributed backend was asked for (PYPARALLEL_TORCH=1), but "
                      "${torch_missing}")
endif()
list(GET torch_found 0 torch_root)
list(GET torch_found 1 torch_version)
list(GET torch_found 2 torch_cuda)
message(STATUS "torch.distributed backend: torch ${torch_version} (CUDA: ${torch_cuda}) in ${torch_root}")

# The CUDA half needs a CUDA build of torch and the toolkit's headers.
if(torch_cuda STREQUAL "none" OR NOT CUDAToolkit_INCLUDE_DIRS)
  list(FILTER torch_sources EXCLUDE REGEX "/torch/cuda_[^/]*\\.cpp$")
  set(torch_with_cuda OFF)
else()
  set(torch_with_cuda ON)
endif()

set_source_files_properties(torch/few_rows_avx512.cpp PROPERTIES
  COMPILE_OPTIONS "$<$<BOOL:${simd_x86}>:-mavx512f;-mavx512bw;-mavx512bf16>;-Wno-uninitialized;-Wno-maybe-uninitialized")
# attention_*.cpp are one template, per instruction set; their buffers hold floats or pairs of bfloat16.
set_source_files_properties(torch/attention_avx2.cpp PROPERTIES
  COMPILE_OPTIONS "$<$<BOOL:${simd_x86}>:-mavx2;-mfma;-mf16c>;-fno-strict-aliasing;-Wno-psabi")
set_source_files_properties(torch/attention_avx512.cpp PROPERTIES
  COMPILE_OPTIONS "$<$<BOOL:${simd_x86}>:-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mprefer-vector-width=512>;-fno-strict-aliasing;-Wno-psabi;-Wno-uninitialized;-Wno-maybe-uninitialized")
set_source_files_properties(torch/attention_avx512_bf16.cpp PROPERTIES
  COMPILE_OPTIONS "$<$<BOOL:${simd_x86}>:-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mavx512bf16;-mprefer-vector-width=512>;-fno-strict-aliasing;-Wno-psabi;-Wno-uninitialized;-Wno-maybe-uninitialized")
set_source_files_properties(torch/attention_portable.cpp PROPERTIES COMPILE_OPTIONS "-fno-strict-aliasing;-Wno-psabi")
# at::parallel_for is compiled into its caller, and is a plain loop without OpenMP. The runtime is the
# one that torch has mapped: linking another would start threads of its own.
find_package(OpenMP COMPONENTS CXX)
if(OpenMP_CXX_FOUND)
  set_source_files_properties(torch/attention.cpp PROPERTIES COMPILE_OPTIONS "${OpenMP_CXX_FLAGS}")
else()
  message(WARNING "no OpenMP in this compiler: attention on the CPU will run on one thread")
endif()
Python_add_library(_torch MODULE WITH_SOABI ${torch_sources} python/errors.cpp)
target_compile_features(_torch PRIVATE cxx_std_20)
target_include_directories(_torch SYSTEM PRIVATE ${torch_root}/include
                           ${torch_root}/include/torch/csrc/api/include)
target_compile_definitions(_torch PRIVATE TORCH_EXTENSION_NAME=_torch TORCH_API_INCLUDE_EXTENSION_H
                           USE_C10D_GLOO)
target_compile_options(_torch PRIVATE -fvisibility=hidden)
# torch's headers are most of a build's time: several files share one reading of them. Not through a
# compiler cache, which wants small pieces. The kernels stay apart: each has its own flags.
if(NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set_target_properties(_torch PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 8)
  file(GLOB torch_apart CONFIGURE_DEPENDS torch/attention*.cpp torch/few_rows*.cpp)
  set_source_files_properties(${torch_apart} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
endif()
set(torch_libraries c10 torch_cpu torch torch_python)
if(torch_with_cuda)
  target_include_directories(_torch SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
  target_compile_definitions(_torch PRIVATE PYPARALLEL_TORCH_CUDA=1)
  list(APPEND torch_libraries c10_cuda torch_cuda)
endif()
foreach(library ${torch_libraries})
  target_link_libraries(_torch PRIVATE ${torch_root}/lib/lib${library}.so)
endforeach()
target_link_libraries(_torch PRIVATE pyparallel Threads::Threads)
# torch is imported, and so mapped, before this module: no path to it is recorded.
set_target_properties(_torch PROPERTIES INSTALL_RPATH "$ORIGIN/lib" SKIP_BUILD_RPATH OFF)
install(TARGETS _torch DESTINATION . COMPONENT python)
