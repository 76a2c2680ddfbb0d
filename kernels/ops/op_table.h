// The ops of a backend, as a table of functions.
#ifndef ISOBIT_KERNELS_OPS_OP_TABLE_H_
#define ISOBIT_KERNELS_OPS_OP_TABLE_H_

#include <array>
#include <cstddef>

#include "absl/status/status.h"
#include "kernels/ops/all.h"

namespace isobit {

class OpTable {
 public:
  // Computes one op. Errors: those of its function, such as a launch that failed.
  template <typename Args>
  absl::Status Run(const Args& args) const {
    const Entry& entry = entries_[static_cast<size_t>(OpOf<Args>::value)];
    return entry.function(entry.context, &args);
  }

 protected:
  OpTable() = default;
  OpTable(const OpTable&) = default;
  OpTable& operator=(const OpTable&) = default;
  ~OpTable() = default;

  // Each op becomes Run(args, context), a function beside Context. Where one is missing, nothing
  // builds. `context` outlives the table.
  template <typename Context>
  void Fill(Context& context);
  // The same for one op.
  template <typename Args, typename Context>
  void Replace(Context& context);

 private:
  struct Entry {
    absl::Status (*function)(void* context, const void* args) = nullptr;
    void* context = nullptr;
  };

  std::array<Entry, kNumOps> entries_;
};

// ---- Implementation

namespace op_table_internal {

// Outside the class, whose own Run would hide the backend's.
template <typename Args, typename Context>
absl::Status Call(void* context, const void* args) {
  return Run(*static_cast<const Args*>(args), *static_cast<Context*>(context));
}

}  // namespace op_table_internal

template <typename Args, typename Context>
void OpTable::Replace(Context& context) {
  entries_[static_cast<size_t>(OpOf<Args>::value)] = {&op_table_internal::Call<Args, Context>,
                                                      &context};
}

template <typename Context>
void OpTable::Fill(Context& context) {
#define ISOBIT_OP(Name) Replace<Name##Args>(context);
  ISOBIT_OPS(ISOBIT_OP)
#undef ISOBIT_OP
}

}  // namespace isobit

#endif  // ISOBIT_KERNELS_OPS_OP_TABLE_H_
