# NCCL, header and library: the target NCCL::nccl. Taken from ISOBIT_PYTHON's package nvidia-nccl-cu13 (python/tools/pyproject.toml
# pins it), else from where the system has it. Binaries find the library by their run path.
set(nccl_package "")
if(ISOBIT_PYTHON)
  execute_process(COMMAND ${ISOBIT_PYTHON} -c "import nvidia.nccl as nccl; print(list(nccl.__path__)[0])"
                  OUTPUT_VARIABLE nccl_package OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${nccl_package}/include)
find_library(NCCL_LIBRARY NAMES libnccl.so.2 nccl HINTS ${nccl_package}/lib)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  NCCL REQUIRED_VARS NCCL_LIBRARY NCCL_INCLUDE_DIR
  REASON_FAILURE_MESSAGE "the preset cuda needs it: `make build-gpu` installs nvidia-nccl-cu13 into .venv")
if(NCCL_FOUND AND NOT TARGET NCCL::nccl)
  add_library(NCCL::nccl SHARED IMPORTED)
  set_target_properties(NCCL::nccl PROPERTIES IMPORTED_LOCATION ${NCCL_LIBRARY}
                                              INTERFACE_INCLUDE_DIRECTORIES ${NCCL_INCLUDE_DIR})
endif()
