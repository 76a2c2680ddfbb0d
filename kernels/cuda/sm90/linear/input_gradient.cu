// See input_gradient.h. The tiles' first operand is dY, which lies K-major; the second one is W,
// [n, k], of which K is the n rows.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/base/round_up.h"
#include "common/base/status_macros.h"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/sm90/device/tensor_map.h"
#include "kernels/cuda/sm90/linear/find_kernel.h"
#include "kernels/cuda/sm90/linear/general_product.h"
#include "kernels/cuda/sm90/linear/input_gradient.h"
#include "kernels/cuda/sm90/linear/product.cuh"
#include "kernels/ops/linear.h"

namespace isobit::cuda {
namespace {

using tile::KMajor;
using tile::RowMajor;

// A unit's tile.
struct InputGradientUnit {
  int32_t row;
  int32_t column;
  int32_t first_segment;
  int32_t end_segment;
};

// The blocks of a part of so many rows: its last one may have fewer than four steps.
template <bool kRagged>
struct PartEnd {
  int32_t rows;
  __device__ __forceinline__ int StepsOf(int i) const {
    return kRagged ? (rows - i * kBlockColumns + contract::kMmaK - 1) / contract::kMmaK : 4;
  }
  __device__ __forceinline__ void Prepare(int, int) const {}
};

struct InputGradientWork {
  using XMajor = KMajor;
  using WeightMajor = RowMajor;
  using Unit = InputGradientUnit;
  template <int kColumns>
  static constexpr int kExtraBytes = 0;

  CUtensorMap dy;
  CUtensorMap weights[kMaxParts];
  tile::TileOutput out;
  tile::TileOrder order;
  int32_t units = 0;
  int32_t parts = 0;
  int32_t bounds[kMaxParts + 1] = {};  // the columns of dY that belong to a part
  int32_t blocks = 0;                  // of 64 columns of K, in all

  template <class Traits>
  __device__ __forceinline__ Unit At(int unit, int rank) const {
    const tile::TilePosition at = order.PositionOf(unit);
    return {(at.row_tile * Traits::kCluster + rank) * 128, at.column_tile * Traits::Size::kColumns,
            0, parts};
  }
  __device__ __forceinline__ int BlocksOf(int s) const {
    return (bounds[s + 1] - bounds[s] + kBlockColumns - 1) / kBlockColumns;
  }
  __device__ __forceinline__ tile::Boxes BoxesOf(const Unit& unit, int s) const {
    return {&dy, &weights[s], unit.row, bounds[s], unit.column, 0};
  }

