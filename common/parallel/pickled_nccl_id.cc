// See pickled_nccl_id.h. Python writes such a structure as the call _ctypes._unpickle(class,
// (attributes, bytes)): two names, an empty dictionary, the bytes, two pairs and the call.
#include "common/parallel/pickled_nccl_id.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace isobit {
namespace {

// Opcodes, as Python's pickletools names them.
constexpr char kProto = '\x80';
constexpr char kFrame = '\x95';
constexpr char kGlobal = 'c';  // module and name, each with a line feed
constexpr char kStackGlobal = '\x93';
constexpr char kShortText = '\x8c';
constexpr char kText = 'X';
constexpr char kShortBytes = 'C';
constexpr char kBytes = 'B';
constexpr char kMemoize = '\x94';
constexpr char kPut = 'q';
constexpr char kLongPut = 'r';
constexpr char kEmptyDict = '}';
constexpr char kPair = '\x86';
constexpr char kCall = 'R';
constexpr char kStop = '.';

// Goes over a pickle from its begin. After the first thing that is not there, all else fails.
class Scan {
 public:
  explicit Scan(absl::string_view pickle) : size_(pickle.size()), left_(pickle) {}

  // An opcode, and what may follow any of them: a place in the memo, which nothing here reads.
  bool Opcode(char code) {
    SkipFrame();
    if (left_.empty() || left_.front() != code) return Fails();
    left_.remove_prefix(1);
    return true;
  }
  void SkipMemo() {
    if (left_.empty()) return;
    const size_t bytes = left_.front() == kMemoize   ? 1
                         : left_.front() == kPut     ? 2
                         : left_.front() == kLongPut ? 5
                                                     : 0;
    if (bytes > left_.size()) Fails();
    left_.remove_prefix(ok_ ? bytes : 0);
  }
  // A number of that many bytes.
  uint64_t Number(size_t bytes) {
    uint64_t value = 0;
    if (bytes > left_.size()) {
      Fails();
    } else {
      std::memcpy(&value, left_.data(), bytes);
      left_.remove_prefix(bytes);
    }
    return value;
  }
  absl::string_view Take(uint64_t bytes) {
    if (!ok_ || bytes > left_.size()) {
      Fails();
      return "";
    }
    const absl::string_view taken = left_.substr(0, bytes);
    left_.remove_prefix(bytes);
    return taken;
  }
  absl::string_view Line() {
    const size_t end = left_.find('\n');
    if (end == absl::string_view::npos) {
      Fails();
      return "";
    }
    const absl::string_view line = Take(end);
    left_.remove_prefix(1);
    return line;
  }
  // The one of the two opcodes that is next.
  bool Is(char code) {
    SkipFrame();
    return ok_ && !left_.empty() && left_.front() == code;
  }
  bool Fails() {
    ok_ = false;
    return false;
  }

  bool ok() const { return ok_; }
  bool is_at_end() const { return left_.empty(); }
  size_t position() const { return size_ - left_.size(); }

 private:
  // Frames are a hint to readers, before any opcode. One must not be longer than what is left.
  void SkipFrame() {
    while (ok_ && !left_.empty() && left_.front() == kFrame) {
      left_.remove_prefix(1);
      if (Number(8) > left_.size()) Fails();
    }
  }

  const size_t size_;
  absl::string_view left_;
  bool ok_ = true;
};

absl::string_view Text(Scan& scan) {
  const bool is_short = scan.Is(kShortText);
  if (!scan.Opcode(is_short ? kShortText : kText)) return "";
  const absl::string_view text = scan.Take(scan.Number(is_short ? 1 : 4));
  scan.SkipMemo();
  return text;
}

bool IsModule(absl::string_view name) {
  return std::all_of(name.begin(), name.end(),
                     [](char c) { return absl::ascii_isalnum(c) || c == '_' || c == '.'; });
}

struct Name {
  absl::string_view module;
  absl::string_view name;
};

Name Global(Scan& scan) {
  Name global;
  if (scan.Is(kGlobal)) {
    scan.Opcode(kGlobal);
    global.module = scan.Line();
    global.name = scan.Line();
  } else {
    global.module = Text(scan);
    global.name = Text(scan);
    scan.Opcode(kStackGlobal);
  }
  scan.SkipMemo();
  return global;
}

absl::string_view Bytes(Scan& scan) {
  const bool is_short = scan.Is(kShortBytes);
  if (!scan.Opcode(is_short ? kShortBytes : kBytes)) return "";
  const absl::string_view bytes = scan.Take(scan.Number(is_short ? 1 : 4));
  scan.SkipMemo();
  return bytes;
}

// The id, or none if the pickle is not of that form.
std::optional<std::string> Id(Scan& scan) {
  if (!scan.Opcode(kProto)) return std::nullopt;
  const uint64_t protocol = scan.Number(1);
  if (protocol < 3 || protocol > 5) scan.Fails();
  const Name maker = Global(scan);
  if (maker.module != "_ctypes" || maker.name != "_unpickle") scan.Fails();
  const Name type = Global(scan);
  if (!IsModule(type.module) || type.name != "ncclUniqueId") scan.Fails();
  scan.Opcode(kEmptyDict);
  scan.SkipMemo();
  const absl::string_view id = Bytes(scan);
  if (id.size() != kNcclIdBytes) scan.Fails();
  for (const char code : {kPair, kPair, kCall}) {
    scan.Opcode(code);
    scan.SkipMemo();
  }
  scan.Opcode(kStop);
  if (!scan.ok() || !scan.is_at_end()) return std::nullopt;
  return std::string(id.data(), id.size());
}

}  // namespace

absl::StatusOr<std::string> UnpickleNcclId(absl::string_view pickle) {
  Scan scan(pickle);
  if (std::optional<std::string> id = Id(scan)) return *std::move(id);
  return absl::InvalidArgumentError(
      absl::StrCat("what the trainer's store holds, ", pickle.size(),
                   " bytes, is not the pickle of an ncclUniqueId: byte ", scan.position()));
}

}  // namespace isobit
