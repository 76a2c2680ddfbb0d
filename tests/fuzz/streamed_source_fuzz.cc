// Fuzzes a stream of weights: pieces of any tensor, at any place, in any order, and reads between
// them, beside a plain account of the bytes that have come. Each step takes 8 bytes of the input.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "common/base/check.h"
#include "common/checkpoint/streamed_source.h"
#include "kernels/model/model_plan.h"
#include "tests/fuzz/fuzz_check.h"
#include "tests/support/tiny_model.h"

namespace {

using isobit::StreamedSource;
using isobit::Tensor;

constexpr char kByte = 0x5a;

// What each byte of a tensor is: not there, there, or read.
struct Account {
  std::vector<bool> has_come;
  size_t num_read = 0;
};

class Steps {
 public:
  explicit Steps(const std::vector<Tensor>& listed)
      : source_(*StreamedSource::Create(
            listed,
            isobit::ModelPlan(isobit::testing_support::TinyConfig(isobit::Architecture::kQwen3)),
            {}, {.max_silence = std::chrono::milliseconds(0)})) {
    for (const Tensor& tensor : listed) {
      accounts_.push_back({std::vector<bool>(source_->Find(tensor.name)->size_bytes), 0});
      sorted_.push_back(
          static_cast<size_t>(source_->Find(tensor.name) - source_->tensors().data()));
    }
  }

  // Whether the stream goes on.
  bool Add(uint64_t tensor, uint64_t offset, size_t size) {
    const absl::Status status = source_->Add(tensor, offset, std::string(size, kByte));
    const bool is_good = tensor < accounts_.size() && IsNew(accounts_[tensor], offset, size);
    ISOBIT_CHECK(status.ok() == is_good) << tensor << " " << offset << " " << size;
    if (!is_good) {
      isobit::fuzz::CheckRefusal(status);
      return false;
    }
    auto& come = accounts_[tensor].has_come;
    std::fill_n(come.begin() + static_cast<std::ptrdiff_t>(offset), size, true);
    return true;
  }

  // Reads only what has come: to wait for more takes a second thread.
  void Read(size_t tensor, size_t most) {
    Account& account = accounts_[tensor % accounts_.size()];
    size_t size = 0;
    while (size < most && account.num_read + size < account.has_come.size() &&
           account.has_come[account.num_read + size]) {
      ++size;
    }
    std::vector<uint8_t> bytes(size);
    ISOBIT_CHECK(
        source_->Read(sorted_[tensor % accounts_.size()], account.num_read, size, bytes.data())
            .ok());
    ISOBIT_CHECK(std::all_of(bytes.begin(), bytes.end(), [](uint8_t b) { return b == kByte; }));
    account.num_read += size;
  }

  void End() {
    const bool is_complete =
        std::all_of(accounts_.begin(), accounts_.end(), [](const Account& account) {
          return std::all_of(account.has_come.begin(), account.has_come.end(),
                             [](bool come) { return come; });
        });
    const absl::Status status = source_->End("");
    ISOBIT_CHECK(status.ok() == is_complete);
    if (!is_complete) isobit::fuzz::CheckRefusal(status);
  }

 private:
  static bool IsNew(const Account& account, uint64_t offset, size_t size) {
    const size_t all = account.has_come.size();
    if (size == 0 || offset > all || size > all - offset) return false;
    const auto begin = account.has_come.begin() + static_cast<std::ptrdiff_t>(offset);
    return std::none_of(begin, begin + static_cast<std::ptrdiff_t>(size),
                        [](bool come) { return come; });
  }

  std::shared_ptr<StreamedSource> source_;
  std::vector<Account> accounts_;
  std::vector<size_t> sorted_;
};

std::vector<Tensor> Listed() {
  std::vector<Tensor> listed;
  const auto config = isobit::testing_support::TinyConfig(isobit::Architecture::kQwen3);
  for (const isobit::ExpectedTensor& spec : ExpectedTensors(isobit::ModelPlan(config))) {
    listed.push_back({.name = spec.name, .dtype = isobit::DType::kBf16, .shape = spec.shape});
  }
  return listed;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::vector<Tensor> listed = Listed();
  Steps steps(listed);
  for (; size >= 8; data += 8, size -= 8) {
    uint16_t offset;
    uint16_t count;
    std::memcpy(&offset, data + 2, sizeof(offset));
    std::memcpy(&count, data + 4, sizeof(count));
    const size_t tensor = data[1];
    if (data[0] % 4 == 0) {
      steps.Read(tensor, count);
      continue;
    }
    // Now and then far outside.
    const uint64_t far = data[6] == 0 ? uint64_t{data[7]} << 56 : 0;
    if (!steps.Add(tensor, offset + far, count)) return 0;
  }
  steps.End();
  return 0;
}
