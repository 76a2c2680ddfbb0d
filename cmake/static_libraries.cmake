# What ISOBIT_STATIC_SOURCES asks for: programs that need glibc alone, and what no archive exists of (NVIDIA's libraries).
# Not for shared libraries: Debian compiles archives for programs. Included after all packages are found. It replaces each shared library by the archive beside it, compiles
# the two libraries that Debian has no archive of, and changes no compile command, so that ccache's objects serve.

# The archive beside each imported shared library.
get_property(imported DIRECTORY PROPERTY IMPORTED_TARGETS)
foreach(target IN LISTS imported)
  get_target_property(type ${target} TYPE)
  if(NOT type MATCHES "^(SHARED|UNKNOWN)_LIBRARY$")
    continue()
  endif()
  get_target_property(configurations ${target} IMPORTED_CONFIGURATIONS)
  set(properties IMPORTED_LOCATION)
  foreach(configuration IN LISTS configurations)
    list(APPEND properties IMPORTED_LOCATION_${configuration})
  endforeach()
  foreach(property IN LISTS properties)
    get_target_property(shared ${target} ${property})
    if(shared MATCHES "^(.*)\\.so[.0-9]*$")
      set(archive ${CMAKE_MATCH_1}.a)
      if(EXISTS ${archive})
        set_property(TARGET ${target} PROPERTY ${property} ${archive})
      endif()
    endif()
  endforeach()
endforeach()
# gRPC's config finds this one by pkg-config, as a bare option of the linker.
get_target_property(re2_options re2::re2 INTERFACE_LINK_LIBRARIES)
list(TRANSFORM re2_options REPLACE "^-lre2$" "libre2.a")
set_property(TARGET re2::re2 PROPERTY INTERFACE_LINK_LIBRARIES ${re2_options})

file(GLOB prometheus_sources CONFIGURE_DEPENDS
     ${ISOBIT_STATIC_SOURCES}/prometheus-cpp/core/src/*.cc ${ISOBIT_STATIC_SOURCES}/prometheus-cpp/core/src/detail/*.cc)
set(httplib_folder ${CMAKE_BINARY_DIR}/cpp-httplib)
if(NOT prometheus_sources OR NOT EXISTS ${ISOBIT_STATIC_SOURCES}/cpp-httplib/split.py)
  message(FATAL_ERROR "expected prometheus-cpp/ and cpp-httplib/ in ISOBIT_STATIC_SOURCES, which is "
                      "${ISOBIT_STATIC_SOURCES}: `deploy/static_sources.sh ${ISOBIT_STATIC_SOURCES}` fetches them")
endif()
find_package(Python3 REQUIRED COMPONENTS Interpreter)
execute_process(COMMAND ${Python3_EXECUTABLE} ${ISOBIT_STATIC_SOURCES}/cpp-httplib/split.py --out ${httplib_folder}
                COMMAND_ERROR_IS_FATAL ANY OUTPUT_QUIET)

# As Debian compiles them (debian/rules), with the headers that it installs.
add_library(static_prometheus STATIC ${prometheus_sources})
target_compile_definitions(static_prometheus PRIVATE NDEBUG)
add_library(static_httplib STATIC ${httplib_folder}/httplib.cc)
target_compile_options(static_httplib PRIVATE ${HTTPLIB_CFLAGS_OTHER})
target_compile_definitions(static_httplib PRIVATE CPPHTTPLIB_USE_POLL)
target_link_libraries(static_httplib PUBLIC
  OpenSSL::SSL OpenSSL::Crypto libbrotlidec.a libbrotlienc.a libbrotlicommon.a ZLIB::ZLIB)
foreach(library static_prometheus static_httplib)
  target_compile_options(${library} PRIVATE -w)  # theirs
endforeach()
set_target_properties(PkgConfig::PROMETHEUS PROPERTIES INTERFACE_LINK_LIBRARIES static_prometheus)
set_target_properties(PkgConfig::HTTPLIB PROPERTIES INTERFACE_LINK_LIBRARIES static_httplib)

# libgcc_s stays shared: it belongs to the policy of manylinux, and its archive needs a newer glibc.
add_library(static_glibc OBJECT cmake/older_glibc.cc)
string(APPEND CMAKE_EXE_LINKER_FLAGS " -static-libstdc++")
link_libraries($<$<STREQUAL:$<TARGET_PROPERTY:TYPE>,EXECUTABLE>:static_glibc>)
# What was linked from which archive, for the list of what a wheel bundles (deploy/wheels/bundled.py).
add_link_options($<$<STREQUAL:$<TARGET_PROPERTY:TYPE>,EXECUTABLE>:LINKER:-Map=$<TARGET_FILE:$<TARGET_PROPERTY:NAME>>.map>)
