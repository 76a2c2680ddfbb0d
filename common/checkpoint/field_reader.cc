// Typed access to the fields of config.json. See field_reader.h.
#include "common/checkpoint/field_reader.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/checkpoint/config_fields.h"
#include "common/checkpoint/strict_json.h"

namespace isobit {
namespace {

using nlohmann::json;

std::string Text(const json& value) {
  return value.dump(-1, ' ', true, json::error_handler_t::replace);
}

std::string Shown(const json& value) { return Quoted(Text(value)); }

}  // namespace

FieldReader::FieldReader(const json& object, std::string prefix, std::vector<std::string> ignored)
    : object_(object), prefix_(std::move(prefix)), ignored_(ignored.begin(), ignored.end()) {}

const json* FieldReader::Take(const char* name) {
  taken_.insert(name);
  const auto it = object_.find(name);
  if (it == object_.end() || it->is_null()) return nullptr;
  if (IsIgnored(prefix_ + name)) {
    Fail(absl::StrCat("--ignore_config_fields names ", prefix_, name,
                      ", expected a field that isobit does not honour"));
  }
  return &*it;
}

int FieldReader::Int(const char* name) { return Required<int>(name, &FieldReader::IntOr); }

double FieldReader::Double(const char* name) {
  return Required<double>(name, &FieldReader::DoubleOr);
}

int FieldReader::IntOr(const char* name, int fallback) {
  const json* value = Take(name);
  if (value == nullptr) return fallback;
  return ToInt(*value, name, fallback);
}

double FieldReader::DoubleOr(const char* name, double fallback) {
  const json* value = Take(name);
  if (value == nullptr) return fallback;
  if (!value->is_number()) return Mistyped(name, "a number", *value, fallback);
  return value->get<double>();
}

bool FieldReader::BoolOr(const char* name, bool fallback) {
  const json* value = Take(name);
  if (value == nullptr) return fallback;
  if (!value->is_boolean()) return Mistyped(name, "true or false", *value, fallback);
  return value->get<bool>();
}

std::string FieldReader::StringOr(const char* name, const std::string& fallback) {
  const json* value = Take(name);
  if (value == nullptr) return fallback;
  if (!value->is_string()) return Mistyped(name, "a string", *value, fallback);
  return value->get<std::string>();
}

std::vector<int> FieldReader::IntsOrEmpty(const char* name) {
  std::vector<int> values;
  const json* value = Take(name);
  if (value == nullptr) return values;
  if (!value->is_array()) return {ToInt(*value, name, 0)};
  for (const json& element : *value) values.push_back(ToInt(element, name, 0));
  return values;
}

void FieldReader::RequireIfPresent(const char* name, const std::vector<json>& expected) {
  taken_.insert(name);
  const auto it = object_.find(name);
  if (it == object_.end() || it->is_null()) return;
  if (std::find(expected.begin(), expected.end(), *it) != expected.end()) return;
  const std::string values =
      absl::StrJoin(expected, " or ",
                    [](std::string* out, const json& value) { absl::StrAppend(out, Text(value)); });
  Refuse(name, *it,
         absl::StrCat(prefix_, name, " is ", Shown(*it), ", but only ", values, " is supported"));
}

void FieldReader::Fail(const std::string& message) {
  if (status_.ok()) status_ = absl::InvalidArgumentError(message);
}

absl::Status FieldReader::Finish(std::vector<std::string>& ignored) {
  for (const auto& [name, value] : object_.items()) {
    if (value.is_null() || taken_.contains(name) || IsHarmlessField(prefix_ + name)) continue;
    Refuse(name, value,
           absl::StrCat("field ", Quoted(prefix_ + name), " is not supported (value ", Shown(value),
                        ")"));
  }
  ignored.insert(ignored.end(), passed_over_.begin(), passed_over_.end());
  return status_;
}

void FieldReader::Refuse(const std::string& name, const json& value, const std::string& problem) {
  const std::string full_name = prefix_ + name;
  if (IsNeverIgnoredField(full_name)) return Fail(problem);
  if (IsIgnored(full_name)) {
    passed_over_.push_back(absl::StrCat(Quoted(full_name), " (value ", Shown(value), ")"));
    return;
  }
  Fail(absl::StrCat(problem, "; if it changes no logprob of this model, ",
                    "--ignore_config_fields with its name lets it pass"));
}

template <class T>
T FieldReader::Required(const char* name, T (FieldReader::*read)(const char*, T)) {
  if (Take(name) == nullptr) Fail(absl::StrCat("field ", prefix_, name, " is missing"));
  return (this->*read)(name, T{});
}

template <class T>
T FieldReader::Mistyped(const char* name, const char* expected, const json& value, T fallback) {
  Fail(absl::StrCat(prefix_, name, " must be ", expected, ", got ", Shown(value)));
  return fallback;
}

int FieldReader::ToInt(const json& value, const char* name, int fallback) {
  if (!value.is_number_integer()) return Mistyped(name, "an integer", value, fallback);
  const bool fits = value.is_number_unsigned()
                        ? value.get<uint64_t>() <= std::numeric_limits<int>::max()
                        : value.get<int64_t>() >= std::numeric_limits<int>::min();
  if (!fits) return Mistyped(name, "an integer of 32 bits", value, fallback);
  return value.get<int>();
}

}  // namespace isobit
