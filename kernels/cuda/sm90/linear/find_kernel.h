// Finds a compiled kernel by its schedule, in a table of schedules from which the kernels are
// instantiated.
#ifndef ISOBIT_KERNELS_CUDA_SM90_LINEAR_FIND_KERNEL_H_
#define ISOBIT_KERNELS_CUDA_SM90_LINEAR_FIND_KERNEL_H_

#include <cstddef>
#include <iterator>
#include <utility>

namespace isobit::cuda {

// Kernels::Launcher<i>() for the i that kTable[i] == schedule; null: there is none.
template <const auto& kTable, class Kernels, typename Schedule>
typename Kernels::LaunchFn FindKernel(const Schedule& schedule) {
  typename Kernels::LaunchFn found = nullptr;
  const auto look = [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    ((kTable[kIndex] == schedule ? void(found = Kernels::template Launcher<kIndex>()) : void()),
     ...);
  };
  look(std::make_index_sequence<std::size(kTable)>());
  return found;
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_LINEAR_FIND_KERNEL_H_
