# Flags of everything, as the interface library encast_flags.
#
# Answers are the same bits on every machine: no contraction of a * b + c into one rounding unless the source says
# fma, no reassociation. errno of the math functions is never read.

if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  if(CMAKE_CXX_COMPILER_VERSION VERSION_LESS ENCAST_GCC_MINIMUM)
    message(FATAL_ERROR "GCC ${CMAKE_CXX_COMPILER_VERSION} lacks the flags of the newer ISA levels; "
                        "use clang ${ENCAST_CLANG_MINIMUM}, GCC ${ENCAST_GCC_MINIMUM} or newer, "
                        "or `pip install ziglang` and leave CXX unset")
  endif()
  message(WARNING "encast: built with GCC, kernels written with intrinsics may reach less than half of the speed that "
                  "clang gives them (GCC spills the accumulators). Install clang ${ENCAST_CLANG_MINIMUM} or newer, or "
                  "`pip install ziglang` and leave CXX unset.")
elseif(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  if(CMAKE_CXX_COMPILER_VERSION VERSION_LESS ENCAST_CLANG_MINIMUM)
    message(FATAL_ERROR "clang ${CMAKE_CXX_COMPILER_VERSION} is too old; use clang ${ENCAST_CLANG_MINIMUM} or "
                        "newer, or `pip install ziglang` and leave CXX unset")
  endif()
endif()

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
# Link-time optimisation may move code between objects of different ISA levels.
set(CMAKE_INTERPROCEDURAL_OPTIMIZATION OFF)

find_package(Threads REQUIRED)
add_library(encast_flags INTERFACE)
target_compile_options(encast_flags INTERFACE -ffp-contract=off -fno-math-errno -Wall -Wextra -Werror=return-type)
target_link_libraries(encast_flags INTERFACE Threads::Threads)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # False alarms out of GCC's own headers: the undefined operand of its AVX-512 intrinsics, std::string's copies.
  target_compile_options(encast_flags INTERFACE -Wno-uninitialized -Wno-maybe-uninitialized -Wno-restrict)
endif()
if(ENCAST_SANITIZE)
  # -O1 after the build type's level: the unrolled kernels with a check at every access take minutes at -O3.
  # vptr checks need a runtime of their own, which a module loaded by Python does not get.
  target_compile_options(encast_flags INTERFACE -O1 -g1 -fsanitize=${ENCAST_SANITIZE} -fno-sanitize=vptr
                                                -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_compile_definitions(encast_flags INTERFACE ENCAST_SANITIZED)
  target_link_options(encast_flags INTERFACE -fsanitize=${ENCAST_SANITIZE})
endif()
