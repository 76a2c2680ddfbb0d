// See python_random.h.
#include "trainer_bridge/trainer/python_random.h"

#include <openssl/sha.h>

#include <algorithm>
#include <bit>
#include <string>
#include <vector>

namespace isobit::trainer {
namespace {

// Python's seed for a text is the number whose big-endian bytes are the text's and those of their
// SHA-512. The twister takes its 32-bit words, the lowest first.
std::vector<uint32_t> KeyOf(absl::string_view text) {
  std::array<uint8_t, SHA512_DIGEST_LENGTH> digest;
  SHA512(reinterpret_cast<const uint8_t*>(text.data()), text.size(), digest.data());
  std::string bytes(text);
  bytes.append(digest.begin(), digest.end());
  std::vector<uint32_t> key((bytes.size() + 3) / 4);
  for (size_t i = 0; i < bytes.size(); ++i) {
    const auto byte = static_cast<uint8_t>(bytes[bytes.size() - 1 - i]);
    key[i / 4] |= uint32_t{byte} << (8 * (i % 4));
  }
  return key;
}

}  // namespace

// The twister's own ways to begin from one number, and then from an array.
PythonRandom::PythonRandom(absl::string_view text) {
  state_[0] = 19650218;
  const auto mixed = [this](size_t i) {
    const uint32_t before = state_[i - 1];
    return before ^ (before >> 30);
  };
  for (size_t i = 1; i < kWords; ++i) {
    state_[i] = 1812433253U * mixed(i) + static_cast<uint32_t>(i);
  }
  const std::vector<uint32_t> key = KeyOf(text);
  size_t i = 1;
  const auto advance = [this, &i] {
    if (++i < kWords) return;
    state_[0] = state_[kWords - 1];
    i = 1;
  };
  for (size_t n = 0; n < std::max(kWords, key.size()); ++n) {
    const size_t j = n % key.size();
    state_[i] = (state_[i] ^ (mixed(i) * 1664525U)) + key[j] + static_cast<uint32_t>(j);
    advance();
  }
  for (size_t n = 0; n + 1 < kWords; ++n) {
    state_[i] = (state_[i] ^ (mixed(i) * 1566083941U)) - static_cast<uint32_t>(i);
    advance();
  }
  state_[0] = 0x80000000U;
}

uint32_t PythonRandom::Below(uint32_t bound) {
  const int bits = std::bit_width(bound);
  uint32_t drawn;
  do {
    drawn = Next() >> (32 - bits);
  } while (drawn >= bound);
  return drawn;
}

uint32_t PythonRandom::Next() {
  if (used_ == kWords) Refill();
  uint32_t word = state_[used_++];
  word ^= word >> 11;
  word ^= (word << 7) & 0x9d2c5680U;
  word ^= (word << 15) & 0xefc60000U;
  return word ^ (word >> 18);
}

void PythonRandom::Refill() {
  for (size_t i = 0; i < kWords; ++i) {
    const uint32_t joined = (state_[i] & 0x80000000U) | (state_[(i + 1) % kWords] & 0x7fffffffU);
    state_[i] = state_[(i + 397) % kWords] ^ (joined >> 1) ^ ((joined & 1) != 0 ? 0x9908b0dfU : 0U);
  }
  used_ = 0;
}

}  // namespace isobit::trainer
