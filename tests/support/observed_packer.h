// A packer that calls a hook before it lets another one pack a matrix: tests count matrices, or
// hold them up.
#ifndef ISOBIT_TESTS_SUPPORT_OBSERVED_PACKER_H_
#define ISOBIT_TESTS_SUPPORT_OBSERVED_PACKER_H_

#include <functional>
#include <utility>

#include "kernels/weight_packer.h"

namespace isobit::testing_support {

class ObservedPacker final : public WeightPacker {
 public:
  // `packer` outlives the object. on_pack: called from any thread.
  ObservedPacker(const WeightPacker& packer, std::function<void()> on_pack)
      : packer_(packer), on_pack_(std::move(on_pack)) {}

  size_t PackedBytes(const LinearShape& shape) const override { return packer_.PackedBytes(shape); }
  void Pack(const LinearShape& shape, const Bf16* w, int64_t ldw,
            std::byte* packed) const override {
    on_pack_();
    packer_.Pack(shape, w, ldw, packed);
  }

 private:
  const WeightPacker& packer_;
  const std::function<void()> on_pack_;
};

}  // namespace isobit::testing_support

#endif  // ISOBIT_TESTS_SUPPORT_OBSERVED_PACKER_H_
