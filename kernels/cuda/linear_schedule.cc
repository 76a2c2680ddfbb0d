// The schedule table, measured on an H200. Blocks of 132 multiprocessors are meant to be equally
// loaded, with as many bytes in flight as shared memory holds.
#include "kernels/cuda/linear_schedule.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/contract/constants.h"
#include "kernels/cuda/linear_layout.h"
#include "kernels/cuda/linear_stream.h"

namespace isobit::cuda {
namespace {

constexpr int64_t kMultiprocessors = 132;
constexpr int64_t kMaxSharedBytes = 227 * 1024;
constexpr int kMaxStages = 16;
constexpr int64_t kMaxStreamRows = 64;  // beyond, tiles are faster

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// As many stages as a block's share of a multiprocessor holds.
void FillStages(StreamSchedule& schedule, const LinearShape& shape, int64_t blocks_each) {
  schedule.stages = 2;
  while (schedule.stages < kMaxStages) {
    ++schedule.stages;
    if (StreamSharedBytes(schedule, shape) > kMaxSharedBytes / blocks_each - 1024) {
      --schedule.stages;
      return;
    }
  }
}

StreamSchedule ChooseStream(const LinearShape& shape, int64_t m) {
  StreamSchedule schedule;
  schedule.columns = m <= 8 ? 8 : m <= 16 ? 16 : m <= 32 ? 32 : 64;
  const int64_t rows = PackedRows(shape);
  schedule.rows = kTileRows;
  schedule.leaves = shape.num_leaves;
  schedule.blocks = static_cast<int>(kMultiprocessors);
  while (schedule.leaves > 1 &&
         CeilDiv(rows, kTileRows) * shape.num_leaves / schedule.leaves < 96) {
    schedule.leaves /= 2;
  }
  FillStages(schedule, shape, 1);
  return schedule;
}

}  // namespace

bool WholeSteps(const LinearShape& shape) {
  for (int l = 0; l < shape.num_leaves; ++l) {
    const bool whole = (shape.bounds[l + 1] - shape.bounds[l]) % contract::kMmaK == 0;
    if (!whole && shape.bounds[l + 1] != shape.k) return false;
  }
  return true;
}

LinearSchedule ChooseLinear(const LinearShape& shape, int64_t m, bool mappable) {
  LinearSchedule schedule;
  if (!mappable || shape.k == 0 || !WholeSteps(shape)) return schedule;
  if (m > kMaxStreamRows) {
    schedule.kind = LinearSchedule::Kind::kTile;
    schedule.tile = ChooseTile(shape, m);
    return schedule;
  }
  schedule.kind = LinearSchedule::Kind::kStream;
  schedule.stream = ChooseStream(shape, m);
  return schedule;
}

absl::Status CheckSchedule(const LinearSchedule& schedule, const LinearShape& shape,
                           bool mappable) {
  if (schedule.kind == LinearSchedule::Kind::kGeneral) return absl::OkStatus();
  const auto refuse = [&](const char* why) {
    return absl::InvalidArgumentError(absl::StrCat(Describe(schedule), ": ", why));
  };
  if (!mappable) return refuse("x or its leading dimension is not a multiple of 16 bytes");
  if (shape.k == 0) return refuse("x has no columns");
  if (!WholeSteps(shape)) return refuse("a leaf ends inside a k16 step");
  if (schedule.kind == LinearSchedule::Kind::kTile) {
    const std::vector<TileSchedule> tiles = TileSchedules(shape);
    const bool found = std::find(tiles.begin(), tiles.end(), schedule.tile) != tiles.end();
    return found ? absl::OkStatus() : refuse("the shape has no such tile");
  }
  const StreamSchedule& stream = schedule.stream;
  if (stream.columns != 8 && stream.columns != 16 && stream.columns != 32 && stream.columns != 64) {
    return refuse("columns");
  }
  if (stream.rows < 16 || stream.rows > kTileRows || stream.rows % 16 != 0) return refuse("rows");
  if (stream.leaves < 1 || shape.num_leaves % stream.leaves != 0) return refuse("leaves");
  if (stream.leaves == shape.num_leaves && stream.blocks < 1) return refuse("blocks");
  if (stream.stages < 2) return refuse("stages");
  if (StreamSharedBytes(stream, shape) > kMaxSharedBytes) return refuse("shared memory");
  return absl::OkStatus();
}

std::string Describe(const LinearSchedule& schedule) {
  if (schedule.kind == LinearSchedule::Kind::kGeneral) return "general";
  if (schedule.kind == LinearSchedule::Kind::kTile) {
    return absl::StrCat("tile 128x", schedule.tile.columns, " split ", schedule.tile.split);
  }
  const StreamSchedule& stream = schedule.stream;
  return absl::StrCat("stream ", stream.columns, "x", stream.rows, " l", stream.leaves, " s",
                      stream.stages, " b", stream.blocks);
}

}  // namespace isobit::cuda
