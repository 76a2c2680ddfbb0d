// Takes typed fields out of a JSON object of a model directory, so that none is passed over.
#ifndef ISOBIT_COMMON_CHECKPOINT_FIELD_READER_H_
#define ISOBIT_COMMON_CHECKPOINT_FIELD_READER_H_

#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "nlohmann/json.hpp"

namespace isobit {

// The first error sticks and later calls return their default, so that the code which takes the
// fields reads as a list of them. A null is an absent field, but for Has. Errors are
// INVALID_ARGUMENT and name the field, its value and what was expected. Not thread safe.
class FieldReader {
 public:
  // `prefix` goes before each name that is shown or looked up in `ignored`, the full names of the
  // fields that may be there although nobody honours them. The object outlives the reader.
  FieldReader(const nlohmann::json& object, std::string prefix, std::vector<std::string> ignored);

  const absl::Status& status() const { return status_; }

  // Whether the object has it, be it null.
  bool Has(const char* name) const { return object_.contains(name); }

  // Null when absent. What is taken is honoured: an error if it was to be ignored.
  const nlohmann::json* Take(const char* name);

  // Absent ones are errors.
  int Int(const char* name);
  double Double(const char* name);

  int IntOr(const char* name, int fallback);
  double DoubleOr(const char* name, double fallback);
  bool BoolOr(const char* name, bool fallback);
  std::string StringOr(const char* name, const std::string& fallback);

  // null, one integer or a list of integers.
  std::vector<int> IntsOrEmpty(const char* name);

  // The field may be present with one of these values only, those that change nothing.
  void RequireIfPresent(const char* name, const std::vector<nlohmann::json>& expected);

  void Fail(const std::string& message);

  // The first error, or one that names a field which nobody took and which is not harmless.
  // Appends what was ignored, as "name (value)", to `ignored`.
  absl::Status Finish(std::vector<std::string>& ignored);

 private:
  bool IsIgnored(const std::string& full_name) const { return ignored_.contains(full_name); }

  // `problem` with a field that nobody honours: an error, unless it is to be ignored.
  void Refuse(const std::string& name, const nlohmann::json& value, const std::string& problem);

  template <class T>
  T Required(const char* name, T (FieldReader::*read)(const char*, T));

  template <class T>
  T Mistyped(const char* name, const char* expected, const nlohmann::json& value, T fallback);

  int ToInt(const nlohmann::json& value, const char* name, int fallback);

  const nlohmann::json& object_;
  const std::string prefix_;
  const std::set<std::string> ignored_;
  std::set<std::string> taken_;
  std::vector<std::string> passed_over_;
  absl::Status status_;
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_CHECKPOINT_FIELD_READER_H_
