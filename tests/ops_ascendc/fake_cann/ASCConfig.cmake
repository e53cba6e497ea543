# SPDX-License-Identifier: Apache-2.0
# Stands for CANN's package ASC in a test of build.sh: its functions write down how they are called, and make targets of
# their names. TIDAL_RECORD is the file that they write to.
set(ASCEND_AUTOGEN_PATH ${CMAKE_BINARY_DIR}/autogen)
file(WRITE $ENV{TIDAL_RECORD} "home $ENV{ASCEND_HOME_PATH}\n")

function(record)
  file(APPEND $ENV{TIDAL_RECORD} "${ARGN}\n")
endfunction()

function(npu_op_package name)
  record(npu_op_package ${name} ${ARGN})
  add_custom_target(package
    COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_BINARY_DIR}/package
    COMMAND ${CMAKE_COMMAND} -E touch ${CMAKE_BINARY_DIR}/package/custom_opp.run)
endfunction()

function(npu_op_code_gen)
  record(npu_op_code_gen ${ARGN})
  file(WRITE ${ASCEND_AUTOGEN_PATH}/aclnn_made.cpp "int aclnn_made;\n")
  file(WRITE ${ASCEND_AUTOGEN_PATH}/op_proto.cc "int op_proto;\n")
endfunction()

function(npu_op_library name kind)
  record(npu_op_library ${name} ${kind} ${ARGN})
  add_library(${name} OBJECT EXCLUDE_FROM_ALL ${ARGN})
  target_include_directories(${name} PRIVATE $ENV{TIDAL_STUBS})
endfunction()

function(npu_op_kernel_options)
  record(npu_op_kernel_options ${ARGN})
endfunction()

function(npu_op_kernel_sources)
  record(npu_op_kernel_sources ${ARGN})
endfunction()

function(npu_op_kernel_library)
  record(npu_op_kernel_library ${ARGN})
  add_custom_target(binary)
endfunction()

function(npu_op_package_add)
  record(npu_op_package_add ${ARGN})
endfunction()
