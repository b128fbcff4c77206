# libpyparallel_cuda.so: every .cu file of csrc/cuda, for several architectures, with the CUDA run time
# linked in. The core opens it when it needs it, so that everything starts on a machine without a driver.
file(GLOB cuda_sources CONFIGURE_DEPENDS cuda/*.cu)
find_package(CUDAToolkit QUIET)  # its headers serve the CUDA half of the torch backend as well
if(NOT cuda_sources OR NOT PYPARALLEL_CUDA)
  set(cuda_reason "PYPARALLEL_CUDA=0")
  message(STATUS "CUDA kernels: left out")
  return()
endif()

include(CheckLanguage)
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(nvcc nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH /usr/local/cuda PATH_SUFFIXES bin)
  if(nvcc)
    set(CMAKE_CUDA_COMPILER ${nvcc})
  endif()
endif()
# check_language compiles for the compiler's default architecture; ours are set on the target.
set(CMAKE_CUDA_ARCHITECTURES OFF)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(PYPARALLEL_CUDA STREQUAL "auto")
    set(cuda_reason "no working nvcc was found")
    message(STATUS "CUDA kernels: left out, ${cuda_reason}")
    return()
  endif()
  message(FATAL_ERROR "CUDA kernels were asked for (PYPARALLEL_CUDA=1), but no working nvcc was found on PATH, "
                      "in CUDACXX, CUDA_HOME or /usr/local/cuda. Install the CUDA toolkit, name its nvcc in "
                      "CUDACXX, or leave the kernels out with PYPARALLEL_CUDA=0.")
endif()
enable_language(CUDA)

if(DEFINED ENV{PYPARALLEL_CUDA_ARCHS})
  string(REPLACE " " ";" cuda_archs "$ENV{PYPARALLEL_CUDA_ARCHS}")
  string(REPLACE "," ";" cuda_archs "${cuda_archs}")
else()
  # An older toolkit builds those it knows; the build's summary and doctor name them.
  execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --list-gpu-code OUTPUT_VARIABLE known_archs)
  set(cuda_archs)
  foreach(arch 80 90a 100a)
    string(REPLACE "a" "" number ${arch})
    if(known_archs MATCHES "sm_${number}[\r\n]")
      list(APPEND cuda_archs ${arch})
    endif()
  endforeach()
endif()
set(gencode)
foreach(arch ${cuda_archs})
  if(NOT arch MATCHES "^[0-9]+[af]?$")
    message(FATAL_ERROR "PYPARALLEL_CUDA_ARCHS: \"${arch}\" is not an architecture; expected numbers as in "
                        "\"80;90a;100a\"")
  endif()
  list(APPEND gencode -gencode=arch=compute_${arch},code=sm_${arch})
endforeach()
message(STATUS "CUDA kernels: nvcc ${CMAKE_CUDA_COMPILER_VERSION} for ${cuda_archs}")

add_library(pyparallel_cuda SHARED ${cuda_sources})
target_compile_features(pyparallel_cuda PRIVATE cuda_std_17)
target_include_directories(pyparallel_cuda PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
target_compile_options(pyparallel_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:${gencode}>)
set_target_properties(pyparallel_cuda PROPERTIES CUDA_RUNTIME_LIBRARY Static CUDA_ARCHITECTURES OFF
                      INSTALL_RPATH "$ORIGIN")
install(TARGETS pyparallel_cuda LIBRARY DESTINATION lib COMPONENT python)
