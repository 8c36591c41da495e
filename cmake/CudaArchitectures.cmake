# Says for which GPUs the CUDA backend is compiled.
# This list has all supported GPUs: machine code for each generation, and PTX for later ones, which the driver compiles: GPUs of 10.3
# and 11.0 use the PTX of 10.0, GPUs of 12.1 and later that of 12.0.
set(TE_ALL_CUDA_ARCHS 80-real 86-real 89-real 90a-real 100a-real 120a-real 100-virtual 120-virtual)

# te_cuda_archs(<result>): returns the architectures that TE_CUDA_ARCHS selects. AUTO selects the GPUs of this machine, or all
# supported architectures if it has no supported GPU.
function(te_cuda_archs result)
  set(archs ${TE_CUDA_ARCHS})
  if(archs STREQUAL "AUTO")
    execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader OUTPUT_VARIABLE here ERROR_QUIET RESULT_VARIABLE failed)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]" here "${here}")
    list(TRANSFORM here REPLACE "\\." "")
    list(TRANSFORM here APPEND "-real")
    list(TRANSFORM here REPLACE "^90-" "90a-")
    list(REMOVE_DUPLICATES here)
    set(supported ${here})
    list(FILTER supported EXCLUDE REGEX "^[1-7][0-9]-")
    if(NOT "${here}" STREQUAL "${supported}")
      message(STATUS "GPUs older than Ampere are not supported, and are left out")
    endif()
    set(here ${supported})
    set(archs ${here})
    if(failed OR NOT here)
      set(archs ALL)
    endif()
  endif()
  if(archs STREQUAL "ALL")
    set(archs ${TE_ALL_CUDA_ARCHS})
  endif()
  set(${result} ${archs} PARENT_SCOPE)
endfunction()
