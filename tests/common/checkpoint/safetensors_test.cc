// The safetensors format: a round trip, and each way a file can be wrong with the message it must
// give.
#include "common/checkpoint/safetensors.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/readable_file.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/checkpoint/raw_safetensors.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace isobit {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing_support::StatusIs;
using testing_support::TempDir;

// The tensors of a file's bytes, pointing into them.
absl::StatusOr<std::vector<Tensor>> Parse(absl::string_view file) {
  ISOBIT_ASSIGN_OR_RETURN(const auto stored, ParseSafetensors(file, file.size(), "m.st"));
  std::vector<Tensor> tensors;
  for (const auto& [tensor, offset] : stored) {
    tensors.push_back(tensor);
    tensors.back().data = reinterpret_cast<const uint8_t*>(file.data()) + offset;
  }
  return tensors;
}

std::string ReadAll(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

Tensor Make(const std::string& name, DType dtype, std::vector<int64_t> shape,
            const std::string& bytes) {
  return {name, dtype, std::move(shape), reinterpret_cast<const uint8_t*>(bytes.data()),
          bytes.size()};
}

TEST(SafetensorsTest, WritesWhatItReads) {
  const TempDir dir;
  const std::string a = "0123456789ab";
  const std::string b = "ABCDEFGH";
  const std::string scalar = "xy";
  const std::vector<Tensor> tensors = {Make("z", DType::kBf16, {2, 3}, a),
                                       Make("w", DType::kF32, {2}, b),
                                       Make("s", DType::kF16, {}, scalar)};
  const std::string path = dir.File("model.safetensors");
  ISOBIT_ASSERT_OK(WriteSafetensors(path, tensors, {{"format", "pt"}}));
  const std::string file = ReadAll(path);
  ISOBIT_ASSERT_OK_AND_ASSIGN(const auto read, Parse(file));
  ASSERT_EQ(read.size(), 3u);
  EXPECT_EQ(read[0].name, "w");  // the widest dtype first
  EXPECT_EQ(read[1].name, "s");
  EXPECT_EQ(read[2].name, "z");
  EXPECT_EQ(read[2].shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(read[2].NumElements(), 6u);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(read[2].data), read[2].size_bytes), a);
  EXPECT_EQ((read[0].data - reinterpret_cast<const uint8_t*>(file.data())) % 8, 0);
  for (const Tensor& tensor : tensors) {
    const auto same = std::find_if(read.begin(), read.end(),
                                   [&](const Tensor& t) { return t.name == tensor.name; });
    EXPECT_EQ(same->dtype, tensor.dtype) << tensor.name;
    EXPECT_EQ(same->shape, tensor.shape) << tensor.name;
    ASSERT_EQ(same->size_bytes, tensor.size_bytes) << tensor.name;
    EXPECT_EQ(std::memcmp(same->data, tensor.data, tensor.size_bytes), 0) << tensor.name;
  }
  // Layout does not depend on the order of the arguments, and no temporary file stays.
  const std::string first = ReadAll(path);
  ISOBIT_ASSERT_OK(
      WriteSafetensors(path, {tensors[2], tensors[1], tensors[0]}, {{"format", "pt"}}));
  EXPECT_EQ(ReadAll(path), first);
  ISOBIT_EXPECT_OK(ReadableFile::Open(path, path));
}

TEST(SafetensorsTest, WriterRefusesNonsense) {
  const TempDir dir;
  const std::string bytes = "01234567";
  const std::string path = dir.File("x");
  const Tensor good = Make("a", DType::kBf16, {4}, bytes);
  EXPECT_THAT(WriteSafetensors(path, {good, good}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("\"a\" is given twice")));
  EXPECT_THAT(
      WriteSafetensors(path, {Make("a", DType::kF32, {4}, bytes)}),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("has 8 bytes, but F32 [4] needs 16")));
  EXPECT_THAT(WriteSafetensors(path, {Make("a", DType::kBf16, {-4}, bytes)}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("negative")));
  EXPECT_THAT(WriteSafetensors(path, {Make("__metadata__", DType::kBf16, {4}, bytes)}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("cannot name a tensor")));
  EXPECT_THAT(ReadableFile::Open(path, path), StatusIs(absl::StatusCode::kNotFound));
  EXPECT_THAT(WriteSafetensors(dir.File("no/such/dir"), {good}),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("cannot create")));
}

