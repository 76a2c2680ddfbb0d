// Memory of the host that can be given back.
#include "kernels/host_device.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

// How many of the pages are in the machine's memory.
size_t ResidentPages(const ReleasableMemory& memory, size_t bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> resident((bytes + page - 1) / page);
  if (mincore(memory.get(), bytes, resident.data()) != 0) return SIZE_MAX;
  size_t count = 0;
  for (const unsigned char one : resident) count += one & 1;
  return count;
}

TEST(DeviceMemoryTest, ReleasedBytesAreTheSystems) {
  constexpr size_t kBytes = (size_t{16} << 20) + 100;
  HostDevice device;
  ISOBIT_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<ReleasableMemory> memory,
                              device.AllocateReleasable(kBytes));
  std::byte* const address = memory->get();
  EXPECT_EQ(reinterpret_cast<uintptr_t>(address) % 256, 0u);
  for (int round = 0; round < 3; ++round) {
    EXPECT_EQ(memory->bytes(), kBytes);
    std::memset(memory->get(), 7, kBytes);
    EXPECT_GE(ResidentPages(*memory, kBytes), kBytes / 4096);
    ISOBIT_ASSERT_OK(memory->Release());
    ISOBIT_ASSERT_OK(memory->Release()) << "released already";
    EXPECT_TRUE(memory->is_released());
    EXPECT_EQ(memory->bytes(), 0u);
    EXPECT_EQ(ResidentPages(*memory, kBytes), 0u);
    ISOBIT_ASSERT_OK(memory->Restore());
    ISOBIT_ASSERT_OK(memory->Restore()) << "there already";
    EXPECT_EQ(memory->get(), address);
  }
  EXPECT_EQ(address[kBytes - 1], std::byte{0}) << "what it held is lost";
}

TEST(DeviceMemoryTest, ReleasedBytesCannotBeRead) {
  HostDevice device;
  ISOBIT_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<ReleasableMemory> memory,
                              device.AllocateReleasable(100));
  ISOBIT_ASSERT_OK(memory->Release());
  EXPECT_DEATH(static_cast<void>(*const_cast<volatile std::byte*>(memory->get())), "");
}

TEST(DeviceMemoryTest, NoBytes) {
  HostDevice device;
  ISOBIT_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<ReleasableMemory> memory,
                              device.AllocateReleasable(0));
  ISOBIT_EXPECT_OK(memory->Release());
  ISOBIT_EXPECT_OK(memory->Restore());
  EXPECT_EQ(memory->bytes(), 0u);
}

}  // namespace
}  // namespace isobit
