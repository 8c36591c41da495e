# Finds yaml-cpp, which parses the configurations of nvdlfw_inspect. Defines the target te_yaml_cpp and te_install_yaml_cpp().
# For machines on which packages cannot be installed, tools/fetch_yaml_cpp.sh unpacks yaml-cpp into build/yaml-cpp.
find_package(yaml-cpp 0.6 QUIET CONFIG HINTS "${PROJECT_SOURCE_DIR}/build/yaml-cpp/usr")
if(NOT yaml-cpp_FOUND)
  message(FATAL_ERROR
    "yaml-cpp is missing; nvdlfw_inspect reads its configurations with it. Run one of\n"
    "  apt-get install libyaml-cpp-dev\n"
    "  dnf install yaml-cpp-devel\n"
    "  conda install -c conda-forge yaml-cpp\n"
    "or name its prefix: CMAKE_ARGS=-Dyaml-cpp_ROOT=<folder> pip install .")
endif()
if(TARGET yaml-cpp::yaml-cpp)
  set(te_yaml_cpp_target yaml-cpp::yaml-cpp) # 0.8 and later
else()
  set(te_yaml_cpp_target yaml-cpp)
endif()
# Before 0.8, the target of yaml-cpp does not say where the headers are.
find_path(TE_YAML_CPP_INCLUDE yaml-cpp/eventhandler.h HINTS "${yaml-cpp_DIR}/../../../../include" "${yaml-cpp_DIR}/../../../include"
          "${YAML_CPP_INCLUDE_DIR}")
add_library(te_yaml_cpp INTERFACE)
target_link_libraries(te_yaml_cpp INTERFACE ${te_yaml_cpp_target})
target_include_directories(te_yaml_cpp SYSTEM INTERFACE "${TE_YAML_CPP_INCLUDE}")
message(STATUS "yaml-cpp: ${yaml-cpp_VERSION} (${yaml-cpp_DIR})")

# te_install_yaml_cpp(<module> <package>): installs the shared library of yaml-cpp beside the module, which looks for it there first,
# so that a wheel works on machines without yaml-cpp. An in-place build uses the library with which it was linked.
function(te_install_yaml_cpp module package)
  get_target_property(kind ${te_yaml_cpp_target} TYPE)
  if(NOT kind STREQUAL "STATIC_LIBRARY")
    set_target_properties(${module} PROPERTIES INSTALL_RPATH "$ORIGIN")
    install(FILES "$<TARGET_FILE:${te_yaml_cpp_target}>" DESTINATION ${package} RENAME "$<TARGET_SONAME_FILE_NAME:${te_yaml_cpp_target}>")
  endif()
endfunction()
