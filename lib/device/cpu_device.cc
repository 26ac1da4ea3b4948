// SPDX-License-Identifier: Apache-2.0
#include "lib/device/cpu_device.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "lib/base/text.h"
#include "lib/device/budget.h"
#include "lib/device/convert.h"
#include "lib/device/copy.h"

namespace reshard {
namespace {

class CpuMemory : public Device::Memory {
 public:
  CpuMemory(std::shared_ptr<Budget> budget, MutableBytes bytes) : budget_(std::move(budget)), bytes_(bytes) {}
  ~CpuMemory() override {
    if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
    budget_->give(std::ssize(bytes_));
  }
  CpuMemory(const CpuMemory&) = delete;
  CpuMemory& operator=(const CpuMemory&) = delete;

  DeviceBuffer buffer() const override { return {bytes_, bytes_}; }

 private:
  std::shared_ptr<Budget> budget_;
  MutableBytes bytes_;
};

class CpuStream : public Stream {
 public:
  Status upload(const DeviceBuffer&, Index) override { return {}; }
  Status download(const DeviceBuffer&, Index) override { return {}; }

  Status copy_box(const Dims& shape, Index element_bytes, const std::byte* from, const Dims& from_strides,
                  std::byte* to, const Dims& to_strides) override {
    reshard::copy_box(shape, element_bytes, from, from_strides, to, to_strides);
    return {};
  }
  Status convert(DType from, DType to, const std::byte* in, std::byte* out, Index n) override {
    reshard::convert(from, to, in, out, n);
    return {};
  }
  Status digest_box(const Dims& tensor_shape, const Box& box, Index element_bytes, const std::byte* data,
                    Digest* out) override {
    *out = reshard::digest_box(tensor_shape, box, element_bytes, data);
    return {};
  }
  Status wait() override { return {}; }
};

class CpuDevice : public Device {
 public:
  explicit CpuDevice(Index memory_cap) : budget_(std::make_shared<Budget>("cpu", memory_cap)) {}

  std::string_view name() const override { return "cpu"; }
  bool is_cpu() const override { return true; }

  Result<std::unique_ptr<Memory>> allocate(Index bytes, Sides) override {
    if (bytes < 0) return internal_error("cpu: memory: expected a size, got " + std::to_string(bytes));
    TRY(budget_->take(bytes));
    void* p = nullptr;
    if (bytes > 0) p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
      budget_->give(bytes);
      return io_error("cpu: cannot allocate " + human_bytes(bytes) + ": " + std::strerror(errno));
    }
    const MutableBytes memory(static_cast<std::byte*>(p), bytes);
    return std::unique_ptr<Memory>(std::make_unique<CpuMemory>(budget_, memory));
  }

  Result<std::unique_ptr<Stream>> stream() override { return std::unique_ptr<Stream>(std::make_unique<CpuStream>()); }

 private:
  std::shared_ptr<Budget> budget_;
};

}  // namespace

std::unique_ptr<Device> make_cpu_device(Index memory_cap) { return std::make_unique<CpuDevice>(memory_cap); }

Device& cpu_device() {
  static CpuDevice device(0);
  return device;
}

}  // namespace reshard
