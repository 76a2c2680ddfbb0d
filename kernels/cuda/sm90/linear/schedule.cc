// The schedule table, measured on an H200. It aims at equal loads on all multiprocessors and at as
// many bytes in flight as shared memory holds. The entries for up to 16 rows are fitted to whole
// decode steps, where other kernels run before and after: in a chain of equal layers, a block that
// leaves room for the next layer's blocks looks better than it is.
#include "kernels/cuda/sm90/linear/schedule.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/round_up.h"
#include "kernels/contract/constants.h"
#include "kernels/cuda/sm90/device/shared_memory.h"
#include "kernels/cuda/sm90/linear/layout.h"
#include "kernels/cuda/sm90/linear/stream_plan.h"

namespace isobit::cuda {
namespace {

constexpr int64_t kMaxStreamRows = 64;  // beyond, tiles are faster

// The K tiles (128 columns each) of a block's `leaves` leaves.
int64_t KTilesOf(const LinearShape& shape, int leaves) {
  int64_t k_tiles = 0;
  for (int l = 0; l < leaves; ++l) {
    k_tiles += std::max<int64_t>(1, CeilDiv(shape.bounds[l + 1] - shape.bounds[l], 128));
  }
  return k_tiles;
}

// As many stages as `bytes` of shared memory hold, but at most `used`, the number of K tiles.
int FillStages(StreamSchedule schedule, const LinearShape& shape, int64_t bytes, int64_t used) {
  int stages = 2;
  for (; stages < used; ++stages) {
    schedule.stages = stages + 1;
    if (StreamSharedBytes(schedule, shape) > bytes) break;
  }
  return stages;
}

// Stages for few rows of x and at most one block for each multiprocessor. Such blocks are launched
// early. Without a limit, two of them would go to the multiprocessor that the kernel before leaves
// first, and a long pass would wait for both. So each takes more than half of the shared memory,
// which spreads them, and leaves the rest to blocks of the next kernel, which then fetch their
// weights early.
int StagesAlone(StreamSchedule schedule, const LinearShape& shape, int64_t used) {
  const int64_t bytes = kBlockSharedBytes * 5 / 8 - kReservedSharedBytes;
  schedule.stages = FillStages(schedule, shape, bytes, used);
  while (StreamSharedBytes(schedule, shape) <= kBlockSharedBytes / 2) ++schedule.stages;
  return schedule.stages;
}

// Shared memory of a block that is alone on its multiprocessor for a pass of `used` K tiles. Half
// of it leaves room for a block of the next kernel, which then fetches its weights early. The
// longer the pass and the more of x it reads, the more it pays to have more bytes in flight.
int64_t BytesOfOne(int columns, int64_t used) {
  if (columns <= 16 || used <= (columns == 32 ? 16 : 8)) return kBlockSharedBytes / 2;
  return columns == 32 || used <= 32 ? kBlockSharedBytes * 3 / 4 : kBlockSharedBytes;
}

// Every block has all leaves and an equal share of the rows, so the blocks exchange no sums.
StreamSchedule Whole(const Card& card, const LinearShape& shape, int columns) {
  StreamSchedule schedule = {.columns = columns, .leaves = shape.num_leaves};
  const int64_t strips = CeilDiv(PackedRows(shape), 16);
  const int64_t rows_each = strips * 16 / card.multiprocessors;
  // Blocks of a multiprocessor. Several blocks finish their passes at different times, so that
  // weights arrive without a break. But each block reads x for itself, whereas a wide pass reads x
  // once for 128 rows.
  int64_t each = 1;
  if (columns <= 32) {
    each = rows_each >= 136 ? 3 : rows_each >= 66 && (rows_each < 90 || columns == 8) ? 2 : 1;
  }
  const bool wide_pays = columns == 64 || (rows_each >= 90 && rows_each < 136) ||
                         (columns == 16 && rows_each >= 160 && rows_each < 220) ||
                         (columns == 32 && rows_each >= 200);
  const bool wide = HasWideStream(columns, shape.sum) && wide_pays;
  if (wide) each = 1;
  schedule.blocks = static_cast<int>(card.multiprocessors * each);
  // All passes get the same length.
  const int64_t share = CeilDiv(strips, card.multiprocessors * each);
  const int64_t passes = CeilDiv(share, (wide ? 2 : 1) * kTileRows / 16);
  schedule.rows = static_cast<int>(CeilDiv(share, passes) * 16);
  const int64_t used = passes * KTilesOf(shape, shape.num_leaves);
  const bool one = each == 1 && share * 16 <= kTileRows;
  const int64_t bytes = one ? BytesOfOne(columns, used) : kBlockSharedBytes / each;
  schedule.stages = one && columns <= 16 && used > 8
                        ? StagesAlone(schedule, shape, used)
                        : FillStages(schedule, shape, bytes - kReservedSharedBytes, used);
  return schedule;
}

// The most stages of a block that shares its multiprocessor.
int MostStages(const LinearShape& shape, int columns, int64_t used) {
  if (columns > 16) return 4;
  if (shape.gated) return 5;  // with 8 columns it leaves room for a block of down_proj
  const bool chain = shape.sum == contract::LeafSum::kChain;
  if (columns == 8 && chain && used <= 8) return 6;
  return KTilesOf(shape, 1) == 5 ? 5 : 4;  // a leaf of five K tiles fits whole
}

// Passes of 64 rows. A cluster of num_leaves / leaves blocks shares each pass.
StreamSchedule Split(const Card& card, const LinearShape& shape, int columns, int leaves) {
  StreamSchedule schedule = {.columns = columns, .rows = kTileRows, .leaves = leaves};
  const int64_t blocks = NumTiles(shape) * (shape.num_leaves / leaves);
  const int64_t used = KTilesOf(shape, leaves);
  if (blocks > card.multiprocessors || (columns == 64 && used <= 8)) {
    schedule.stages =
        static_cast<int>(std::clamp<int64_t>(used, 2, MostStages(shape, columns, used)));
    return schedule;
  }
  if (columns <= 16 && used > 8 && used <= 16) {
    schedule.stages = StagesAlone(schedule, shape, used);
    return schedule;
  }
  const int64_t bytes = columns <= 16 && used <= 8 ? kBlockSharedBytes / 2 : kBlockSharedBytes;
  schedule.stages = FillStages(schedule, shape, bytes - kReservedSharedBytes, used);
  return schedule;
}

StreamSchedule ChooseStream(const Card& card, const LinearShape& shape, int64_t m) {
  const int columns = m <= 8 ? 8 : m <= 16 ? 16 : m <= 32 ? 32 : 64;
  const int64_t rows_each = PackedRows(shape) / card.multiprocessors;
  const int64_t tiles = NumTiles(shape);
  const bool tree = shape.sum == contract::LeafSum::kTree;
  // A block gets all leaves in two cases: there are enough rows for every multiprocessor; or the
  // sum is a chain of so few columns that exchanging sums would take longer than the products. For
  // few rows of x the exchange is short, and blocks that have a share of a short pass end sooner.
  const bool short_pass = columns <= 16 && KTilesOf(shape, shape.num_leaves) <= (tree ? 16 : 32);
  const bool enough_rows =
      rows_each >= (short_pass ? 64 : 35) && !(tree && columns == 32 && shape.k <= 2048);
  const bool few_columns = columns > 16 && !tree && shape.k <= 1024 && tiles >= 48;
  if (shape.num_leaves == 1 || enough_rows || few_columns) return Whole(card, shape, columns);
  // Otherwise a block gets the largest share of the leaves that still gives every multiprocessor
  // work. With few rows of x, sums are cheap to exchange, so more and smaller blocks pay. They also
  // pay if a leaf is a single K tile.
  const bool short_leaves = shape.bounds[1] <= 128;
  const int64_t wanted = columns == 8 && shape.k <= 4096 ? 160
                         : columns <= 32 || short_leaves ? 128
                                                         : 64;
  int leaves = shape.num_leaves / 2;
  while (leaves > 1 && tiles * (shape.num_leaves / leaves) < wanted) leaves /= 2;
  return Split(card, shape, columns, leaves);
}

// Whether this is the output head (the vocabulary): every multiprocessor gets at least one tile of
// 144 rows of the weight.
bool IsHead(const Card& card, const LinearShape& shape) {
  return shape.sum == contract::LeafSum::kChain && !shape.gated &&
         shape.n > 143 * card.multiprocessors && BlocksOf(shape).uniform;
}

// The schedule for 33 to 64 rows of x.
LinearSchedule ChooseMiddle(const Card& card, const LinearShape& shape) {
  LinearSchedule schedule = {.kind = LinearSchedule::Kind::kTile};
  if (IsHead(card, shape)) {
    schedule.tile = {.rows = 64, .columns = 144, .split = 1};
  } else {
    schedule.kind = LinearSchedule::Kind::kStream;
    schedule.stream = ChooseStream(card, shape, kMaxStreamRows);
  }
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

LinearSchedule ChooseLinear(const Card& card, const LinearShape& shape, int64_t m, bool mappable,
                            double push_us) {
  LinearSchedule schedule;
  if (!mappable || shape.k == 0 || !WholeSteps(shape)) return schedule;
  if (m > kMaxStreamRows) {
    schedule.kind = LinearSchedule::Kind::kTile;
    schedule.tile = ChooseTile(card, shape, m, push_us);
    return schedule;
  }
  if (m > 32) return ChooseMiddle(card, shape);
  schedule.kind = LinearSchedule::Kind::kStream;
  schedule.stream = ChooseStream(card, shape, m);
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
    return found ? absl::OkStatus() : refuse("no tile kernel of this size computes the shape");
  }
  const StreamSchedule& stream = schedule.stream;
  if (stream.columns != 8 && stream.columns != 16 && stream.columns != 32 && stream.columns != 64) {
    return refuse("the columns must be 8, 16, 32 or 64");
  }
  const bool wide = stream.leaves == shape.num_leaves && HasWideStream(stream.columns, shape.sum);
  const int max_rows = wide ? 2 * kTileRows : kTileRows;
  if (stream.rows < 16 || stream.rows > max_rows || stream.rows % 16 != 0) {
    return refuse(wide ? "the rows must be a multiple of 16 up to 128"
                       : "the rows must be a multiple of 16 up to 64");
  }
  if (stream.leaves < 1 || shape.num_leaves % stream.leaves != 0) {
    return refuse("a block's leaves must divide the shape's leaves");
  }
  if (stream.leaves == shape.num_leaves && stream.blocks < 1) {
    return refuse("there must be at least one block");
  }
  if (stream.stages < 2) return refuse("there must be at least two stages");
  if (StreamSharedBytes(stream, shape) > kBlockSharedBytes) {
    return refuse("it needs more shared memory than a block can have");
  }
  return absl::OkStatus();
}

std::string Describe(const LinearSchedule& schedule) {
  if (schedule.kind == LinearSchedule::Kind::kGeneral) return "general";
  if (schedule.kind == LinearSchedule::Kind::kTile) {
    return absl::StrCat("tile ", schedule.tile.rows, "x", schedule.tile.columns, " split ",
                        schedule.tile.split);
  }
  const StreamSchedule& stream = schedule.stream;
  return absl::StrCat("stream ", stream.columns, "x", stream.rows, " l", stream.leaves, " s",
                      stream.stages, " b", stream.blocks);
}

}  // namespace isobit::cuda
