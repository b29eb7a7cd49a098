# The module encast._core. From Python 3.12 on one build serves all later versions (the stable ABI).

if(NOT SKBUILD_SABI_COMPONENT)
  set(SKBUILD_SABI_COMPONENT "")
endif()
find_package(Python 3.10 COMPONENTS Interpreter Development.Module ${SKBUILD_SABI_COMPONENT})
if(NOT Python_FOUND)
  message(FATAL_ERROR "Python's headers (Python.h, 3.10 or newer) were not found; install your system's package "
                      "of them (Debian and Ubuntu: python3-dev), or set -DENCAST_PYTHON=OFF for the native tests only")
endif()
if(NOT nanobind_ROOT AND NOT nanobind_DIR)
  execute_process(COMMAND ${Python_EXECUTABLE} -m nanobind --cmake_dir OUTPUT_VARIABLE nanobind_ROOT
                  OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
find_package(nanobind CONFIG REQUIRED)

nanobind_add_module(_core NB_STATIC STABLE_ABI ${encast_binding_sources})
target_link_libraries(_core PRIVATE encast_core)
if(NOT ENCAST_SANITIZE)
  # The C++ runtime travels inside the module (zig links its own anyway), so that the wheel needs nothing but
  # glibc; its symbols stay inside, so that another extension's runtime cannot meet them.
  target_link_options(_core PRIVATE -static-libstdc++ -static-libgcc -Wl,--exclude-libs,ALL)
endif()
install(TARGETS _core LIBRARY DESTINATION encast)
