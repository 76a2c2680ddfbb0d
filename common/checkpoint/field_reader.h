// Reads typed fields from a JSON object of a model directory, and reports every field that was not
// read.
#ifndef ISOBIT_COMMON_CHECKPOINT_FIELD_READER_H_
#define ISOBIT_COMMON_CHECKPOINT_FIELD_READER_H_

#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "nlohmann/json.hpp"

namespace isobit {

// Keeps the first error; later calls then return their default, so code that reads many fields
// needs no checks in between. A null counts as an absent field, except in Has. Errors are
// INVALID_ARGUMENT and name the field, its value and what was expected. Not thread-safe.
class FieldReader {
 public:
  // prefix: goes before each name in errors, and before each name that is looked up in `ignored`.
  // ignored: full names of fields that may be present although isobit does not apply them. `object`
  // outlives the reader.
  FieldReader(const nlohmann::json& object, std::string prefix, std::vector<std::string> ignored);

  const absl::Status& status() const { return status_; }

  // Whether the object has the field, even if it is null.
  bool Has(const char* name) const { return object_.contains(name); }

  // Null if absent. A field that is taken is applied, so it is an error if `ignored` names it.
  const nlohmann::json* Take(const char* name);

  // It is an error if the field is absent.
  int Int(const char* name);
  double Double(const char* name);

  int IntOr(const char* name, int fallback);
  double DoubleOr(const char* name, double fallback);
  bool BoolOr(const char* name, bool fallback);
  std::string StringOr(const char* name, const std::string& fallback);

  // The field may be null, an integer or a list of integers.
  std::vector<int> IntsOrEmpty(const char* name);

  // The field must be absent or have one
  // of these values, which change nothing.
  void RequireIfPresent(const char* name, const std::vector<nlohmann::json>& expected);

  void Fail(const std::string& message);

  // Returns the first error. Without one, fails with a field that was neither taken nor is
  // harmless. Appends the fields that were ignored, as "name (value)", to `ignored`.
  absl::Status Finish(std::vector<std::string>& ignored);

 private:
  bool IsIgnored(const std::string& full_name) const { return ignored_.contains(full_name); }

  // Reports `problem` with a field that isobit does not apply, unless the field is to be ignored.
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
