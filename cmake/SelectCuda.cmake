# Decides whether the CUDA backend is built. Sets TE_CUDA_FOUND.
set(TE_CUDA_FOUND OFF)

# te_no_cuda(<reason>...): fails where CUDA was demanded, else announces the CPU build.
function(te_no_cuda)
  string(JOIN "\n  " reason ${ARGV})
  if(TE_CUDA STREQUAL "ON")
    message(FATAL_ERROR "TE_CUDA=ON, but ${reason}")
  endif()
  message(NOTICE "-- CUDA backend: off; building the CPU backend alone, because ${reason}")
endfunction()

if(NOT TE_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "TE_CUDA must be AUTO, ON or OFF, got '${TE_CUDA}'")
elseif(TE_CUDA STREQUAL "OFF")
  message(STATUS "CUDA backend: off (TE_CUDA=OFF)")
  return()
endif()

find_program(TE_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
if(NOT CMAKE_CUDA_COMPILER AND TE_NVCC AND NOT DEFINED ENV{CUDACXX})
  set(CMAKE_CUDA_COMPILER "${TE_NVCC}")
endif()
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES "${TE_CUDA_ARCHS}")
endif()
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  te_no_cuda("no working nvcc was found (set CUDACXX, or put nvcc on PATH)")
  return()
endif()

find_package(CudaHeaders COMPONENTS cublas OPTIONAL_COMPONENTS cudnn nccl nvrtc cudnn_frontend QUIET)
if(NOT CudaHeaders_FOUND)
  te_no_cuda("nvcc (${CMAKE_CUDA_COMPILER}) is here, but these headers are not: ${CudaHeaders_MISSING}."
             "Install the wheels that hold them, then configure again:"
             "  ${Python_EXECUTABLE} -m pip install ${CudaHeaders_WHEELS}"
             "or name the folders with ${CudaHeaders_OPTIONS}.")
  return()
endif()

enable_language(CUDA)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20) # CMake 3.25 knows nvcc's dialects only up to C++17
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
find_package(CUDAToolkit REQUIRED)
set(TE_CUDA_FOUND ON)
message(STATUS "CUDA backend: on (nvcc ${CMAKE_CUDA_COMPILER_VERSION}, ${CMAKE_CUDA_ARCHITECTURES})")
