// Fuzzes what the processes of a sharded scorer send each other. The first byte says which side
// reads.
#include <cstddef>
#include <cstdint>

#include "trainer_bridge/scorer/group_messages.h"

namespace {

void ReadAsMember(const isobit::v1::LeaderMessage& message) {
  for (const auto& rank : message.run_pass().ranks()) {
    for (const isobit::v1::WorkItem& item : rank.items()) {
      isobit::InputOf(item);
      isobit::OptionsOf(item);
    }
  }
}

void ReadAsLeader(const isobit::v1::MemberMessage& message) {
  isobit::ScoreOf(message.scored());
  isobit::StatusOf(message.ready().outcome()).IgnoreError();
  isobit::StatusOf(message.staged().outcome()).IgnoreError();
  isobit::StatusOf(message.pass_done()).IgnoreError();
  isobit::v1::GroupIdentity expected;
  expected.set_fingerprint("f");
  isobit::CheckSameGroup(expected, message.hello().identity()).IgnoreError();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const int length = static_cast<int>(size - 1);
  if (data[0] % 2 == 0) {
    isobit::v1::LeaderMessage message;
    if (message.ParseFromArray(data + 1, length)) ReadAsMember(message);
  } else {
    isobit::v1::MemberMessage message;
    if (message.ParseFromArray(data + 1, length)) ReadAsLeader(message);
  }
  return 0;
}
