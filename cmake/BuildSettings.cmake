# Sets the language standard, the compiler cache and the sanitizers. Defines te_compile_options(), which is called for every target,
# and te_compile_together(), which shortens the compilation of many small files.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Debug, Release or RelWithDebInfo" FORCE)
endif()

find_program(TE_CCACHE ccache)
if(TE_CCACHE)
  # Paths are hashed relative to the checkout, so that all checkouts on a machine share their results.
  set(te_ccache "${CMAKE_COMMAND}" -E env "CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}" CCACHE_NOHASHDIR=1 "${TE_CCACHE}")
  foreach(language CXX CUDA)
    if(NOT DEFINED CMAKE_${language}_COMPILER_LAUNCHER)
      set(CMAKE_${language}_COMPILER_LAUNCHER "${te_ccache}")
    endif()
  endforeach()
endif()

if(TE_SANITIZE)
  # The check `vptr` would need the RTTI of pybind11's types, whose visibility is hidden.
  add_compile_options(
    "$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${TE_SANITIZE};-fno-sanitize=vptr;-fno-sanitize-recover=all;-fno-omit-frame-pointer>")
  add_link_options("-fsanitize=${TE_SANITIZE}")
endif()

function(te_compile_options target)
  # Products and sums are not contracted to FMA: the CPU code defines the results, which must not depend on the host's instructions.
  set(cxx -Wall -Wextra -ffp-contract=off)
  # GPU code is most of the module, so it is compressed. The driver decompresses it once, when a kernel is first needed.
  set(cuda -Xfatbin=-compress-all --expt-relaxed-constexpr --extended-lambda -Xcompiler=-Wall,-Wextra)
  if(TE_SANITIZE)
    list(APPEND cxx -Wno-maybe-uninitialized) # instrumented code confuses GCC's analysis of std::variant and std::optional
  endif()
  if(TE_WERROR)
    list(APPEND cxx -Werror)
    list(APPEND cuda -Werror all-warnings -Xcompiler=-Werror)
  endif()
  if(TE_LINE_INFO)
    list(APPEND cuda -lineinfo)
  endif()
  if(TE_PTXAS_REPORT)
    list(APPEND cuda -Xptxas=-v)
  endif()
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:${cxx}>" "$<$<COMPILE_LANGUAGE:CUDA>:${cuda}>")
endfunction()

# Compiles a dozen files of a target as one translation unit. This is for files whose headers take most of the compiler's time: a dozen
# of bindings takes as long as four that are compiled one by one. Names in anonymous namespaces must be unique among these files.
function(te_compile_together target)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 13)
endfunction()
