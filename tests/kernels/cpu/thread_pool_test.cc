// ThreadPool handles every item once, on workers with different numbers, in loop after loop.
#include "kernels/cpu/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace isobit::cpu {
namespace {

TEST(ThreadPoolTest, CoversEveryItemOnce) {
  for (const int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.num_threads(), threads);
    for (const int64_t count : {0, 1, 7, 64, 1000}) {
      for (const int64_t grain : {1, 3, 64, 5000}) {
        std::vector<std::atomic<int>> seen(static_cast<size_t>(count));
        pool.ParallelFor(count, grain, [&](int64_t begin, int64_t end, int worker) {
          EXPECT_LE(end - begin, grain);
          EXPECT_TRUE(worker >= 0 && worker < threads);
          for (int64_t i = begin; i < end; ++i) ++seen[static_cast<size_t>(i)];
        });
        EXPECT_TRUE(std::ranges::all_of(seen, [](const auto& n) { return n == 1; }));
      }
    }
  }
}

TEST(ThreadPoolTest, AWorkerNumberIsHeldByOneThreadAtATime) {
  ThreadPool pool(3);
  std::vector<std::atomic<bool>> taken(3);
  for (int loop = 0; loop < 200; ++loop) {
    pool.ParallelFor(30, 1, [&](int64_t, int64_t, int worker) {
      EXPECT_FALSE(taken[static_cast<size_t>(worker)].exchange(true));
      taken[static_cast<size_t>(worker)] = false;
    });
  }
}

TEST(ThreadPoolTest, OneThreadRunsInline) {
  ThreadPool pool(1);
  const std::thread::id caller = std::this_thread::get_id();
  pool.ParallelFor(10, 2,
                   [&](int64_t, int64_t, int) { EXPECT_EQ(std::this_thread::get_id(), caller); });
}

}  // namespace
}  // namespace isobit::cpu
