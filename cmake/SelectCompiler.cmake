# Finds the C++ compiler. project() could do this, but here the error says how to install a compiler if there is none or it is too old.
include(CheckLanguage)
check_language(CXX)
set(te_get_compiler
  "  apt-get install g++\n"
  "  dnf install gcc-c++\n"
  "  conda install -c conda-forge gxx\n"
  "or name it: CXX=<compiler> pip install .")
if(NOT CMAKE_CXX_COMPILER)
  message(FATAL_ERROR "A C++ compiler is missing (CXX is '$ENV{CXX}'). Run one of\n" ${te_get_compiler})
endif()
enable_language(CXX)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 11)
  message(FATAL_ERROR "${CMAKE_CXX_COMPILER} is g++ ${CMAKE_CXX_COMPILER_VERSION}; C++20 needs 11 or newer. Run one of\n" ${te_get_compiler})
endif()
