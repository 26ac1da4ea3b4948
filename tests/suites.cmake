# Read by ctest: adds each suite of PROGRAM as one test, which runs all tests of the suite in one process. Under
# AddressSanitizer a process takes a quarter of a second to start, which is more than most tests take.
cmake_minimum_required(VERSION 3.25)
if(NOT EXISTS "${PROGRAM}")
  add_test(reshard_tests_NOT_BUILT reshard_tests_NOT_BUILT)
  return()
endif()
execute_process(COMMAND "${PROGRAM}" --gtest_list_tests OUTPUT_VARIABLE listed RESULT_VARIABLE status)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "${PROGRAM} --gtest_list_tests: ${status}")
endif()
# A line without indentation is a suite: "Zip." or "Ranks/Collectives."
string(REGEX MATCHALL "\n[^ \n]+[.]" suites "\n${listed}")
foreach(suite IN LISTS suites)
  string(REGEX REPLACE "^\n(.*)[.]$" "\\1" suite "${suite}")
  add_test("${suite}" "${PROGRAM}" "--gtest_filter=${suite}.*")
  set_tests_properties("${suite}" PROPERTIES WORKING_DIRECTORY "${DIRECTORY}")
  if(suite IN_LIST FIRST)
    set_tests_properties("${suite}" PROPERTIES COST 100)  # starts first if no earlier run has measured it
  endif()
endforeach()
