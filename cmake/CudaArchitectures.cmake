# Which GPUs the CUDA backend is compiled for.
# Everything that is supported: machine code for each generation, and portable code for what comes: for 10.3 and 11.0 that of 10.0,
# for 12.1 and later that of 12.0.
set(TE_ALL_CUDA_ARCHS 80-real 86-real 89-real 90a-real 100a-real 120a-real 100-virtual 120-virtual)

# te_cuda_archs(<result>): the architectures that TE_CUDA_ARCHS stands for. AUTO: the GPUs that are here, or all where none is.
function(te_cuda_archs result)
  set(archs ${TE_CUDA_ARCHS})
  if(archs STREQUAL "AUTO")
    execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader OUTPUT_VARIABLE here ERROR_QUIET RESULT_VARIABLE failed)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]" here "${here}")
    list(TRANSFORM here REPLACE "\\." "")
    list(TRANSFORM here APPEND "-real")
    list(TRANSFORM here REPLACE "^90-" "90a-")
    list(REMOVE_DUPLICATES here)
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
