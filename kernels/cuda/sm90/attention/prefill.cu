// See prefill.h. Here is what does not depend on the head size.
#include <algorithm>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "kernels/cuda/sm90/attention/prefill.cuh"
#include "kernels/cuda/sm90/attention/prefill.h"
#include "kernels/cuda/sm90/device/tensor_map.h"
#include "kernels/ops/attention.h"
#include "kernels/ops/paged_kv.h"

namespace isobit::cuda {
namespace {

// Rows of a page that one box copies: as many as fit both the page and a tile, a multiple of 8,
// which is the swizzle's period. 0: the page size has no such divisor.
int32_t BoxRows(int32_t page_size, int32_t tile) {
  const int32_t power = page_size & -page_size;
  return power < 8 ? 0 : std::min(power, tile);
}

// The cache as one matrix of heads. The number of its pages is not known here, nor needed: copies
// never leave the pages that the tables name.
absl::StatusOr<CUtensorMap> MapCache(const Bf16* data, int32_t head_dim, int32_t box_rows) {
  return MapMatrix(data, INT32_MAX, head_dim, head_dim, box_rows, 64);
}

}  // namespace

bool HasPrefillSchedule(int32_t head_dim) {
  return head_dim == 64 || head_dim == 96 || head_dim == 128 || head_dim == 256;
}

absl::Status LaunchPrefillAttention(const AttentionArgs& args, const DeviceSequences& sequences,
                                    int32_t min_rows, const Stream& stream) {
  const PagedKv& kv = args.kv;
  if (!HasPrefillSchedule(kv.head_dim)) {
    return absl::InvalidArgumentError(absl::StrCat("no prefill schedule for head_dim ", kv.head_dim,
                                                   ": expected 64, 96, 128 or 256"));
  }
  if (!Mappable(kv.k, kv.head_dim) || !Mappable(kv.v, kv.head_dim)) {
    return absl::InvalidArgumentError("the KV cache is not aligned to 16 bytes");
  }
  if (args.heads == 0 || sequences.num_rows == 0) return absl::OkStatus();

  PrefillParams params = {};
  params.q = args.q;
  params.k = kv.k;
  params.v = kv.v;
  params.out = args.out;
  params.ldq = args.ldq;
  params.ldo = args.ldo;
  params.sequences = sequences;
  params.min_rows = std::max(min_rows, 1);
  params.heads_per_kv = args.heads / kv.kv_heads;
  params.inverse_heads_per_kv =
      static_cast<uint32_t>(((uint64_t{1} << 32) + params.heads_per_kv - 1) / params.heads_per_kv);
  params.kv_heads = kv.kv_heads;
  params.page_size = kv.page_size;
  params.box_rows = BoxRows(kv.page_size, contract::KvTile(kv.head_dim));
  params.window = args.window >= INT32_MAX / 2 ? 0 : static_cast<int32_t>(args.window);
  params.scale = args.scale;
  params.q_vectors = Mappable(args.q, args.ldq);
  params.out_vectors = Mappable(args.out, args.ldo);
  if (params.box_rows != 0) {
    const absl::StatusOr<CUtensorMap> k_map = MapCache(kv.k, kv.head_dim, params.box_rows);
    if (!k_map.ok()) return k_map.status();
    const absl::StatusOr<CUtensorMap> v_map = MapCache(kv.v, kv.head_dim, params.box_rows);
    if (!v_map.ok()) return v_map.status();
    params.k_map = *k_map;
    params.v_map = *v_map;
  }
  switch (kv.head_dim) {
    case 64:
      return LaunchPrefill<64>(params, stream);
    case 96:
      return LaunchPrefill<96>(params, stream);
    case 128:
      return LaunchPrefill<128>(params, stream);
    default:
      return LaunchPrefill<256>(params, stream);
  }
}

}  // namespace isobit::cuda
