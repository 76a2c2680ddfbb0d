// See mapped_memory.h. A range of addresses is reserved once; an allocation is mapped there, and
// unmapped to give it back (CUDA's virtual memory management).
#include "kernels/cuda/common/device/mapped_memory.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/base/round_up.h"
#include "common/base/status_macros.h"
#include "kernels/cuda/common/device/driver_function.h"

namespace isobit::cuda {
namespace {

struct Driver {
  decltype(&cuMemGetAllocationGranularity) granularity;
  decltype(&cuMemAddressReserve) reserve;
  decltype(&cuMemAddressFree) free_addresses;
  decltype(&cuMemCreate) create;
  decltype(&cuMemRelease) release;
  decltype(&cuMemMap) map;
  decltype(&cuMemUnmap) unmap;
  decltype(&cuMemSetAccess) set_access;

  static absl::StatusOr<Driver> Find() {
    Driver driver;
    const auto find = [](const char* name, auto& function) -> absl::Status {
      ISOBIT_ASSIGN_OR_RETURN(
          function, FindDriverFunction<std::remove_reference_t<decltype(function)>>(name));
      return absl::OkStatus();
    };
    ISOBIT_RETURN_IF_ERROR(find("cuMemGetAllocationGranularity", driver.granularity));
    ISOBIT_RETURN_IF_ERROR(find("cuMemAddressReserve", driver.reserve));
    ISOBIT_RETURN_IF_ERROR(find("cuMemAddressFree", driver.free_addresses));
    ISOBIT_RETURN_IF_ERROR(find("cuMemCreate", driver.create));
    ISOBIT_RETURN_IF_ERROR(find("cuMemRelease", driver.release));
    ISOBIT_RETURN_IF_ERROR(find("cuMemMap", driver.map));
    ISOBIT_RETURN_IF_ERROR(find("cuMemUnmap", driver.unmap));
    ISOBIT_RETURN_IF_ERROR(find("cuMemSetAccess", driver.set_access));
    return driver;
  }
};

absl::Status DriverStatus(CUresult result, const char* call, size_t bytes) {
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  const std::string text = absl::StrCat(call, " of ", bytes, " bytes: error ", result);
  return result == CUDA_ERROR_OUT_OF_MEMORY ? absl::ResourceExhaustedError(text)
                                            : absl::InternalError(text);
}

class MappedMemory final : public ReleasableMemory {
 public:
  static absl::StatusOr<std::unique_ptr<ReleasableMemory>> Create(
      int ordinal, size_t bytes, std::shared_ptr<std::atomic<size_t>> taken) {
    ISOBIT_ASSIGN_OR_RETURN(const Driver driver, Driver::Find());
    std::unique_ptr<MappedMemory> memory(new MappedMemory(driver, ordinal, std::move(taken)));
    ISOBIT_RETURN_IF_ERROR(memory->ReserveAddresses(bytes));
    ISOBIT_RETURN_IF_ERROR(memory->Restore());
    return memory;
  }
  ~MappedMemory() override {
    cudaDeviceSynchronize();  // as cudaFree does: no op uses it afterwards
    static_cast<void>(Release());
    if (address_ != nullptr) driver_.free_addresses(address(), bytes_);
  }

  absl::Status Release() override {
    if (released_) return absl::OkStatus();
    ISOBIT_RETURN_IF_ERROR(DriverStatus(driver_.unmap(address(), bytes_), "cuMemUnmap", bytes_));
    released_ = true;
    *taken_ -= bytes_;
    return DriverStatus(driver_.release(allocation_), "cuMemRelease", bytes_);
  }

  absl::Status Restore() override {
    if (!released_) return absl::OkStatus();
    ISOBIT_RETURN_IF_ERROR(
        DriverStatus(driver_.create(&allocation_, bytes_, &properties_, 0), "cuMemCreate", bytes_));
    CUresult result = driver_.map(address(), bytes_, 0, allocation_, 0);
    if (result == CUDA_SUCCESS) {
      const CUmemAccessDesc access = {properties_.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
      result = driver_.set_access(address(), bytes_, &access, 1);
      if (result != CUDA_SUCCESS) driver_.unmap(address(), bytes_);
    }
    if (result != CUDA_SUCCESS) {
      driver_.release(allocation_);
      return DriverStatus(result, "mapping", bytes_);
    }
    released_ = false;
    *taken_ += bytes_;
    return absl::OkStatus();
  }

 private:
  MappedMemory(const Driver& driver, int ordinal, std::shared_ptr<std::atomic<size_t>> taken)
      : driver_(driver), taken_(std::move(taken)) {
    properties_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties_.location = {CU_MEM_LOCATION_TYPE_DEVICE, ordinal};
  }

  absl::Status ReserveAddresses(size_t bytes) {
    size_t page = 0;
    ISOBIT_RETURN_IF_ERROR(
        DriverStatus(driver_.granularity(&page, &properties_, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
                     "cuMemGetAllocationGranularity", bytes));
    bytes_ = RoundUp(std::max<size_t>(bytes, 1), page);
    CUdeviceptr address = 0;
    ISOBIT_RETURN_IF_ERROR(
        DriverStatus(driver_.reserve(&address, bytes_, 0, 0, 0), "cuMemAddressReserve", bytes_));
    address_ = reinterpret_cast<std::byte*>(address);
    return absl::OkStatus();
  }
  CUdeviceptr address() const { return reinterpret_cast<CUdeviceptr>(address_); }

  const Driver driver_;
  CUmemAllocationProp properties_ = {};
  CUmemGenericAllocationHandle allocation_ = 0;
  const std::shared_ptr<std::atomic<size_t>> taken_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ReleasableMemory>> MapMemory(
    int ordinal, size_t bytes, std::shared_ptr<std::atomic<size_t>> taken) {
  return MappedMemory::Create(ordinal, bytes, std::move(taken));
}

}  // namespace isobit::cuda