TEST(SafetensorsTest, AcceptsMetadataPaddingAndEmptyTensors) {
  const std::string file = RawSafetensors(
      R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[0,3],"data_offsets":[0,0]},)"
      R"("b":{"dtype":"F16","shape":[1],"data_offsets":[0,2]}}   )",
      "xy");
  ISOBIT_ASSERT_OK_AND_ASSIGN(const auto tensors, Parse(file));
  ASSERT_EQ(tensors.size(), 2u);
  EXPECT_EQ(tensors[0].name, "a");
  EXPECT_EQ(tensors[1].name, "b");
}

struct Corruption {
  const char* what;
  std::string file;
  const char* message;
};

// A header with one tensor "t" whose entry is `entry`, and 8 bytes of data.
std::string WithEntry(const std::string& entry) {
  return RawSafetensors("{\"t\":" + entry + "}", std::string(8, 'd'));
}

std::vector<Corruption> Corruptions() {
  const std::string valid = WithEntry(R"({"dtype":"BF16","shape":[4],"data_offsets":[0,8]})");
  std::string huge_header = valid;
  huge_header[7] = '\x7f';
  std::string header_past_end = valid;
  header_past_end[1] = '\x01';
  const std::string deep = std::string(100, '[') + std::string(100, ']');
  return {
      {"empty file", "", "0 bytes, too short"},
      {"short length", valid.substr(0, 7), "7 bytes, too short"},
      {"huge header length", huge_header, "over the limit 100000000"},
      {"header past the end", header_past_end, "bytes follow (truncated?)"},
      {"truncated in the header", valid.substr(0, 20), "bytes follow (truncated?)"},
      {"truncated in the data", valid.substr(0, valid.size() - 1),
       R"(tensor "t": ends at byte 8 of the data, but the file holds 7 (truncated?))"},
      {"bytes after the data", valid + "x", "1 bytes at the end belong to no tensor"},
      {"empty header", RawSafetensors("", ""), "not valid JSON"},
      {"garbage header", RawSafetensors("\xff\xfe{}", ""), "not valid JSON at byte 1"},
      {"two values", RawSafetensors("{}{}", ""), "not valid JSON"},
      {"header is an array", RawSafetensors("[1]", ""), "expected a JSON object, got array"},
      {"deep nesting", RawSafetensors("{\"t\":" + deep + "}", ""), "nested deeper than 32"},
      {"duplicate tensor",
       RawSafetensors(R"({"t":{"dtype":"F16","shape":[1],"data_offsets":[0,2]},)"
                      R"("t":{"dtype":"F16","shape":[1],"data_offsets":[2,4]}})",
                      "0123"),
       R"(key "t" occurs twice)"},
      {"entry no object", WithEntry("3"), R"(tensor "t": its header entry is not an object)"},
      {"no dtype", WithEntry(R"({"shape":[4],"data_offsets":[0,8]})"), R"("t": lacks dtype)"},
      {"no shape", WithEntry(R"({"dtype":"BF16","data_offsets":[0,8]})"), R"("t": lacks shape)"},
      {"no offsets", WithEntry(R"({"dtype":"BF16","shape":[4]})"), R"("t": lacks data_offsets)"},
      {"unknown field", WithEntry(R"({"dtype":"BF16","shape":[4],"data_offsets":[0,8],"x":1})"),
       R"(unknown header field "x")"},
      {"unsupported dtype", WithEntry(R"({"dtype":"I64","shape":[1],"data_offsets":[0,8]})"),
       R"(tensor "t": dtype "I64" is not supported)"},
      {"dtype of another type", WithEntry(R"({"dtype":2,"shape":[4],"data_offsets":[0,8]})"),
       "dtype must be a string"},
      {"shape no array", WithEntry(R"({"dtype":"BF16","shape":4,"data_offsets":[0,8]})"),
       "shape must be an array"},
      {"negative dimension", WithEntry(R"({"dtype":"BF16","shape":[-4],"data_offsets":[0,8]})"),
       "a dimension must be a non-negative integer, got -4"},
      {"fractional dimension", WithEntry(R"({"dtype":"BF16","shape":[4.0],"data_offsets":[0,8]})"),
       "a dimension must be a non-negative integer, got 4.0"},
      {"dimension over 63 bits",
       WithEntry(R"({"dtype":"BF16","shape":[9223372036854775808],"data_offsets":[0,8]})"),
       "is too large"},
      {"shape whose product overflows",
       WithEntry(R"({"dtype":"BF16","shape":[4294967296,4294967296,4],"data_offsets":[0,8]})"),
       "needs more than 2^62 bytes"},
      {"nine dimensions",
       WithEntry(R"({"dtype":"BF16","shape":[4,1,1,1,1,1,1,1,1],"data_offsets":[0,8]})"),
       "9 dimensions, limit 8"},
      {"one offset", WithEntry(R"({"dtype":"BF16","shape":[4],"data_offsets":[0]})"),
       "data_offsets must be an array of two"},
      {"negative offset", WithEntry(R"({"dtype":"BF16","shape":[4],"data_offsets":[-8,0]})"),
       "data_offsets[0] must be a non-negative integer"},
      {"reversed offsets", WithEntry(R"({"dtype":"BF16","shape":[4],"data_offsets":[8,0]})"),
       "reversed: [8, 0]"},
      {"offset past the end", WithEntry(R"({"dtype":"BF16","shape":[8],"data_offsets":[0,16]})"),
       "ends at byte 16 of the data, but the file holds 8"},
      {"offset near 2^64",
       WithEntry(
           R"({"dtype":"BF16","shape":[4],"data_offsets":[18446744073709551608,18446744073709551615]})"),
       "ends at byte 18446744073709551615"},
      {"span smaller than shape", WithEntry(R"({"dtype":"BF16","shape":[5],"data_offsets":[0,8]})"),
       "span 8 bytes, but BF16 [5] needs 10"},
      {"wrong dtype for the span", WithEntry(R"({"dtype":"F32","shape":[4],"data_offsets":[0,8]})"),
       "span 8 bytes, but F32 [4] needs 16"},
      {"overlap",
       RawSafetensors(R"({"t":{"dtype":"F16","shape":[2],"data_offsets":[0,4]},)"
                      R"("u":{"dtype":"F16","shape":[2],"data_offsets":[2,6]}})",
                      "012345"),
       R"(tensor "u": begins at byte 2 of the data, expected 4 (overlap))"},
      {"gap",
       RawSafetensors(R"({"t":{"dtype":"F16","shape":[1],"data_offsets":[0,2]},)"
                      R"("u":{"dtype":"F16","shape":[1],"data_offsets":[4,6]}})",
                      "012345"),
       R"(tensor "u": begins at byte 4 of the data, expected 2 (gap))"},
      {"gap in front", WithEntry(R"({"dtype":"BF16","shape":[3],"data_offsets":[2,8]})"),
       R"(tensor "t": begins at byte 2 of the data, expected 0 (gap))"},
      {"empty name", RawSafetensors("", 1), "name has 0 bytes"},
      {"long name", RawSafetensors(std::string(513, 'n'), 1), "name has 513 bytes"},
      {"metadata no strings", RawSafetensors(R"({"__metadata__":{"a":1}})", ""),
       "__metadata__ must map strings to strings"},
      {"metadata no object", RawSafetensors(R"({"__metadata__":"a"})", ""),
       "__metadata__ must map strings to strings"},
      {"line break in a name", RawSafetensors("a\\nb", "{"), "not valid JSON"},
  };
}

