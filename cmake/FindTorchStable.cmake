# Torch::stable: the headers of PyTorch's stable ABI and the library that implements it, from the PyTorch
# that ISOBIT_TORCH_PYTHON imports; Torch::stable_cuda: what it has for CUDA, in a library of its own.
# Torch::front: the same PyTorch's C++ API (LibTorch), for programs built for this version alone.
# PyTorch's own config would ask for CUDA's compiler.
set(ISOBIT_TORCH_PYTHON "" CACHE FILEPATH "Python that has PyTorch, for ISOBIT_TORCH")
if(ISOBIT_TORCH_PYTHON)
  execute_process(
    COMMAND ${ISOBIT_TORCH_PYTHON} -c
            "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    OUTPUT_VARIABLE torch_root OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
find_path(TorchStable_INCLUDE_DIR torch/csrc/stable/library.h HINTS ${torch_root}/include NO_DEFAULT_PATH)
find_library(TorchStable_LIBRARY torch_cpu HINTS ${torch_root}/lib NO_DEFAULT_PATH)
find_library(TorchStable_CUDA_LIBRARY torch_cuda HINTS ${torch_root}/lib NO_DEFAULT_PATH)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(TorchStable
  REQUIRED_VARS TorchStable_LIBRARY TorchStable_INCLUDE_DIR
  REASON_FAILURE_MESSAGE "set ISOBIT_TORCH_PYTHON to a Python that has PyTorch 2.10 or later, as `make test-torch` does")

if(TorchStable_FOUND AND NOT TARGET Torch::stable)
  add_library(Torch::stable INTERFACE IMPORTED GLOBAL)
  # After all others, since PyTorch brings protobuf's headers along.
  target_compile_options(Torch::stable INTERFACE "SHELL:-idirafter ${TorchStable_INCLUDE_DIR}")
  target_link_libraries(Torch::stable INTERFACE ${TorchStable_LIBRARY})
  # Only what PyTorch 2.10 has, and nothing that is not stable.
  target_compile_definitions(Torch::stable INTERFACE TORCH_TARGET_VERSION=0x020a000000000000 TORCH_STABLE_ONLY)
  if(TorchStable_CUDA_LIBRARY)
    add_library(Torch::stable_cuda INTERFACE IMPORTED)
    # It needs CUDA's libraries, which lie where only PyTorch finds them.
    target_link_libraries(Torch::stable_cuda INTERFACE ${TorchStable_CUDA_LIBRARY} -Wl,--allow-shlib-undefined)
  endif()
  # What libtorch_cpu needs, it finds where it lies.
  add_library(Torch::front INTERFACE IMPORTED GLOBAL)
  target_compile_options(Torch::front INTERFACE
    "SHELL:-idirafter ${TorchStable_INCLUDE_DIR} -idirafter ${TorchStable_INCLUDE_DIR}/torch/csrc/api/include")
  get_filename_component(torch_libraries ${TorchStable_LIBRARY} DIRECTORY)
  target_link_libraries(Torch::front INTERFACE ${TorchStable_LIBRARY} ${torch_libraries}/libc10.so)
  target_link_options(Torch::front INTERFACE -Wl,--allow-shlib-undefined)
  if(ISOBIT_CUDA AND TorchStable_CUDA_LIBRARY)
    # It registers itself; nothing refers to it.
    target_link_libraries(Torch::front INTERFACE
      -Wl,--push-state,--no-as-needed,${TorchStable_CUDA_LIBRARY},--pop-state)
  endif()
endif()
