// Writes the JSON of a sample and of the seal.
#include "trainer_bridge/comparator/recording_line.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "common/base/digest.h"

namespace isobit {
namespace {

constexpr int kFormat = 1;

// JSON text of each field, by name. Python sorts by name, too.
using Fields = std::map<std::string, std::string>;

std::string Quoted(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', /*ensure_ascii=*/true,
                                   nlohmann::json::error_handler_t::replace);
}

std::string Object(const Fields& fields) {
  return absl::StrCat("{",
                      absl::StrJoin(fields, ",",
                                    [](std::string* out, const Fields::value_type& field) {
                                      absl::StrAppend(out, Quoted(field.first), ":", field.second);
                                    }),
                      "}");
}

template <typename Numbers>
std::string List(const Numbers& numbers) {
  return absl::StrCat("[", absl::StrJoin(numbers, ","), "]");
}

// "STOP" of the enum's name FINISH_REASON_STOP, as "stop".
std::string Word(const std::string& name, const char* prefix) {
  return Quoted(absl::AsciiStrToLower(absl::StripPrefix(name, prefix)));
}

// All that scoring depends on.
std::string SamplingJson(const v1::SamplingParams& sampling) {
  Fields fields;
  const auto add = [&](const char* name, bool has, auto value) {
    if (!has) return;
    if constexpr (std::is_same_v<decltype(value), float>) {
      fields[name] = JsonNumber(value);
    } else {
      fields[name] = absl::StrCat(value);
    }
  };
  add("temperature", sampling.has_temperature(), sampling.temperature());
  add("top_p", sampling.has_top_p(), sampling.top_p());
  add("top_k", sampling.has_top_k(), sampling.top_k());
  add("min_p", sampling.has_min_p(), sampling.min_p());
  add("min_tokens", sampling.has_min_tokens(), sampling.min_tokens());
  add("repetition_penalty", sampling.has_repetition_penalty(), sampling.repetition_penalty());
  add("presence_penalty", sampling.has_presence_penalty(), sampling.presence_penalty());
  add("frequency_penalty", sampling.has_frequency_penalty(), sampling.frequency_penalty());
  if (sampling.has_ignore_eos()) fields["ignore_eos"] = sampling.ignore_eos() ? "true" : "false";
  if (!sampling.stop_token_ids().empty()) {
    fields["stop_token_ids"] = List(sampling.stop_token_ids());
  }
  if (!sampling.logit_bias().empty()) {
    Fields biases;
    for (const auto& [token, bias] : sampling.logit_bias()) {
      biases[absl::StrCat(token)] = JsonNumber(bias);
    }
    fields["logit_bias"] = Object(biases);
  }
  return Object(fields);
}

std::string BitsHex(const v1::TokenLogprobs& tokens) {
  std::string hex;
  for (const float logprob : tokens.logprobs()) {
    absl::StrAppendFormat(&hex, "%08x", std::bit_cast<uint32_t>(logprob));
  }
  return hex;
}

RecordingLine LineOf(Fields fields, const std::string& before) {
  const std::string summed = absl::StrCat(before, Object(fields));
  RecordingLine line = {.text = "", .sum = Sha256Hex(summed.data(), summed.size())};
  fields["sum"] = Quoted(line.sum);
  line.text = absl::StrCat(Object(fields), "\n");
  return line;
}

}  // namespace

std::string JsonNumber(float value) {
  constexpr int kMostDigits = 9;  // tell all fp32 numbers apart
  std::string text;
  for (int digits = 1; digits <= kMostDigits; ++digits) {
    text = absl::StrFormat("%.*e", digits - 1, value);
    if (std::strtof(text.c_str(), nullptr) == value) break;
  }
  const size_t e = text.find('e');
  const int exponent = std::atoi(text.c_str() + e + 1);
  const bool is_negative = text.front() == '-';
  std::string digits = text.substr(is_negative ? 1 : 0, e - (is_negative ? 1 : 0));
  std::erase(digits, '.');
  const auto count = static_cast<int>(digits.size());
  constexpr int kLeastFixed = -4;
  constexpr int kEndFixed = 16;
  if (exponent < kLeastFixed || exponent >= kEndFixed) {
    if (count > 1) digits.insert(1, 1, '.');
    absl::StrAppendFormat(&digits, "e%c%02d", exponent < 0 ? '-' : '+', std::abs(exponent));
  } else if (exponent < 0) {
    digits = absl::StrCat("0.", std::string(static_cast<size_t>(-exponent - 1), '0'), digits);
  } else if (count <= exponent + 1) {
    digits =
        absl::StrCat(digits, std::string(static_cast<size_t>(exponent + 1 - count), '0'), ".0");
  } else {
    digits.insert(static_cast<size_t>(exponent) + 1, 1, '.');
  }
  return absl::StrCat(is_negative ? "-" : "", digits);
}

bool IsRecordable(const v1::TappedSample& sample) {
  const auto& versions = sample.tokens().weight_versions();
  return !sample.tokens().token_ids().empty() &&
         sample.tokens().token_ids_size() == sample.tokens().logprobs_size() &&
         std::adjacent_find(versions.begin(), versions.end(), std::not_equal_to<>()) ==
             versions.end();
}

RecordingLine MakeRecordingLine(const v1::TappedSample& sample, int64_t time_s,
                                const std::string& before) {
  const v1::GenerateComplete& complete = sample.complete();
  Fields fields = {
      {"format", absl::StrCat(kFormat)},
      {"time", absl::StrCat(time_s, ".0")},
      {"request_id", Quoted(sample.request_id())},
      {"index", absl::StrCat(complete.index())},
      {"prompt", List(sample.prompt_token_ids())},
      {"tokens", List(sample.tokens().token_ids())},
      {"logprobs", Quoted(BitsHex(sample.tokens()))},
      {"logprob_mode", Word(v1::LogprobMode_Name(complete.logprob_mode()), "LOGPROB_MODE_")},
      {"sampling", SamplingJson(sample.sampling())},
      {"weights", Quoted(complete.weight_version().digest())},
      {"weight_version", absl::StrCat(complete.weight_version().id())},
      {"fingerprint", Quoted(complete.fingerprint().hex())},
      {"settings", Quoted(complete.fingerprint().settings())},
      {"finish_reason", Word(v1::FinishReason_Name(complete.finish_reason()), "FINISH_REASON_")},
  };
  return LineOf(std::move(fields), before);
}

RecordingLine MakeRecordingSeal(uint64_t num_samples, const std::string& before) {
  return LineOf({{"format", absl::StrCat(kFormat)}, {"samples", absl::StrCat(num_samples)}},
                before);
}

}  // namespace isobit
