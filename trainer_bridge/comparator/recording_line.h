// A line of a recording, as python/isobit/recording.py defines and reads it: a sample of the
// rollout, so that `isobit audit` can compute it again. The last line is the seal.
#ifndef ISOBIT_TRAINER_BRIDGE_COMPARATOR_RECORDING_LINE_H_
#define ISOBIT_TRAINER_BRIDGE_COMPARATOR_RECORDING_LINE_H_

#include <cstdint>
#include <string>

#include "isobit/v1/rollout.pb.h"

namespace isobit {

// The shortest decimal form of an fp32 number, written as Python writes numbers in JSON, because
// the checksum of a line is that of Python's text. value: finite.
std::string JsonNumber(float value);

// Whether a scorer can compute the sample again later: it has tokens, all of one weight version.
bool IsRecordable(const v1::TappedSample& sample);

struct RecordingLine {
  std::string text;  // with its newline
  std::string sum;   // the line's checksum, which the next line needs
};
// The line for a recordable sample. before: the checksum of the line before it, or empty for the
// first line. time_s: seconds since 1970.
RecordingLine MakeRecordingLine(const v1::TappedSample& sample, int64_t time_s,
                                const std::string& before);

// The seal of a recording of `num_samples` lines. before: the checksum of the last of them.
RecordingLine MakeRecordingSeal(uint64_t num_samples, const std::string& before);

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_COMPARATOR_RECORDING_LINE_H_
