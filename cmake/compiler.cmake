# Chooses the C++ compiler, unless CMAKE_CXX_COMPILER, a toolchain file or the environment's CXX has:
#   1. clang++ of version 16 or newer from PATH,
#   2. the `ziglang` wheel (a whole clang from the package index) when this build's Python has it,
#   3. whatever CMake finds, with a warning that says what it costs.
# cmake/build_backend.py asks the index for `ziglang` only when rule 1 finds nothing; keep the two in step.

set(ENCAST_CLANG_MINIMUM 16)
set(ENCAST_GCC_MINIMUM 12)

function(encast_find_clang result)
  set(names clang++)
  foreach(version RANGE 30 ${ENCAST_CLANG_MINIMUM} -1)
    list(APPEND names clang++-${version})
  endforeach()
  foreach(name IN LISTS names)
    unset(program)
    find_program(program ${name} NO_CACHE)
    if(NOT program)
      continue()
    endif()
    execute_process(COMMAND ${program} -dumpversion OUTPUT_VARIABLE version OUTPUT_STRIP_TRAILING_WHITESPACE
                    ERROR_QUIET)
    if(version VERSION_GREATER_EQUAL ENCAST_CLANG_MINIMUM)
      set(${result} ${program} PARENT_SCOPE)
      return()
    endif()
  endforeach()
  set(${result} "" PARENT_SCOPE)
endfunction()

# Wrapper scripts around the wheel's `zig`, in the build folder. CMake runs the compiler checks in projects of
# their own, which see nothing of this file but the path of the compiler: so the wrapper carries everything.
function(encast_use_zig)
  # Not find_package(Python): before project() it would cache a wrong suffix of extension modules.
  set(python ${Python_EXECUTABLE})
  if(NOT python)
    find_program(python NAMES python3 python NO_CACHE)
  endif()
  if(NOT python)
    return()
  endif()
  execute_process(
    COMMAND ${python} -c
            "import os, sysconfig, ziglang
print(os.path.join(os.path.dirname(ziglang.__file__), 'zig'), 'musl' in (sysconfig.get_config_var('SOABI') or ''), sep='|', end='')"
    OUTPUT_VARIABLE answer RESULT_VARIABLE status ERROR_QUIET)
  if(NOT status EQUAL 0)
    return()
  endif()
  string(REPLACE "|" ";" answer "${answer}")
  list(GET answer 0 zig)
  list(GET answer 1 musl)
  # glibc 2.28 (manylinux_2_28) is older than every distribution that has Python 3.10 in its packages.
  set(target x86_64-linux-gnu.2.28)
  if(musl STREQUAL "True")
    set(target x86_64-linux-musl)
  endif()
  set(folder ${CMAKE_BINARY_DIR}/zig)
  # zig compiles libc++ once into its cache; by default that would be the user's home. The traps that it adds to
  # unoptimised code are switched off, so that debug builds behave like everyone's.
  set(head "#!/bin/sh
: \"\${ZIG_GLOBAL_CACHE_DIR:=${folder}/cache}\"
: \"\${ZIG_LOCAL_CACHE_DIR:=${folder}/cache}\"
export ZIG_GLOBAL_CACHE_DIR ZIG_LOCAL_CACHE_DIR
")
  file(WRITE ${folder}/c++ "${head}exec '${zig}' c++ -target ${target} -fno-sanitize=undefined \"$@\"\n")
  file(WRITE ${folder}/ar "${head}exec '${zig}' ar \"$@\"\n")
  file(WRITE ${folder}/ranlib "${head}exec '${zig}' ranlib \"$@\"\n")
  file(CHMOD ${folder}/c++ ${folder}/ar ${folder}/ranlib
       PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE)
  set(CMAKE_CXX_COMPILER ${folder}/c++ PARENT_SCOPE)
  set(CMAKE_AR ${folder}/ar CACHE FILEPATH "" FORCE)
  set(CMAKE_RANLIB ${folder}/ranlib CACHE FILEPATH "" FORCE)
endfunction()

if(NOT CMAKE_CXX_COMPILER AND NOT CMAKE_TOOLCHAIN_FILE AND NOT DEFINED ENV{CXX})
  encast_find_clang(clang)
  if(clang)
    set(CMAKE_CXX_COMPILER ${clang})
  else()
    encast_use_zig()
  endif()
endif()
