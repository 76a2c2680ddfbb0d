// wgmma: D[64, N] += A[64, 16] B[N, 16]^T in bf16 with fp32 sums. A warpgroup issues it; one call
// is one k16 step of the contract (C1). Not here: which products, and when.
//
// With r = 16 (t / 32) + t % 32 / 4, thread t of the warpgroup holds row r (elements 4j, 4j+1) and
// row r + 8 (elements 4j+2, 4j+3), columns 8j + 2 (t % 4) + {0, 1}.
#ifndef ISOBIT_KERNELS_CUDA_SM90_DEVICE_WGMMA_CUH_
#define ISOBIT_KERNELS_CUDA_SM90_DEVICE_WGMMA_CUH_

#include <cstdint>

namespace isobit::cuda {

// Call it before the first Mma of a commit group if registers or (after FenceSharedForAsync) shared
// memory have changed.
__device__ __forceinline__ void FenceMma() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void CommitMma() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most `pending` commit groups are unfinished.
template <int pending>
__device__ __forceinline__ void WaitMma() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// The descriptor of an operand in shared memory at a multiple of 1024 bytes, K-major (64 columns of
// bf16 a row) under the 128-byte swizzle: core matrices of 8 rows lie 1024 bytes apart. K16 step k
// of the 4 in 64 columns is at descriptor + 2k.
__device__ __forceinline__ uint64_t KMajorOperand(uint32_t address) {
  return (uint64_t{(address & 0x3ffffu) >> 4}) | (uint64_t{1} << 16) | (uint64_t{1024 >> 4} << 32) |
         (uint64_t{1} << 62);
}
// The descriptor of 1024 bytes of zeros as an operand of any number of rows: all its core matrices
// of 8 rows are the same bytes.
__device__ __forceinline__ uint64_t ZeroOperand(uint32_t address) {
  return (uint64_t{(address & 0x3ffffu) >> 4}) | (uint64_t{1} << 16) | (uint64_t{1} << 62);
}

// The descriptor of a transposed operand, [k, rows] in memory: under the 128-byte swizzle, in
// blocks of 64 rows that are block_bytes apart. K16 step k of a block is at descriptor + 128k.
// block_bytes = 0: 2048 bytes of zeros as an operand of any number of rows.
__device__ __forceinline__ uint64_t TransposedOperand(uint32_t address, uint32_t block_bytes) {
  return uint64_t{(address & 0x3ffffu) >> 4} | (uint64_t{block_bytes >> 4} << 16) |
         (uint64_t{1024 >> 4} << 32) | (uint64_t{1} << 62);
}

// The operand that begins `bytes` later. Only the low word changes, so 32-bit arithmetic suffices.
__device__ __forceinline__ uint64_t Further(uint64_t operand, int bytes) {
  return (operand & 0xffffffff00000000ull) |
         (static_cast<uint32_t>(operand) + static_cast<uint32_t>(bytes / 16));
}

// A thread's sums d[0] to d[n - 1], as the operands %0 to %(n - 1) of asm: ISOBIT_NAMES_n in its
// text and ISOBIT_SUMS_n in its list. Each continues the one before it.
#define ISOBIT_4_SUMS(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define ISOBIT_8_SUMS(i) ISOBIT_4_SUMS(i), ISOBIT_4_SUMS((i) + 4)
#define ISOBIT_NAMES_4 "%0, %1, %2, %3"
#define ISOBIT_NAMES_8 ISOBIT_NAMES_4 ", %4, %5, %6, %7"
#define ISOBIT_NAMES_12 ISOBIT_NAMES_8 ", %8, %9, %10, %11"
#define ISOBIT_NAMES_16 ISOBIT_NAMES_12 ", %12, %13, %14, %15"
#define ISOBIT_NAMES_24 ISOBIT_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define ISOBIT_NAMES_32 ISOBIT_NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define ISOBIT_NAMES_36 ISOBIT_NAMES_32 ", %32, %33, %34, %35"
#define ISOBIT_NAMES_40 ISOBIT_NAMES_36 ", %36, %37, %38, %39"
#define ISOBIT_NAMES_48 ISOBIT_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define ISOBIT_NAMES_56 ISOBIT_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define ISOBIT_NAMES_64 ISOBIT_NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define ISOBIT_NAMES_72 ISOBIT_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define ISOBIT_NAMES_80 ISOBIT_NAMES_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define ISOBIT_NAMES_88 ISOBIT_NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define ISOBIT_NAMES_96 ISOBIT_NAMES_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define ISOBIT_NAMES_104 ISOBIT_NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define ISOBIT_NAMES_112 ISOBIT_NAMES_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define ISOBIT_NAMES_120 ISOBIT_NAMES_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define ISOBIT_NAMES_128 ISOBIT_NAMES_120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define ISOBIT_SUMS_4 ISOBIT_4_SUMS(0)
#define ISOBIT_SUMS_8 ISOBIT_SUMS_4, ISOBIT_4_SUMS(4)
#define ISOBIT_SUMS_12 ISOBIT_SUMS_8, ISOBIT_4_SUMS(8)
#define ISOBIT_SUMS_16 ISOBIT_SUMS_12, ISOBIT_4_SUMS(12)
#define ISOBIT_SUMS_24 ISOBIT_SUMS_16, ISOBIT_8_SUMS(16)
#define ISOBIT_SUMS_32 ISOBIT_SUMS_24, ISOBIT_8_SUMS(24)
#define ISOBIT_SUMS_36 ISOBIT_SUMS_32, ISOBIT_4_SUMS(32)
#define ISOBIT_SUMS_40 ISOBIT_SUMS_36, ISOBIT_4_SUMS(36)
#define ISOBIT_SUMS_48 ISOBIT_SUMS_40, ISOBIT_8_SUMS(40)
#define ISOBIT_SUMS_56 ISOBIT_SUMS_48, ISOBIT_8_SUMS(48)
#define ISOBIT_SUMS_64 ISOBIT_SUMS_56, ISOBIT_8_SUMS(56)
#define ISOBIT_SUMS_72 ISOBIT_SUMS_64, ISOBIT_8_SUMS(64)
#define ISOBIT_SUMS_80 ISOBIT_SUMS_72, ISOBIT_8_SUMS(72)
#define ISOBIT_SUMS_88 ISOBIT_SUMS_80, ISOBIT_8_SUMS(80)
#define ISOBIT_SUMS_96 ISOBIT_SUMS_88, ISOBIT_8_SUMS(88)
#define ISOBIT_SUMS_104 ISOBIT_SUMS_96, ISOBIT_8_SUMS(96)
#define ISOBIT_SUMS_112 ISOBIT_SUMS_104, ISOBIT_8_SUMS(104)
#define ISOBIT_SUMS_120 ISOBIT_SUMS_112, ISOBIT_8_SUMS(112)
#define ISOBIT_SUMS_128 ISOBIT_SUMS_120, ISOBIT_8_SUMS(120)

// The text of the instruction for N columns and n sums, up to A and B. p: the number of the operand
// that says whether to accumulate.
#define ISOBIT_WGMMA(N, n, p)                                                          \
  "{\n.reg .pred p;\nsetp.ne.b32 p, %" #p ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N \
  "k16.f32.bf16.bf16 {" ISOBIT_NAMES_##n "}, "

// d += A B^T, both operands in shared memory; accumulate = false starts from +0. RegisterMma takes
// A from registers: a[0] = (row g, columns 2q, 2q+1), a[1] = (g + 8, same), a[2], a[3] = the same
// with columns + 8, g = lane / 4, q = lane % 4. TransposedB: B is [16, N] in memory (N-major), like
// V. MajorMma: Mma in which each operand may be transposed; A is then [16, 64].
template <int N>
struct Wgmma;

// Wgmma<N>, with n = N / 2 sums per thread. n1 to n6: n + 1 to n + 6, the numbers of the operands
// after %n, since the preprocessor cannot add.
#define ISOBIT_WGMMA_STRUCT(N, n, n1, n2, n3, n4, n5, n6)                                          \
  template <>                                                                                      \
  struct Wgmma<N> {                                                                                \
    static __device__ __forceinline__ void Mma(float (&d)[n], uint64_t a, uint64_t b,              \
                                               bool accumulate) {                                  \
      asm volatile(ISOBIT_WGMMA(N, n, n2) "%" #n ", %" #n1 ", p, 1, 1, 0, 0;\n}\n"                 \
                   : ISOBIT_SUMS_##n                                                               \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                           \
    }                                                                                              \
    template <bool kTransposedA, bool kTransposedB>                                                \
    static __device__ __forceinline__ void MajorMma(float (&d)[n], uint64_t a, uint64_t b,         \
                                                    bool accumulate) {                             \
      asm volatile(ISOBIT_WGMMA(N, n, n2) "%" #n ", %" #n1 ", p, 1, 1, %" #n3 ", %" #n4 ";\n}\n"   \
                   : ISOBIT_SUMS_##n                                                               \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kTransposedA ? 1 : 0), \
                     "n"(kTransposedB ? 1 : 0));                                                   \
    }                                                                                              \
    template <bool kTransposedB>                                                                   \
    static __device__ __forceinline__ void RegisterMma(float (&d)[n], const uint32_t (&a)[4],      \
                                                       uint64_t b, bool accumulate) {              \
      asm volatile(ISOBIT_WGMMA(N, n, n5) "{%" #n ", %" #n1 ", %" #n2 ", %" #n3 "}, %" #n4         \
                                          ", p, 1, 1, %" #n6 ";\n}\n"                              \
                   : ISOBIT_SUMS_##n                                                               \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                           \
                     "r"(static_cast<int>(accumulate)), "n"(kTransposedB ? 1 : 0));                \
    }                                                                                              \
  };

ISOBIT_WGMMA_STRUCT(8, 4, 5, 6, 7, 8, 9, 10)
ISOBIT_WGMMA_STRUCT(16, 8, 9, 10, 11, 12, 13, 14)
ISOBIT_WGMMA_STRUCT(24, 12, 13, 14, 15, 16, 17, 18)
ISOBIT_WGMMA_STRUCT(32, 16, 17, 18, 19, 20, 21, 22)
ISOBIT_WGMMA_STRUCT(48, 24, 25, 26, 27, 28, 29, 30)
ISOBIT_WGMMA_STRUCT(64, 32, 33, 34, 35, 36, 37, 38)
ISOBIT_WGMMA_STRUCT(72, 36, 37, 38, 39, 40, 41, 42)
ISOBIT_WGMMA_STRUCT(80, 40, 41, 42, 43, 44, 45, 46)
ISOBIT_WGMMA_STRUCT(96, 48, 49, 50, 51, 52, 53, 54)
ISOBIT_WGMMA_STRUCT(128, 64, 65, 66, 67, 68, 69, 70)
ISOBIT_WGMMA_STRUCT(144, 72, 73, 74, 75, 76, 77, 78)
ISOBIT_WGMMA_STRUCT(160, 80, 81, 82, 83, 84, 85, 86)
ISOBIT_WGMMA_STRUCT(192, 96, 97, 98, 99, 100, 101, 102)
ISOBIT_WGMMA_STRUCT(208, 104, 105, 106, 107, 108, 109, 110)
ISOBIT_WGMMA_STRUCT(256, 128, 129, 130, 131, 132, 133, 134)

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_DEVICE_WGMMA_CUH_
