// Pickles of NCCL ids: those that Python writes give their 128 bytes, and everything else is
// refused, at any length and with any byte changed that is not the id's.
#include "common/parallel/pickled_nccl_id.h"

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

using absl::StatusCode;
using testing::HasSubstr;
using testing_support::StatusIs;

std::string Id() {
  std::string id(128, '\0');
  for (size_t i = 0; i < id.size(); ++i) id[i] = static_cast<char>(i * 37 + 200);
  return id;
}

constexpr char kModule[] = "vllm.distributed.device_communicators.pynccl_wrapper";

std::string Text(const std::string& text) {
  return absl::StrCat("\x8c", std::string(1, static_cast<char>(text.size())), text, "\x94");
}

std::string IdBytes(const std::string& id) {
  return absl::StrCat("C", std::string(1, static_cast<char>(id.size())), id);
}

// What pickle.dumps(unique_id, 4) gives; protocol 5 differs in its number alone.
std::string Protocol4(const std::string& id, char protocol = 4,
                      const std::string& name = "ncclUniqueId") {
  const std::string body =
      absl::StrCat(Text("_ctypes"), Text("_unpickle"), "\x93\x94", Text(kModule), Text(name),
                   "\x93\x94}\x94", IdBytes(id), "\x94\x86\x94\x86\x94R\x94.");
  std::string frame(8, '\0');
  const uint64_t size = body.size();
  frame.replace(0, 8, reinterpret_cast<const char*>(&size), 8);
  return absl::StrCat("\x80", std::string(1, protocol), "\x95", frame, body);
}

// What pickle.dumps(unique_id, 3) gives.
std::string Protocol3(const std::string& id) {
  std::string pickle = absl::StrCat("\x80\x03", "c_ctypes\n_unpickle\nq", std::string(1, '\0'), "c",
                                    kModule, "\nncclUniqueId\nq\x01}q\x02", IdBytes(id));
  return absl::StrCat(pickle, "q\x03\x86q\x04\x86q\x05Rq\x06.");
}

TEST(PickledNcclIdTest, GivesTheIdOfWhatPythonWrites) {
  for (const std::string& pickle : {Protocol3(Id()), Protocol4(Id()), Protocol4(Id(), 5)}) {
    ISOBIT_ASSERT_OK_AND_ASSIGN(const std::string id, UnpickleNcclId(pickle));
    EXPECT_EQ(id, Id());
  }
}

TEST(PickledNcclIdTest, RefusesWhatIsNotAnId) {
  EXPECT_THAT(UnpickleNcclId(Protocol4(Id().substr(1))), StatusIs(StatusCode::kInvalidArgument));
  EXPECT_THAT(UnpickleNcclId(Protocol4(Id(), 4, "system")),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("is not the pickle of an ncclUniqueId: byte ")));
  EXPECT_THAT(UnpickleNcclId(Protocol4(Id(), 2)), StatusIs(StatusCode::kInvalidArgument));
  EXPECT_THAT(UnpickleNcclId(Protocol4(Id()) + "."), StatusIs(StatusCode::kInvalidArgument));
  EXPECT_THAT(UnpickleNcclId("cos\nsystem\n(S'true'\ntR."), StatusIs(StatusCode::kInvalidArgument));
  EXPECT_THAT(UnpickleNcclId(std::string("\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff.", 12)),
              StatusIs(StatusCode::kInvalidArgument));
  EXPECT_THAT(UnpickleNcclId(std::string(1 << 20, '\x95')), StatusIs(StatusCode::kInvalidArgument));
}

TEST(PickledNcclIdTest, RefusesEveryPart) {
  for (const std::string& whole : {Protocol3(Id()), Protocol4(Id())}) {
    for (size_t size = 0; size < whole.size(); ++size) {
      EXPECT_THAT(UnpickleNcclId(whole.substr(0, size)), StatusIs(StatusCode::kInvalidArgument))
          << size;
    }
  }
}

// Of no other byte may the value matter than of those in the module's name, of a frame's length and
// of places in the memo.
TEST(PickledNcclIdTest, ReadsNothingElseAsAnId) {
  const std::string whole = Protocol4(Id());
  const size_t id_at = whole.find(Id());
  const size_t module_at = whole.find(kModule);
  int accepted = 0;
  for (size_t at = 0; at < whole.size(); ++at) {
    for (int value = 0; value < 256; ++value) {
      std::string changed = whole;
      changed[at] = static_cast<char>(value);
      if (changed == whole) continue;
      const auto id = UnpickleNcclId(changed);
      if (!id.ok()) continue;
      const bool is_free = (at >= id_at && at < id_at + 128) ||
                           (at >= module_at && at < module_at + sizeof(kModule) - 1) ||
                           (at >= 3 && at < 11) || at == 1;
      EXPECT_TRUE(is_free) << "byte " << at << " as " << value;
      EXPECT_EQ(*id, changed.substr(id_at, 128));
      ++accepted;
    }
  }
  EXPECT_GT(accepted, 128 * 255);
}

}  // namespace
}  // namespace isobit