  template <class Traits>
  __device__ __forceinline__ void Consume(const typename Traits::RingT& ring) const {
    using Size = typename Traits::Size;
    const int consumer = static_cast<int>(threadIdx.x) / 128 - 1;
    const int thread = static_cast<int>(threadIdx.x) % 128;
    tile::Multiplier<Size, XMajor, WeightMajor, Traits::kRagged, typename Traits::RingT> multiplier(
        ring, consumer, ring.extra());
    tile::Skew<Traits> skew = {ring, blocks >= Traits::RingT::kStages, consumer};
    for (int unit = blockIdx.x / Traits::kCluster; unit < units;
         unit += gridDim.x / Traits::kCluster) {
      const Unit at = At<Traits>(unit, static_cast<int>(blockIdx.x) % Traits::kCluster);
      skew.BeginUnit();
      float sums[Size::kValues] = {};
#pragma unroll 1
      for (int s = 0; s < parts; ++s) {
        const PartEnd<Traits::kRagged> end = {bounds[s + 1] - bounds[s]};
        multiplier.Hold(sums);
        multiplier.Chain(sums, BlocksOf(s), true, end, [&] {
          if (s == 0) skew.ReleaseSecond();
        });
      }
      const int row = at.row + consumer * 64 + thread / 32 * 16 + thread % 32 / 4;
      tile::StoreBf16<Size::kOctets, 1, true, tile::ClippedRows<Bf16>>(out, sums, row,
                                                                       at.column / 8);
    }
  }
};

template <int kColumns, bool kRagged, int kCluster>
using Traits = tile::ProductTraits<InputGradientWork, kColumns, kRagged, kCluster>;

struct Kernels {
  using LaunchFn = absl::Status (*)(const InputGradientWork&, const Stream&);
  template <size_t kIndex>
  static constexpr LaunchFn Launcher() {
    constexpr ProductSchedule schedule = kInputGradientTiles[kIndex];
    return tile::LaunchChains<Traits<schedule.columns, false, schedule.cluster>>;
  }
};

constexpr ProductSchedule kRaggedTile = {64, 1};

// Null: there is no such kernel. `ragged`: IsRagged.
Kernels::LaunchFn FindTile(const ProductSchedule& schedule, bool ragged) {
  if (!ragged) return FindKernel<kInputGradientTiles, Kernels>(schedule);
  return schedule == kRaggedTile ? tile::LaunchChains<Traits<64, true, 1>> : nullptr;
}

// Whether a part other than the last ends inside a block of 64.
bool IsRagged(const StackedWeight& weight) {
  for (int i = 0; i + 1 < weight.parts; ++i) {
    if (weight.rows[i] % kBlockColumns != 0) return true;
  }
  return false;
}

}  // namespace

bool HasInputGradientTiles(const InputGradientArgs& args) {
  const StackedWeight& weight = args.weight;
  bool fits = weight.n() > 0 && Mappable(args.dy, args.lddy) && Mappable(args.dx, weight.columns);
  for (int i = 0; i < weight.parts; ++i) {
    if (weight.rows[i] == 0) continue;
    fits = fits && Mappable(weight.data[i], weight.columns);
    // Otherwise two parts share a k16 step.
    const bool last = i + 1 == weight.parts;
    fits = fits && (last || weight.rows[i] % contract::kMmaK == 0);
  }
  return fits;
}

absl::Status LaunchInputGradientAs(const ProductSchedule& schedule, const InputGradientArgs& args,
                                   const Stream& stream) {
  const StackedWeight& weight = args.weight;
  const Kernels::LaunchFn launch = FindTile(schedule, IsRagged(weight));
  if (launch == nullptr || !HasInputGradientTiles(args)) {
    return absl::InvalidArgumentError(
        absl::StrCat("no kernel of ", schedule.columns, " columns, cluster ", schedule.cluster,
                     ", for the input gradient of a weight [", weight.n(), ", ", weight.columns,
                     "] of ", weight.parts, " parts and dy with leading dimension ", args.lddy));
  }
  InputGradientWork work;
  ISOBIT_ASSIGN_OR_RETURN(work.dy,
                          MapMatrix(args.dy, args.m, weight.n(), args.lddy, 128, kBlockColumns));
  for (int i = 0; i < weight.parts; ++i) {
    if (weight.rows[i] == 0) continue;
    ISOBIT_ASSIGN_OR_RETURN(work.weights[work.parts],
                            MapMatrix(weight.data[i], weight.rows[i], weight.columns,
                                      weight.columns, kBlockColumns, kBlockColumns));
    work.bounds[work.parts + 1] = work.bounds[work.parts] + static_cast<int32_t>(weight.rows[i]);
    ++work.parts;
    work.blocks += static_cast<int32_t>(CeilDiv(weight.rows[i], kBlockColumns));
  }
  work.order.rows = static_cast<int32_t>(CeilDiv(args.m, 128 * schedule.cluster));
  work.order.columns = static_cast<int32_t>(CeilDiv(weight.columns, schedule.columns));
  work.order.band = tile::kBandTiles / schedule.cluster;
  work.units = work.order.rows * work.order.columns;
  work.out.kind = LinearOutput::kBf16;
  work.out.target.y = args.dx;
  work.out.target.ldy = weight.columns;
  work.out.target.m = static_cast<int32_t>(args.m);
  work.out.target.n = static_cast<int32_t>(weight.columns);
  return launch(work, stream);
}

absl::Status LaunchGeneralInputGradient(const InputGradientArgs& args, const Stream& stream) {
  const StackedWeight& weight = args.weight;
  GeneralProduct product = {.rows = args.m,
                            .columns = weight.columns,
                            .a = args.dy,
                            .a_row = args.lddy,
                            .a_k = 1,
                            .ldb = weight.columns,
                            .b_transposed = true,
                            .bounds = {0, weight.n()},
                            .bf16_out = args.dx};
  product.b.parts = weight.parts;
  for (int i = 0; i < weight.parts; ++i) {
    product.b.data[i] = weight.data[i];
    product.b.bounds[i + 1] = product.b.bounds[i] + weight.rows[i];
  }
  return LaunchGeneralProduct(product, stream);
}

// dx = bf16(dy W), see InputGradientArgs; all pointers are to GPU memory. Needs no workspace. Fast
// if dy, lddy, dx, the weights and their columns are multiples of 16 bytes and the rows of every
// stacked matrix but the last are a multiple of 16; otherwise a slower kernel is used. INTERNAL:
// CUDA refused the launch.
absl::Status Run(const InputGradientArgs& args, const Stream& stream) {
  const StackedWeight& weight = args.weight;
  if (args.m == 0 || weight.columns == 0) return absl::OkStatus();
  if (!HasInputGradientTiles(args)) return LaunchGeneralInputGradient(args, stream);
  if (IsRagged(weight)) return LaunchInputGradientAs(kRaggedTile, args, stream);
  const ProductShape shape = {.row_tiles = CeilDiv(args.m, 128),
                              .columns = {weight.columns},
                              .blocks = CeilDiv(weight.n(), kBlockColumns)};
  ISOBIT_ASSIGN_OR_RETURN(const Card* const card, CardOf(stream));
  return LaunchInputGradientAs(ChooseProduct(*card, shape, kInputGradientTiles), args, stream);
}

}  // namespace isobit::cuda
