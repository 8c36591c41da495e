# Finds the headers of CUDA libraries that we open at run time and therefore never link.
#
#   find_package(CudaHeaders COMPONENTS cublas OPTIONAL_COMPONENTS cudnn nccl)
#
# Searched in this order: -DTE_<NAME>_INCLUDE=<folder>, the nvidia-* wheels of the Python in use, the toolkit, the system.
# Gives CudaHeaders::<name> for each component found. CudaHeaders_MISSING, CudaHeaders_WHEELS and CudaHeaders_OPTIONS
# describe the required components that were not found.
set(_cublas_header cublasLt.h)
set(_cublas_wheel nvidia-cublas)
set(_cudnn_header cudnn.h)
set(_cudnn_wheel nvidia-cudnn-cu13)
set(_nccl_header nccl.h)
set(_nccl_wheel nvidia-nccl-cu13)
set(_nvrtc_header nvrtc.h)
set(_nvrtc_wheel nvidia-cuda-nvrtc)
set(_cudnn_frontend_header cudnn_frontend.h)
set(_cudnn_frontend_wheel nvidia-cudnn-frontend)
set(_cudnn_frontend_prefix cudnn) # it has files of other names, too

set(_wheel_includes "")
if(Python_EXECUTABLE)
  # sysconfig as well as sys.path: an isolated pip build hides the packages of the environment it installs into.
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c "
import pathlib, sys, sysconfig
roots = dict.fromkeys([*sys.path, sysconfig.get_path('purelib'), sysconfig.get_path('platlib')])
folders = ('nvidia/*/include', 'include')
print(*(p for r in roots if r for f in folders for p in sorted(pathlib.Path(r).glob(f))), sep=';', end='')"
    OUTPUT_VARIABLE _wheel_includes)
endif()
get_filename_component(_toolkit_bin "${CMAKE_CUDA_COMPILER}" DIRECTORY)

foreach(_name ${CudaHeaders_FIND_COMPONENTS})
  string(TOUPPER "TE_${_name}_INCLUDE" _option)
  find_path(
    ${_option} ${_${_name}_header}
    PATHS ${_wheel_includes} "${_toolkit_bin}/../include" /usr/local/cuda/include /usr/include
          "/usr/include/${CMAKE_LIBRARY_ARCHITECTURE}"
    NO_DEFAULT_PATH
    DOC "Folder of ${_${_name}_header}")
  mark_as_advanced(${_option})
  if(${_option} AND EXISTS "${${_option}}/${_${_name}_header}")
    set(CudaHeaders_${_name}_FOUND TRUE)
    # Only this library's headers become visible: its folder may also hold another version of the CUDA runtime's.
    set(_links "${CMAKE_BINARY_DIR}/cuda_headers/${_name}")
    file(REMOVE_RECURSE "${_links}")
    file(MAKE_DIRECTORY "${_links}")
    if(NOT DEFINED _${_name}_prefix)
      set(_${_name}_prefix ${_name})
    endif()
    file(GLOB _headers "${${_option}}/${_${_name}_prefix}*")
    foreach(_header ${_headers})
      get_filename_component(_file "${_header}" NAME)
      file(CREATE_LINK "${_header}" "${_links}/${_file}" SYMBOLIC)
    endforeach()
    if(NOT TARGET CudaHeaders::${_name})
      add_library(CudaHeaders::${_name} INTERFACE IMPORTED)
      set_target_properties(CudaHeaders::${_name} PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${_links}")
    endif()
  elseif(CudaHeaders_FIND_REQUIRED_${_name})
    list(APPEND CudaHeaders_MISSING ${_${_name}_header})
    list(APPEND CudaHeaders_WHEELS ${_${_name}_wheel})
    list(APPEND CudaHeaders_OPTIONS "-D${_option}")
  endif()
endforeach()
list(JOIN CudaHeaders_MISSING ", " CudaHeaders_MISSING)
list(JOIN CudaHeaders_WHEELS " " CudaHeaders_WHEELS)
list(JOIN CudaHeaders_OPTIONS " " CudaHeaders_OPTIONS)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(CudaHeaders HANDLE_COMPONENTS REQUIRED_VARS CMAKE_CUDA_COMPILER)
