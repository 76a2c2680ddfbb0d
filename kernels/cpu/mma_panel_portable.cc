// mma_panel for any processor: the wide tier alone, in loops that the compiler vectorises.
#include "kernels/cpu/mma_panel_block.h"
#include "kernels/cpu/mma_panel_variants.h"

namespace isobit::cpu {

void MmaPanelsPortable(const MmaArgs& args) {
  MmaPanels(args, [](const RowBlock&, int64_t, int64_t, const uint16_t*, int64_t, float*, int64_t) {
    return false;
  });
}

}  // namespace isobit::cpu
