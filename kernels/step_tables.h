// The tables that a step's ops read, in the backend's memory: token ids and, for each sequence, its
// rows and pages.
#ifndef ISOBIT_KERNELS_STEP_TABLES_H_
#define ISOBIT_KERNELS_STEP_TABLES_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/ops/sequences.h"

namespace isobit {

// A step whose tables have been uploaded.
struct UploadedStep {
  const int32_t* ids = nullptr;  // [rows], for EmbeddingArgs
  SequenceTable sequences;
};

// The tables of one rank.
class StepTables {
 public:
  virtual ~StepTables() = default;

  // Makes a step's ids [rows] and sequences readable by its ops, until the next Upload. Both are in
  // host memory, and the caller keeps them until the step has ended. page_size: of the KV cache
  // that the step uses. writes_past: whether a sequence reads, below its first position, what the
  // step writes for an earlier sequence whose pages it shares.
  virtual absl::StatusOr<UploadedStep> Upload(absl::Span<const int32_t> ids,
                                              absl::Span<const SequenceRows> sequences,
                                              int32_t page_size, bool writes_past) = 0;
  // The same for the sequences of half 0 or 1 of the uploaded step. Their rows count from the first
  // row of the half.
  virtual absl::StatusOr<SequenceTable> UploadHalf(int half,
                                                   absl::Span<const SequenceRows> sequences,
                                                   int32_t page_size) = 0;
};

// For backends that read host memory, where nothing is uploaded.
class HostStepTables final : public StepTables {
 public:
  absl::StatusOr<UploadedStep> Upload(absl::Span<const int32_t> ids,
                                      absl::Span<const SequenceRows> sequences,
                                      int32_t /*page_size*/, bool /*writes_past*/) override {
    return UploadedStep{ids.data(), {sequences}};
  }
  absl::StatusOr<SequenceTable> UploadHalf(int /*half*/, absl::Span<const SequenceRows> sequences,
                                           int32_t /*page_size*/) override {
    return SequenceTable{sequences};
  }
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_STEP_TABLES_H_
