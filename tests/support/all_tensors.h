// Whole models in memory, for tests that compare tensors or pack a block by itself.
#ifndef ISOBIT_TESTS_SUPPORT_ALL_TENSORS_H_
#define ISOBIT_TESTS_SUPPORT_ALL_TENSORS_H_

#include <string>
#include <vector>

#include "common/base/check.h"
#include "common/checkpoint/weight_reader.h"

namespace isobit::testing_support {

inline TensorSet AllTensors(const TensorSource& source) {
  std::vector<std::string> names;
  for (const Tensor& tensor : source.tensors()) names.push_back(tensor.name);
  TensorSet tensors;
  const absl::Status read = WeightReader(source).Read(names, names.size(), tensors);
  ISOBIT_CHECK(read.ok()) << read.ToString();
  return tensors;
}

}  // namespace isobit::testing_support

#endif  // ISOBIT_TESTS_SUPPORT_ALL_TENSORS_H_
