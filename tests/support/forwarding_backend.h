// A backend that passes every op to another one. Tests replace the ops that they want to watch,
// delay, fail or corrupt.
#ifndef ISOBIT_TESTS_SUPPORT_FORWARDING_BACKEND_H_
#define ISOBIT_TESTS_SUPPORT_FORWARDING_BACKEND_H_

#include <concepts>
#include <memory>
#include <utility>

#include "kernels/backend.h"

namespace isobit::testing_support {

// A class that watches, say, Linear, has a public `absl::Status On(const LinearArgs& args)`, which
// may call inner().Run(args), and calls Replace<LinearArgs>(*this) in its constructor.
class ForwardingBackend : public Backend {
 public:
  explicit ForwardingBackend(std::unique_ptr<Backend> inner) : inner_(std::move(inner)) {
    OpTable::operator=(*inner_);
  }

  const char* name() const override { return inner_->name(); }
  Device& device() override { return inner_->device(); }
  StepTables& tables() override { return inner_->tables(); }
  const WeightPacker& packer() const override { return inner_->packer(); }

 protected:
  const Backend& inner() const { return *inner_; }

 private:
  const std::unique_ptr<Backend> inner_;
};

template <typename Args, std::derived_from<ForwardingBackend> Watcher>
absl::Status Run(const Args& args, Watcher& watcher) {
  return watcher.On(args);
}

}  // namespace isobit::testing_support

#endif  // ISOBIT_TESTS_SUPPORT_FORWARDING_BACKEND_H_
