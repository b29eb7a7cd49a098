# Sorts every source under core/ by its name, so that adding a file is adding a file:
#
#   bindings/*.cc              the Python module
#   test.cc, *_test.cc         a test program each
#   bench.cc, *_bench.cc       a benchmark each
#   *_fuzz.cc                  a libFuzzer target each
#   all others                 the library; *_LEVEL.cc is compiled with the flags of that row of cpu/isa.inc

# Gives the source the flags of the level that its name ends with, if any.
function(encast_set_isa_flags source)
  get_filename_component(stem ${source} NAME_WE)
  foreach(level IN LISTS encast_isa_names)
    if(stem MATCHES "(^|_)${level}$")
      set_property(SOURCE ${source} APPEND PROPERTY COMPILE_OPTIONS ${encast_isa_flags_${level}})
    endif()
  endforeach()
endfunction()

macro(encast_collect_sources)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS core/*.cc)
  set(encast_library_sources "")
  set(encast_binding_sources "")
  set(encast_test_sources "")
  set(encast_bench_sources "")
  set(encast_fuzz_sources "")
  foreach(source IN LISTS sources)
    if(source MATCHES "/core/bindings/")
      list(APPEND encast_binding_sources ${source})
    elseif(source MATCHES "[/_]test\\.cc$")
      list(APPEND encast_test_sources ${source})
    elseif(source MATCHES "[/_]bench\\.cc$")
      list(APPEND encast_bench_sources ${source})
    elseif(source MATCHES "_fuzz\\.cc$")
      list(APPEND encast_fuzz_sources ${source})
    else()
      list(APPEND encast_library_sources ${source})
      encast_set_isa_flags(${source})
    endif()
  endforeach()
endmacro()

# The name of a program: core/kernels/gemm/test.cc is kernels_gemm_test, core/base/xxh64_test.cc base_xxh64_test.
function(encast_program_name source result)
  file(RELATIVE_PATH name ${CMAKE_CURRENT_SOURCE_DIR}/core ${source})
  string(REGEX REPLACE "\\.cc$" "" name ${name})
  string(REPLACE "/" "_" name ${name})
  set(${result} ${name} PARENT_SCOPE)
endfunction()
