// A first pass over the events checks the bounds, so that the second, which builds the tree, cannot
// exhaust memory.
#include "common/checkpoint/strict_json.h"

#include <cstddef>
#include <set>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace isobit {
namespace {

constexpr size_t kMaxDepth = 32;
constexpr size_t kMaxValues = 8'000'000;

// Handler of nlohmann's event parser; returning false stops the parse.
class BoundsChecker {
 public:
  const std::string& error() const { return error_; }

  bool null() { return CountValue(); }
  bool boolean(bool) { return CountValue(); }
  bool number_integer(nlohmann::json::number_integer_t) { return CountValue(); }
  bool number_unsigned(nlohmann::json::number_unsigned_t) { return CountValue(); }
  bool number_float(nlohmann::json::number_float_t, const std::string&) { return CountValue(); }
  bool string(const std::string&) { return CountValue(); }
  bool binary(const nlohmann::json::binary_t&) { return CountValue(); }
  bool start_object(size_t) { return Descend(); }
  bool start_array(size_t) { return Descend(); }
  bool end_object() { return Ascend(); }
  bool end_array() { return Ascend(); }

  bool key(const std::string& name) {
    last_key_ = name;
    if (keys_.back().insert(name).second) return true;
    return Fail(absl::StrCat("key ", Quoted(name), " occurs twice in one object"));
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception&) {
    const std::string place = last_key_.empty() ? "" : absl::StrCat(", behind ", Quoted(last_key_));
    return Fail(absl::StrCat("not valid JSON at byte ", position, place));
  }

 private:
  bool Fail(std::string error) {
    error_ = std::move(error);
    return false;
  }

  bool CountValue() {
    if (++values_ <= kMaxValues) return true;
    return Fail(absl::StrCat("more than ", kMaxValues, " JSON values"));
  }

  bool Descend() {
    if (keys_.size() == kMaxDepth) {
      return Fail(absl::StrCat("JSON nested deeper than ", kMaxDepth));
    }
    keys_.emplace_back();
    return CountValue();
  }

  bool Ascend() {
    keys_.pop_back();
    return true;
  }

  std::vector<std::set<std::string>> keys_;  // of the open objects; empty for an open array
  std::string last_key_;                     // that was read
  size_t values_ = 0;
  std::string error_;
};

}  // namespace

absl::StatusOr<nlohmann::json> ParseJsonObject(absl::string_view text, const std::string& source) {
  // The parser takes it for the end, whatever follows.
  if (const size_t nul = text.find('\0'); nul != absl::string_view::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat(source, ": not valid JSON at byte ", nul + 1, ": a NUL"));
  }
  BoundsChecker checker;
  if (!nlohmann::json::sax_parse(text.begin(), text.end(), &checker)) {
    return absl::InvalidArgumentError(absl::StrCat(source, ": ", checker.error()));
  }
  nlohmann::json value =
      nlohmann::json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (!value.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(source, ": expected a JSON object, got ", value.type_name()));
  }
  return value;
}

std::string Quoted(absl::string_view text) {
  constexpr size_t kShown = 120;
  if (text.size() <= kShown) return absl::StrCat("\"", absl::Utf8SafeCHexEscape(text), "\"");
  return absl::StrCat("\"", absl::CHexEscape(text.substr(0, kShown)), "...\" (", text.size(),
                      " bytes)");
}

}  // namespace isobit
