// A line of a recording, as python/isobit/recording.py defines and reads it: what a rollout
// sampled, so that `isobit audit` can compute it again. The last line is the seal.
#ifndef ISOBIT_TRAINER_BRIDGE_COMPARATOR_RECORDING_LINE_H_
#define ISOBIT_TRAINER_BRIDGE_COMPARATOR_RECORDING_LINE_H_

#include <cstdint>
#include <string>

#include "isobit/v1/rollout.pb.h"

namespace isobit {

// The text of the fp32 number's shortest decimal form, written as Python writes numbers in JSON:
// the sum of a line is that of Python's text. value: finite.
std::string JsonNumber(float value);

// Whether a later scorer can compute the sample again: it has tokens, all of one weight version.
bool IsRecordable(const v1::TappedSample& sample);

struct RecordingLine {
  std::string text;  // with its end of line
  std::string sum;   // of the line, for the next one
};
// A recordable sample as the line after the one whose sum is `before`; empty: the first line.
// time_s: since 1970.
RecordingLine MakeRecordingLine(const v1::TappedSample& sample, int64_t time_s,
                                const std::string& before);

// The seal of a recording of `num_samples` lines, the last of which has the sum `before`.
RecordingLine MakeRecordingSeal(uint64_t num_samples, const std::string& before);

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_COMPARATOR_RECORDING_LINE_H_
