# Reads core/cpu/isa.inc, the one table of ISA levels: the names in encast_isa_names and the flags of level X in
# encast_isa_flags_X.

set(encast_isa_table ${CMAKE_CURRENT_SOURCE_DIR}/core/cpu/isa.inc)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${encast_isa_table})
file(STRINGS ${encast_isa_table} rows REGEX "^ENCAST_ISA\\(")
set(encast_isa_names "")
foreach(row IN LISTS rows)
  if(NOT row MATCHES "^ENCAST_ISA\\(([a-z0-9_]+), \"[^\"]*\", \"([^\"]*)\"\\)")
    message(FATAL_ERROR "core/cpu/isa.inc: cannot read the row: ${row}")
  endif()
  list(APPEND encast_isa_names ${CMAKE_MATCH_1})
  separate_arguments(flags UNIX_COMMAND "${CMAKE_MATCH_2}")
  set(encast_isa_flags_${CMAKE_MATCH_1} ${flags})
endforeach()
if(NOT encast_isa_names)
  message(FATAL_ERROR "core/cpu/isa.inc has no rows")
endif()
