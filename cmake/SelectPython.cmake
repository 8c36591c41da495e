# Finds the Python for which the extension modules are built: Python_EXECUTABLE if it is set, else that of .venv, else that on the PATH.
if(NOT Python_EXECUTABLE AND NOT SKBUILD AND EXISTS "${PROJECT_SOURCE_DIR}/.venv/bin/python")
  set(Python_EXECUTABLE "${PROJECT_SOURCE_DIR}/.venv/bin/python")
endif()

if(TE_PYTHON)
  find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -m pybind11 --cmakedir
    OUTPUT_VARIABLE pybind11_cmake_dir
    OUTPUT_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE pybind11_missing
    ERROR_QUIET)
  if(pybind11_missing)
    message(FATAL_ERROR "pybind11 is not installed for ${Python_EXECUTABLE}. Run:\n"
                        "  ${Python_EXECUTABLE} -m pip install 'pybind11>=3.0'")
  endif()
  set(PYBIND11_FINDPYTHON ON)
  find_package(pybind11 3.0 CONFIG REQUIRED PATHS "${pybind11_cmake_dir}" NO_DEFAULT_PATH)
elseif(NOT TE_CUDA STREQUAL "OFF")
  find_package(Python 3.10 REQUIRED COMPONENTS Interpreter) # only to look for CUDA headers
endif()
