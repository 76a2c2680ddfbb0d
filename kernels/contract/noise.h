// C8: the counter-based noise for sampling, a pure function of (seed, sample, position, token id).
#ifndef ISOBIT_KERNELS_CONTRACT_NOISE_H_
#define ISOBIT_KERNELS_CONTRACT_NOISE_H_

#include <cstdint>

#include "kernels/contract/constants.h"
#include "kernels/contract/exp_log.h"
#include "kernels/contract/portable.h"

namespace isobit::contract {

struct PhiloxBlock {
  uint32_t words[4];
};

// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC
// 2011).
ISOBIT_HD PhiloxBlock Philox(uint64_t key, PhiloxBlock c) {
  uint32_t k0 = static_cast<uint32_t>(key);
  uint32_t k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p0 = uint64_t{0xd2511f53u} * c.words[0];
    const uint64_t p1 = uint64_t{0xcd9e8d57u} * c.words[2];
    c = {{static_cast<uint32_t>(p1 >> 32) ^ c.words[1] ^ k0, static_cast<uint32_t>(p1),
          static_cast<uint32_t>(p0 >> 32) ^ c.words[3] ^ k1, static_cast<uint32_t>(p0)}};
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  return c;
}

// The four random words of tokens 4*counter .. 4*counter + 3. `position`: absolute position in the
// sequence of the token being drawn. `sample`: its index among a request's n samples.
ISOBIT_HD PhiloxBlock TokenNoise(uint64_t seed, uint32_t sample, uint32_t position,
                                 uint32_t counter) {
  return Philox(seed, {{counter, position, sample, 0u}});
}

// Standard exponential noise -log(1 - u), u = (word + 1/2) * 2^-32.
ISOBIT_HD float Exponential(uint32_t word) {
  const float u = Fma(static_cast<float>(word), 0x1p-32f, 0x1p-33f);
  const float clamped = u < 0x1.fffffep-1f ? u : 0x1.fffffep-1f;
  return -Log1mOf(clamped);
}

// Standard Gumbel noise -log(-log(1 - u)). Large values come from small u, where fp32 is finest.
ISOBIT_HD float Gumbel(uint32_t word) { return -Log(Exponential(word)); }

ISOBIT_HD float TokenGumbel(uint64_t seed, uint32_t sample, uint32_t position, uint32_t token) {
  return Gumbel(TokenNoise(seed, sample, position, token / 4).words[token % 4]);
}

}  // namespace isobit::contract

#endif  // ISOBIT_KERNELS_CONTRACT_NOISE_H_