TEST(SafetensorsTest, EachCorruptionHasItsMessage) {
  ISOBIT_ASSERT_OK(Parse(WithEntry(R"({"dtype":"BF16","shape":[4],"data_offsets":[0,8]})")));
  for (const Corruption& corruption : Corruptions()) {
    // A copy of the exact size on the heap: a read past the end shows under the sanitizer.
    const std::vector<char> bytes(corruption.file.begin(), corruption.file.end());
    EXPECT_THAT(Parse(absl::string_view(bytes.data(), bytes.size())),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         AllOf(HasSubstr("m.st"), HasSubstr(corruption.message))))
        << corruption.what;
  }
}

TEST(SafetensorsTest, NamesInMessagesAreEscapedAndCut) {
  const std::string file = RawSafetensors("{\"a\\nb" + std::string(300, 'x') + "\":3}", "");
  const absl::Status status = Parse(file).status();
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("\"a\\nbxxx")));
  EXPECT_EQ(status.message().find('\n'), absl::string_view::npos);
  EXPECT_LT(status.message().size(), 250u);
}

TEST(SafetensorsTest, TooManyTensors) {
  std::string header = "{";
  for (int i = 0; i <= 100000; ++i) {
    if (i > 0) header += ",";
    absl::StrAppend(&header, "\"", i, R"(":{"dtype":"F16","shape":[0],"data_offsets":[0,0]})");
  }
  EXPECT_THAT(
      Parse(RawSafetensors(header + "}", "")),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("100001 tensors, limit 100000")));
}

}  // namespace
}  // namespace isobit
