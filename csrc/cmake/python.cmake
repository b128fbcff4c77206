# pyparallel._core: every file of csrc/python, on pybind11.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
execute_process(COMMAND ${Python_EXECUTABLE} -m pybind11 --cmakedir OUTPUT_VARIABLE pybind11_ROOT
                OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE pybind11_status)
if(NOT pybind11_status EQUAL 0)
  message(FATAL_ERROR "pybind11 is not installed for ${Python_EXECUTABLE}; install it with: "
                      "${Python_EXECUTABLE} -m pip install pybind11")
endif()
find_package(pybind11 2.13 REQUIRED CONFIG)

file(GLOB python_sources CONFIGURE_DEPENDS python/*.cpp)
pybind11_add_module(_core MODULE NO_EXTRAS ${python_sources})
target_link_libraries(_core PRIVATE pyparallel Threads::Threads)
set_target_properties(_core PROPERTIES INSTALL_RPATH "$ORIGIN/lib")
install(TARGETS _core DESTINATION . COMPONENT python)
