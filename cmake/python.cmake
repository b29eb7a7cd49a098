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
  # The C++ runtime travels inside the module, so that the wheel needs nothing but glibc, and nothing but the
  # module's entry is exported, so that another extension's runtime cannot meet it.
  include(CheckLinkerFlag)
  foreach(flag -static-libstdc++ -static-libgcc -Wl,--gc-sections
               -Wl,--version-script=${CMAKE_CURRENT_SOURCE_DIR}/cmake/exports.map)
    get_filename_component(word ${flag} NAME)
    string(MAKE_C_IDENTIFIER "encast_linker_has_${word}" known)
    check_linker_flag(CXX ${flag} ${known})
    if(${known})
      target_link_options(_core PRIVATE ${flag})
    endif()
  endforeach()
endif()
install(TARGETS _core LIBRARY DESTINATION encast)
