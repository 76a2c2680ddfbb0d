# Three target functions, so that every folder's CMakeLists.txt reads as a list of names, sources and dependencies.
include(GoogleTest)

function(isobit_library)
  cmake_parse_arguments(ARG "" "NAME" "SRCS;DEPS" ${ARGN})
  if(ARG_SRCS)
    set(scope PUBLIC)
    add_library(${ARG_NAME} STATIC ${ARG_SRCS})
  else()
    set(scope INTERFACE)
    add_library(${ARG_NAME} INTERFACE)
  endif()
  target_include_directories(${ARG_NAME} ${scope} ${PROJECT_SOURCE_DIR})
  target_link_libraries(${ARG_NAME} ${scope} ${ARG_DEPS})
endfunction()

function(isobit_binary)
  cmake_parse_arguments(ARG "" "NAME" "SRCS;DEPS" ${ARGN})
  add_executable(${ARG_NAME} ${ARG_SRCS})
  target_link_libraries(${ARG_NAME} PRIVATE ${ARG_DEPS})
  set_target_properties(${ARG_NAME} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
endfunction()

# LABELS: unit (default), invariance, accuracy (of numbers, which no sanitizer judges), e2e, gpu; beside them rpc
# for tests that run gRPC, which the thread sanitizer cannot judge, and long for unit tests of more than 15 s, which
# `make check` leaves out. CMakePresets.json says which labels each run takes. TIMEOUT in seconds, for tests that
# hang: those that compute take two minutes, and many times that on a loaded machine.
function(isobit_test)
  cmake_parse_arguments(ARG "" "NAME;TIMEOUT" "SRCS;DEPS;LABELS" ${ARGN})
  if(NOT ARG_LABELS)
    set(ARG_LABELS unit)
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 900)
  endif()
  add_executable(${ARG_NAME} ${ARG_SRCS})
  target_link_libraries(${ARG_NAME} PRIVATE ${ARG_DEPS} GTest::gmock GTest::gtest GTest::gtest_main)
  if(NOT (ISOBIT_SANITIZE STREQUAL "thread" AND "rpc" IN_LIST ARG_LABELS))
    set_property(GLOBAL APPEND PROPERTY ISOBIT_TESTS ${ARG_NAME})
  endif()
  if("gpu" IN_LIST ARG_LABELS)
    set_property(GLOBAL APPEND PROPERTY ISOBIT_GPU_TESTS ${ARG_NAME})
  endif()
  add_test(NAME ${ARG_NAME} COMMAND ${ARG_NAME})
  set_tests_properties(${ARG_NAME} PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT}
                       SKIP_REGULAR_EXPRESSION "NO TESTS RAN"
                       ENVIRONMENT "GTEST_OUTPUT=xml:${CMAKE_BINARY_DIR}/test-results/${ARG_NAME}.xml")
endfunction()

# A unittest program run by ISOBIT_PYTHON, that finds the binaries in ISOBIT_BIN_DIR. Without
# ISOBIT_PYTHON, no test. Arguments as in isobit_test.
function(isobit_python_test)
  cmake_parse_arguments(ARG "" "NAME;SRC;TIMEOUT" "LABELS" ${ARGN})
  if(NOT ISOBIT_PYTHON)
    return()
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 900)
  endif()
  add_test(NAME ${ARG_NAME} COMMAND ${ISOBIT_PYTHON} ${CMAKE_CURRENT_SOURCE_DIR}/${ARG_SRC})
  set_tests_properties(${ARG_NAME} PROPERTIES LABELS "python;${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT}
                       ENVIRONMENT "ISOBIT_BIN_DIR=${CMAKE_BINARY_DIR}/bin")
endfunction()
